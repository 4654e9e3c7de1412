/* The daemon as the page knows it: its operations, its stream of events, and whether it answers.

   `state` is replaced whole at each change, and views read it by `useDaemon()`. Nothing here draws. */

import { useEffect, useRef, useState } from "./html.js";

const HEADERS = { "x-edge-page": "1" };
const RETRY_MS = 2000;
const KEPT_EVENTS = 200;

let state = {
  session: null, // what /page/session says; null until it was read
  overview: null, // the last one that the stream brought
  events: [], // those that came while the page was open, newest first
  started: null, // unix seconds at which the daemon began
  generation: 0, // counts connections: what was read before may be old
  lostSince: null, // a Date while the daemon does not answer
  restartedAt: null, // a Date, once a daemon came that is not the one before
};
const listeners = new Set();

function change(fields) {
  state = { ...state, ...fields };
  listeners.forEach((listener) => listener(state));
}

/** The state, kept new. */
export function useDaemon() {
  const [seen, see] = useState(state);
  useEffect(() => {
    listeners.add(see);
    see(state);
    return () => listeners.delete(see);
  }, []);
  return seen;
}

/** What an operation, or a request for inference, was refused with. status: of HTTP; 0: nothing answered. */
export class CallError extends Error {
  constructor(fields, status) {
    super(fields.message || "the daemon gave no reason");
    this.code = fields.code || (status ? `http_${status}` : "unreachable");
    this.retryAfterMs = fields.retry_after_ms ?? null;
    this.status = status;
  }
}

/** The operations' result. Throws CallError. */
export async function call(operation, parameters = {}) {
  return (await post(`/page/call/${operation}`, parameters)).result;
}

/** Ask a model. body: an object for JSON, or a Blob, FormData or text. Returns the answer, and how long all took, in ms. */
export async function infer(model, body, type = null) {
  const isPlain = body.constructor === Object;
  const headers = { ...HEADERS };
  if (isPlain || type) {
    headers["Content-Type"] = isPlain ? "application/json" : type;
  }
  const began = performance.now();
  const response = await reach(`/v2/models/${encodeURIComponent(model)}/infer`, {
    method: "POST",
    headers,
    body: isPlain ? JSON.stringify(body) : body,
  });
  const answer = await read(response);
  return { answer, tookMs: performance.now() - began };
}

/** Ask a model that writes its answer in parts, each with its outputs by name. signal: aborted, or the loop left, it
    ends the request, which frees the model's slot. Throws CallError. */
export async function* written(model, body, signal) {
  const response = await reach(`/v2/models/${encodeURIComponent(model)}/generate_stream`, {
    method: "POST",
    headers: { ...HEADERS, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) await read(response);
  for await (const part of eventsOf(response.body)) {
    if (part.error !== undefined) throw new CallError({ message: part.error, code: part.code }, response.status);
    yield part;
  }
}

export async function login(token) {
  change({ session: await post("/page/login", { token }) });
  open();
}

export async function logout() {
  change({ session: await post("/page/logout", {}), overview: null });
  open();
}

/** Forget that the daemon was restarted: its viewer has read it. */
export function closeRestart() {
  change({ restartedAt: null });
}

/** Whether this daemon answers an operation: a browser writes each refusal into its console, so none is asked for in vain. */
export const offers = (session, operation) => session?.offers?.includes(operation) ?? false;

/** Call an operation, and again when the daemon was away, `everyMs` is over, or `again()` is called.
    name: null for none yet. Returns result, error, isBusy, again. */
export function useOperation(name, parameters = {}, { everyMs = 0, key = "" } = {}) {
  const { generation, lostSince } = useDaemon();
  const [told, tell] = useState({ result: null, error: null, isBusy: true });
  const [count, setCount] = useState(0);
  const latest = useRef(0);
  const asked = JSON.stringify([name, parameters, key]);
  const before = useRef(asked);
  useEffect(() => {
    if (name === null) return undefined;
    const number = ++latest.current;
    if (before.current !== asked) {
      before.current = asked;
      tell({ result: null, error: null, isBusy: true });
    }
    call(name, parameters).then(
      (result) => number === latest.current && tell({ result, error: null, isBusy: false }),
      (error) => number === latest.current && tell((last) => ({ ...last, error, isBusy: false })),
    );
    return () => { latest.current += 1; };
  }, [asked, generation, count]);
  useEffect(() => {
    if (!everyMs || lostSince) return undefined;
    const timer = setInterval(() => document.hidden || setCount((n) => n + 1), everyMs);
    return () => clearInterval(timer);
  }, [everyMs, lostSince === null]);
  return { ...told, again: () => setCount((n) => n + 1) };
}

/** Begin to listen. A page that nobody sees lets go of the stream, so that it costs the device nothing. */
export function start() {
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  open();
}

// ---- the stream ------------------------------------------------------------------------------------------------------

let source = null;
let timer = null;

async function open() {
  close();
  try {
    const session = await read(await reach("/page/session", { headers: HEADERS }));
    change({ session });
    if (session.needs_token) {
      change({ lostSince: null, overview: null });
      return;
    }
  } catch {
    lose();
    again();
    return;
  }
  close();
  source = new EventSource("/page/stream");
  source.addEventListener("hello", (event) => hello(JSON.parse(event.data)));
  source.addEventListener("overview", (event) => change({ overview: JSON.parse(event.data), lostSince: null }));
  source.addEventListener("event", (event) => {
    change({ events: [JSON.parse(event.data), ...state.events].slice(0, KEPT_EVENTS) });
  });
  source.addEventListener("bye", lose);
  source.addEventListener("error", () => {
    lose();
    again(); // browsers differ in when they connect again by themselves, so the page does
  });
}

function hello({ started }) {
  const isOther = state.started !== null && started !== state.started;
  change({
    started,
    generation: state.generation + 1,
    lostSince: null,
    restartedAt: isOther ? new Date() : state.restartedAt,
  });
}

function lose() {
  if (state.lostSince === null) change({ lostSince: new Date() });
}

function again() {
  close();
  timer = setTimeout(open, RETRY_MS);
}

function close() {
  clearTimeout(timer);
  if (source !== null) source.close();
  source = null;
}

// ---- requests --------------------------------------------------------------------------------------------------------

async function post(path, fields) {
  const headers = { ...HEADERS, "Content-Type": "application/json" };
  return read(await reach(path, { method: "POST", headers, body: JSON.stringify(fields) }));
}

async function reach(path, options) {
  try {
    return await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new CallError({ message: "the daemon did not answer; the page goes on trying" }, 0);
  }
}

async function read(response) {
  const text = await response.text();
  let fields = {};
  try {
    fields = JSON.parse(text);
  } catch {
    fields = { error: { message: text.slice(0, 500) } };
  }
  if (response.ok) return fields;
  if (response.status === 401 && state.session?.is_logged_in) open(); // the session has run out
  const told = typeof fields.error === "string" ? { message: fields.error, code: fields.code } : fields.error;
  throw new CallError(told ?? {}, response.status);
}

/** The data of server-sent events, each as JSON. */
async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch {
        throw new CallError({ message: "the daemon went away in the middle of the answer", code: "broken_off" }, 0);
      }
      if (piece.done) return;
      const events = (text + decoder.decode(piece.value, { stream: true })).split("\n\n");
      text = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield JSON.parse(event.slice("data: ".length));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
