/* Overview: how the device is, each model, fifteen minutes of curves, and what happens. */

import { html } from "./html.js";
import { useDaemon, useOperation } from "./daemon.js";
import { Card, Mark, Meter, ModelState, Table, Time } from "./parts.js";
import { Curve, CurvesTable } from "./curves.js";
import { bytes, celsius, duration, meaning, ms, number, plural, rate, share, total, whole } from "./words.js";

const SAMPLE_MS = 5000;
const SHOWN_EVENTS = 6;
const LONG = 80;
const FULL = 0.9;
const HOT_CELSIUS = 85;

export function Overview() {
  const { overview } = useDaemon();
  const history = useOperation("history", {}, { everyMs: SAMPLE_MS });
  const before = useOperation("events", { count: SHOWN_EVENTS });
  if (overview === null) return html`<h1 class="unseen">Overview</h1><p class="note" role="status">Asking the daemon…</p>`;
  return html`
    <${Health} overview=${overview} />
    <${Machine} machine=${overview.machine} />
    ${history.result && html`<${LastMinutes} history=${history.result} />`}
    <${Models} models=${overview.models} />
    ${overview.update && html`<${UnderWay} update=${overview.update} />`}
    <${LastEvents} told=${before.result ?? []} />
  `;
}

function Health({ overview }) {
  const { all } = overview;
  const [head, why] = shortened(overview.sentence);
  return html`<section class="health ${overview.level}" aria-labelledby="health">
    <h1 id="health"><${Mark} level=${overview.level}>${head}<//></h1>
    ${why && html`<p>${why}</p>`}
    <p>${plural(all.requests, "request")} since the daemon began ${duration(overview.uptime_s)} ago.</p>
    <details>
      <summary>Profile ${overview.profile.name}</summary>
      <p>${overview.profile.reason}</p>
      <ul class="bare" aria-label="Addresses">${overview.endpoints.map((each) => html`<li key=${each}><code>${each}</code></li>`)}</ul>
    </details>
  </section>`;
}

/** A sentence as a heading, and its reason below where it is long. */
function shortened(sentence) {
  const at = sentence.length > LONG ? sentence.indexOf(": ") : -1;
  return at < 0 ? [sentence, ""] : [`${sentence.slice(0, at)}.`, sentence.slice(at + 2)];
}

function Machine({ machine }) {
  const used = machine.memory_bytes - machine.memory_available_bytes;
  const memory = used / machine.memory_bytes;
  const budget = machine.models_budget_bytes;
  const ofBudget = budget ? machine.models_memory_bytes / budget : null;
  const disk = machine.disk_bytes ? 1 - machine.disk_free_bytes / machine.disk_bytes : null;
  const level = (value) => (value > FULL ? "warning" : "good");
  const heat = machine.temperature_celsius;
  return html`<section class="tiles" aria-label="The device">
    <${Meter} name="Cores" value=${machine.cpu_share} level=${level(machine.cpu_share)}
      words=${machine.cpu_share === null ? plural(machine.cores, "core") : `${share(machine.cpu_share)} of ${machine.cores}`}
      note=${`${machine.daemon_cores < 0.01 ? "under 0.01" : number(machine.daemon_cores)} of a core by the daemon`} />
    <${Meter} name="Memory" value=${memory} level=${level(memory)}
      words=${`${bytes(used)} of ${bytes(machine.memory_bytes)}`}
      note=${`${bytes(machine.daemon_memory_bytes)} by the daemon`} />
    <${Meter} name="Models" value=${ofBudget} level=${level(ofBudget)}
      words=${bytes(machine.models_memory_bytes)}
      note=${budget ? `of ${bytes(budget)} they may take` : "no budget is set"} />
    <${Meter} name="Temperature" value=${heat === null ? null : heat / 100}
      level=${machine.is_throttled || heat > HOT_CELSIUS ? "warning" : "good"} words=${heat === null ? "not told" : celsius(heat)}
      note=${machine.is_throttled ? "the device slows down to cool" : machine.is_throttled === false ? "not slowed down" : null} />
    <${Meter} name="Disk" value=${disk} level=${level(disk)} words=${`${bytes(machine.disk_free_bytes)} free`}
      note=${machine.disk_bytes ? `of ${bytes(machine.disk_bytes)}` : null} />
  </section>`;
}

/** Curves of a history, of one model or all. */
export function LastMinutes({ history }) {
  const curves = [
    ["Requests", history.rate, rate, "--line-1"],
    ["95 of 100 answered within", history.p95_ms, ms, "--line-2"],
    ["Refused", history.refused_rate, rate, "--line-3"],
  ];
  return html`<${Card} title="The last 15 minutes">
    <div class="curves">
      ${curves.map(
        ([title, values, words, colour]) => html`<${Curve} key=${title} title=${title} times=${history.time} values=${values} words=${words} colour=${colour} />`,
      )}
    </div>
    <${CurvesTable} times=${history.time} columns=${curves} />
  <//>`;
}

function Models({ models }) {
  const columns = [
    ["Model", (each) => html`<a href=${`#/model/${encodeURIComponent(each.name)}`}>${each.name}</a>`],
    ["State", stateCell, "long"],
    ["Version", (each) => each.version, "number minor"],
    ["Runs by", (each) => html`${each.backend}${each.precision ? ` ${each.precision}` : ""}<span class="note">${host(each)}</span>`, "minor"],
    ["Rate", (each) => rate(each.rate), "number"],
    ["p50", (each) => ms(each.p50_ms), "number minor"],
    ["p95", (each) => ms(each.p95_ms), "number"],
    ["p99", (each) => ms(each.p99_ms), "number minor"],
    ["Waiting", (each) => whole(each.queue_rows ?? 0), "number minor"],
    ["Refused", (each) => html`<${Refused} counts=${each.refused} />`, "number"],
  ];
  return html`<${Card} title="Models" class="flush">
    <${Table} caption="Models" columns=${columns} rows=${models} keyOf=${(each) => `${each.name} ${each.version} ${each.path ?? ""}`}
      empty="No model yet. Copy one into the models folder, as NAME/1/model.onnx." />
  <//>`;
}

export function Refused({ counts }) {
  const said = Object.entries(counts ?? {});
  if (said.length === 0) return "0";
  const words = said.map(([code, count]) => `${whole(count)} ${meaning(code)}`).join("; ");
  return html`<span title=${words}>${whole(total(counts))}<span class="unseen">: ${words}</span></span>`;
}

function stateCell({ state, reason }) {
  const isPlain = state === "ready" || !reason; // why a model is as it is stands on its own page
  return html`<${ModelState} state=${state} />${!isPlain && html`<span class="note clip">${reason}</span>`}`;
}

function host({ state, backend, device, host: told }) {
  const where = device && device !== "CPU" ? ` on ${device}` : "";
  if (state !== "ready" || !backend) return null;
  if (!told) return `in the daemon${where}`;
  return `own process${where}${told.restarts ? `, begun again ${plural(told.restarts, "time")}` : ""}`;
}

function UnderWay({ update }) {
  const step = update.under_way;
  if (!step) return null;
  return html`<${Card} title="An update is under way">
    <p>${step.model} version ${step.version}: ${String(step.state).replaceAll("_", " ")}. ${step.detail}
      ${" "}<a href="#/updates">Updates</a></p>
  <//>`;
}

function LastEvents({ told }) {
  const { events } = useDaemon();
  const known = new Set(events.map((each) => each.id));
  const shown = [...events, ...told.filter((each) => !known.has(each.id))].slice(0, SHOWN_EVENTS);
  return html`<${Card} title="What happened last" side=${html`<a href="#/log">All</a>`}>
    ${shown.length === 0 && html`<p class="note">Nothing yet.</p>`}
    <ul class="events">
      ${shown.map(
        (each) => html`<li key=${each.id}>
          <${Time} at=${each.time} /> <${Mark} level=${each.level === "error" ? "bad" : each.level === "warning" ? "warning" : "quiet"}>
            <span class="unseen">${each.level}: </span>${each.model && `${each.model}: `}${each.what}<//>
        </li>`,
      )}
    </ul>
  <//>`;
}
