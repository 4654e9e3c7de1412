/* Numbers with their units, times in the viewer's own way of writing them, and what errors mean. Pure. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TIME = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit", second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit" });
const DAY_TIME = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const NONE = "–";

/** A number with three digits that count, and no more than its size wants. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return WHOLE.format(value);
  return String(Number(value.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3)));
}

export const whole = (value) => (value === null || value === undefined ? NONE : WHOLE.format(value));

export const rate = (value) => (value === null || value === undefined ? NONE : `${number(value)}/s`);

export const ms = (value) => {
  if (value === null || value === undefined) return NONE;
  return value >= 10_000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
};

export const share = (value) => (value === null || value === undefined ? NONE : `${number(value * 100)} %`);

export const score = (value) => `${(value * 100).toFixed(1)} %`;

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? WHOLE.format(size) : Number(size.toFixed(1))} ${units[unit]}`;
}

export const celsius = (value) => (value === null || value === undefined ? NONE : `${number(Math.round(value))} °C`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const parts = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "under 1 s";
  const said = parts.slice(first, first + 2).map(([size, unit], index, both) => {
    const rest = index === 0 ? seconds : seconds % both[0][0];
    return [Math.floor(rest / size), unit];
  });
  return said.filter(([count], index) => index === 0 || count > 0).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

/** A Date of unix seconds, of ISO text, or of a Date. */
export const date = (when) => (when instanceof Date ? when : new Date(typeof when === "number" ? when * 1000 : when));

export const time = (when) => TIME.format(date(when));

/** The time to the minute. */
export const minute = (when) => MINUTE.format(date(when));

/** The time of today; of other days with the day. */
export function dayTime(when) {
  const at = date(when);
  if (Number.isNaN(at.getTime())) return String(when);
  return at.toDateString() === new Date().toDateString() ? TIME.format(at) : DAY_TIME.format(at);
}

export const shape = (sides) => `[${sides.map((side) => (side < 0 ? "any" : side)).join(", ")}]`;

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

export const total = (counts) => Object.values(counts ?? {}).reduce((sum, count) => sum + count, 0);

/** What a refusal's code means, for somebody who has not read docs/errors.md. */
const MEANINGS = {
  queue_full: "refused: the queue was full",
  deadline_unmeetable: "refused: the answer would have been late",
  deadline_exceeded: "not run: their time was over",
  draining: "refused: the daemon was stopping",
  not_ready: "refused: the model was not ready",
  run_failed: "failed: the model could not run on them",
  tensor_mismatch: "refused: what was sent does not fit the model",
  decode_failed: "refused: what was sent could not be read",
  model_not_found: "refused: there is no such model",
  cancelled: "taken back by their sender",
  forbidden: "refused: not allowed",
  unauthenticated: "refused: no known token",
  unsupported: "refused: not offered here",
  sequence_lost: "refused: the state of their sequence was lost",
};

export const meaning = (code) => MEANINGS[code] ?? code.replaceAll("_", " ");

/** What to do about an error that an action ended with; "" where its own words say it. */
const ADVICE = {
  queue_full: "The device has more to do than it can. Wait a moment, and send it again.",
  deadline_unmeetable: "Give the request more time, or wait until the device has less to do.",
  deadline_exceeded: "Give the request more time.",
  draining: "The daemon stops. The page goes on when it is back.",
  forbidden: "Log in with a token that has the right, or do it on the device itself with edge-runtime.",
  unauthenticated: "Log in again.",
  unreachable: "Look whether the device is on, and whether this browser is in its network.",
  run_failed: "Send another input. If all fail, the model's own page shows its last errors.",
  unsupported: "",
};

export const advice = (code) => ADVICE[code] ?? "";

const STATES = {
  ready: ["good", "ready"],
  loading: ["busy", "loading"],
  unloading: ["busy", "unloading"],
  unloaded: ["quiet", "unloaded"],
  failed: ["bad", "failed"],
  building: ["busy", "engine is built"],
  converting: ["busy", "file is converted"],
  standby: ["quiet", "standing by"],
  not_served: ["warning", "not served"],
  on_demand: ["quiet", "on demand"],
};

/** Level and words of a version's state. */
export const stateOf = (name) => STATES[name] ?? ["quiet", String(name).replaceAll("_", " ")];
