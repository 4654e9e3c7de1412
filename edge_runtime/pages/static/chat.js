/* A talk with a language model: what was said, each answer as it is written, and how quick that is.

   What was said is kept while the page is open, for each model; it is sent anew with each message, as such models want. */

import { html, useEffect, useRef, useState } from "./html.js";
import { CallError, written } from "./daemon.js";
import { Card, Problem } from "./parts.js";
import { chatOf, SENTENCES } from "./requests.js";
import { ms, number, plural, whole } from "./words.js";

const kept = new Map(); // by model and kind: turns and settings
const NEAR_END = 80; // pixels: who reads further up is left there
let count = 0;
const NOTHING = { turns: [], settings: { system: "", max_tokens: "", temperature: "", timeout_ms: "" } };

/** Forget what was said: somebody else may log in. */
export const forgetTalks = () => kept.clear();

/** side: the choice of what to send. onSent: takes the request, for who shows it elsewhere. */
export function Chat({ model, kind, side, onSent }) {
  const key = `${kind} ${model}`;
  const [{ turns, settings }, keep] = useState(kept.get(key) ?? NOTHING);
  const [message, write] = useState("");
  const [problem, setProblem] = useState(null);
  const under = useRef(null); // the AbortController of the answer under way
  const log = useRef(null);
  const field = useRef(null);
  const seen = useRef(0); // turns that were scrolled to
  const isChat = kind === "chat";
  const isWriting = turns.at(-1)?.state === "writing";

  // Kept beside the view too: an answer whose view was left has an end there.
  const change = (how) => {
    const now = how(kept.get(key) ?? NOTHING);
    kept.set(key, now);
    keep(now);
  };
  const setTurn = (number, fields) => change((now) => ({ ...now, turns: now.turns.map((each) => (each.number === number ? { ...each, ...fields } : each)) }));

  useEffect(() => () => under.current?.abort(), []);
  useEffect(() => {
    const place = log.current;
    if (!place) return;
    const isNew = seen.current !== turns.length;
    seen.current = turns.length;
    if (isNew || place.scrollHeight - place.scrollTop - place.clientHeight < NEAR_END) place.scrollTop = place.scrollHeight;
  }, [turns]);

  const send = async (event) => {
    event?.preventDefault();
    if (isWriting || !message.trim()) return;
    const before = isChat ? turns : [];
    const request = chatOf(kind, before, message, settings);
    const began = performance.now();
    const passed = () => performance.now() - began;
    const stop = new AbortController();
    const mine = ++count;
    under.current = stop;
    setProblem(null);
    write("");
    field.current?.focus();
    onSent(request);
    change((now) => ({ ...now, turns: [...now.turns, { number: mine, question: message, text: "", state: "writing" }] }));
    let text = "";
    let firstMs = null;
    // Drawn at most once a frame: a model that writes quicker than the browser draws must leave it time for a click on Stop.
    let frame = 0;
    const draw = () => {
      frame = 0;
      setTurn(mine, { text, firstMs });
    };
    const end = (state, fields = {}) => {
      cancelAnimationFrame(frame);
      setTurn(mine, { state, text, firstMs, tookMs: passed(), ...fields });
    };
    try {
      for await (const part of written(model, request.body, stop.signal)) {
        text += part.text ?? "";
        if (firstMs === null && part.text) firstMs = passed();
        if (part.finish_reason) {
          end("done", { reason: part.finish_reason, usage: part.usage ?? [0, 0, 0] });
          return;
        }
        frame ||= requestAnimationFrame(draw);
      }
      throw new CallError({ message: "the answer ended without its end; the model's page may say why", code: "broken_off" }, 0);
    } catch (error) {
      if (stop.signal.aborted) {
        end("stopped");
        return;
      }
      end("failed", { error });
      setProblem(error);
      if (!text) write((now) => now || message); // nothing was said: it can be sent again
    } finally {
      if (under.current === stop) under.current = null;
    }
  };

  const set = (name) => (event) => {
    const value = event.target.value;
    change((now) => ({ ...now, settings: { ...now.settings, [name]: value } }));
  };
  const clear = () => {
    under.current?.abort();
    change((now) => ({ ...now, turns: [] }));
    setProblem(null);
    onSent(null);
    field.current?.focus();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };

  const last = turns.at(-1);
  return html`<${Card} title=${isChat ? "Chat" : "A text to go on with"} id="talk" side=${side}>
    ${turns.length > 0 &&
    html`<div class="talk" role="log" aria-label="What was said" aria-busy=${isWriting} tabindex="0" ref=${log}>
      ${turns.map((turn) => html`<${Turn} key=${turn.number} turn=${turn} model=${model} isChat=${isChat} />`)}
    </div>`}
    <p class="note" role="status">${isWriting ? (last.firstMs ? `${model} writes; its first words came after ${ms(last.firstMs)}.` : `${model} reads…`) : told(last)}</p>
    ${problem && html`<${Problem} error=${problem} what=${last?.text ? `${model} did not end its answer.` : `${model} did not answer.`} />`}
    <form onSubmit=${send}>
      <label for="message">${isChat ? "Message" : "Text"}</label>
      <textarea id="message" class="words" rows="3" spellcheck="true" aria-describedby="keys" ref=${field} value=${message}
        onInput=${(event) => write(event.target.value)} onKeyDown=${onKey}></textarea>
      <p id="keys" class="note">Enter sends it; Shift and Enter begin a new line.</p>
      <div class="buttons">
        <button type="submit" class="main" disabled=${isWriting || !message.trim()}>Send</button>
        ${isWriting && html`<button type="button" onClick=${() => under.current?.abort()}>Stop</button>`}
        <button type="button" onClick=${() => { write(SENTENCES[kind]); field.current?.focus(); }}>Use an example</button>
        ${turns.length > 0 && html`<button type="button" onClick=${clear}>Begin anew</button>`}
      </div>
      <div class="settings">
        <label class="inline">At most <input type="number" min="1" step="1" inputmode="numeric" placeholder="any" value=${settings.max_tokens} onInput=${set("max_tokens")} /> tokens</label>
        <label class="inline">Temperature <input type="number" min="0" max="100" step="any" inputmode="decimal" placeholder="its own" value=${settings.temperature} onInput=${set("temperature")} /></label>
        <label class="inline">Answer within <input type="number" min="1" max="3600000" inputmode="numeric" placeholder="any" value=${settings.timeout_ms} onInput=${set("timeout_ms")} /> ms</label>
      </div>
      ${isChat && html`<details open=${Boolean(settings.system)}><summary>What it is told first</summary>
        <label for="system" class="unseen">What it is told first</label>
        <textarea id="system" class="words" rows="2" placeholder="Answer in one sentence." value=${settings.system} onInput=${set("system")}></textarea>
      </details>`}
    </form>
  <//>`;
}

/** One message and its answer. What a model wrote is text, whatever stands in it. */
function Turn({ turn, model, isChat }) {
  const [thought, said] = isChat ? parted(turn.text) : ["", turn.text];
  return html`
    <div class="turn asked"><h3>You</h3><p>${turn.question}</p></div>
    <div class="turn answered"><h3>${model}</h3>
      ${thought && html`<details><summary>What it thought first</summary><p class="note">${thought}</p></details>`}
      <p>${said}${turn.state === "writing" && html`<span class="pen" aria-hidden="true"></span>`}</p>
      ${turn.state !== "writing" && html`<p class="note">${numbers(turn)}</p>`}
    </div>
  `;
}

const OPEN = "<think>";
const CLOSE = "</think>";

/** What a model thought aloud before its answer, and the answer. */
function parted(text) {
  const begun = text.trimStart();
  if (!begun.startsWith(OPEN)) return ["", text];
  const end = begun.indexOf(CLOSE);
  return end < 0 ? [begun.slice(OPEN.length).trim(), ""] : [begun.slice(OPEN.length, end).trim(), begun.slice(end + CLOSE.length).trimStart()];
}

/** How quick an answer was. */
function numbers({ state, reason, usage, firstMs, tookMs }) {
  const parts = [];
  if (usage) {
    const [read, wrote, cached] = usage;
    // Those behind the first one, in the time since: what a reader waits for while it is written.
    const rate = wrote > 1 && tookMs > firstMs ? (wrote - 1) / ((tookMs - firstMs) / 1000) : null;
    parts.push(plural(wrote, "token"), rate && `${number(rate)} tokens/s`, `${whole(read)} read${cached ? `, ${whole(cached)} of them kept from before` : ""}`);
  }
  if (firstMs) parts.push(`the first after ${ms(firstMs)}`);
  parts.push(`${ms(tookMs)} in all`);
  if (state === "stopped") parts.unshift("stopped");
  if (state === "failed") parts.unshift("not whole");
  if (reason === "length") parts.push("cut at the most tokens that it may have");
  return parts.filter(Boolean).join(" · ");
}

/** What happened last, for who hears the page. */
function told(turn) {
  if (!turn) return "Nothing was sent yet.";
  return { done: "The answer is whole.", stopped: "Stopped; the model writes no more.", failed: "" }[turn.state];
}
