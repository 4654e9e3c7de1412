/* The parts that views are made of: cards, facts, states, errors, buttons that ask first, code to copy. */

import { html, useEffect, useRef, useState } from "./html.js";
import { NONE, advice, date, dayTime, stateOf } from "./words.js";

/** A section with a heading. */
export function Card({ title, id, side, children, class: kind = "" }) {
  const name = id ?? title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
  return html`<section class="card ${kind}" aria-labelledby=${name}>
    <div class="card-head"><h2 id=${name}>${title}</h2>${side}</div>
    ${children}
  </section>`;
}

/** What the address asks for behind its #: one of the views, and a name; the first view where it names none of them. */
export function placeIn(views) {
  const [view = "", ...names] = location.hash.replace(/^#\/?/, "").split("/");
  let name = names.join("/");
  try {
    name = decodeURIComponent(name);
  } catch {
    // A name that somebody typed; it is looked for as it is.
  }
  return view in views ? { view, name } : { view: "", name: "" };
}

/** Names with values. rows: [name, value, note?]; a row without a value is left out. */
export function Facts({ rows }) {
  const said = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return html`<dl class="facts">
    ${said.map(
      ([name, value, note]) => html`<div key=${name}>
        <dt>${name}</dt>
        <dd>${value}${note && html`<span class="note">${note}</span>`}</dd>
      </div>`,
    )}
  </dl>`;
}

/** A level in words, with a mark that differs by more than its colour. */
export function Mark({ level, children }) {
  return html`<span class="mark ${level}"><span class="sign" aria-hidden="true"></span>${children}</span>`;
}

export function ModelState({ state }) {
  const [level, words] = stateOf(state);
  return html`<${Mark} level=${level}>${words}<//>`;
}

/** A share of something as a bar, with its words beside it. value: 0 to 1, or null. */
export function Meter({ name, value, level = "good", words, note }) {
  const isKnown = value !== null && value !== undefined;
  const width = isKnown ? `${Math.max(0, Math.min(1, value)) * 100}%` : "0";
  return html`<div class="tile">
    <div class="tile-name">${name}</div>
    <div class="tile-value">${words}</div>
    ${isKnown &&
    html`<div class="meter" aria-hidden="true"><div class=${level} style=${{ width }}></div></div>`}
    ${note && html`<div class="note">${note}</div>`}
  </div>`;
}

/** Why something did not work, and what to do. error: a CallError; again: to try it once more. */
export function Problem({ error, what, again }) {
  const more = advice(error.code);
  return html`<div class="problem" role="alert">
    <p><strong>${what}</strong></p>
    <p>${error.message}</p>
    ${more && html`<p>${more}</p>`}
    <p class="note">
      ${error.code}${error.retryAfterMs ? ` · may work again in ${Math.ceil(error.retryAfterMs / 1000)} s` : ""}
    </p>
    ${again && html`<button type="button" onClick=${again}>Try again</button>`}
  </div>`;
}

/** The result of an operation, or why there is none. children: (result) -> what it looks like. */
export function Told({ told, what, children }) {
  if (told.result !== null) return children(told.result);
  if (told.error !== null) return html`<${Problem} error=${told.error} what=${what} again=${told.again} />`;
  return html`<p class="note" role="status">Reading…</p>`;
}

/** A button for work that may last. ask: what to ask before; act: returns a promise. isOffered: false leaves what it said. */
export function ActionButton({ label, busy, act, ask, kind = "", done, isOffered = true }) {
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [said, say] = useState("");
  const dialog = useRef(null);
  useEffect(() => { if (isOffered) say(""); }, [isOffered]);
  const begin = async () => {
    dialog.current?.close();
    setBusy(true);
    setError(null);
    say("");
    try {
      const result = await act();
      say(typeof done === "function" ? done(result) : done ?? "");
    } catch (failed) {
      setError(failed);
    }
    setBusy(false);
  };
  return html`<span class="action">
    <button type="button" class=${kind} disabled=${isBusy} aria-busy=${isBusy} hidden=${!isOffered && !isBusy}
      onClick=${() => (ask ? dialog.current.showModal() : begin())}>${isBusy ? busy : label}</button>
    ${ask &&
    html`<dialog ref=${dialog} aria-label=${ask.title}>
      <h2>${ask.title}</h2>
      <p>${ask.text}</p>
      <div class="buttons">
        <button type="button" class="main" onClick=${begin}>${label}</button>
        <button type="button" onClick=${() => dialog.current.close()}>Leave it</button>
      </div>
    </dialog>`}
    <span role="status" class="said">${said}</span>
    ${error && html`<${Problem} error=${error} what=${`${label} did not work.`} />`}
  </span>`;
}

/** Text to copy. */
export function Code({ text, name }) {
  const [isCopied, setCopied] = useState(false);
  const place = useRef(null);
  useEffect(() => setCopied(false), [text]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Browsers keep the clipboard from pages of plain HTTP; what is selected there can be copied by hand.
      getSelection().selectAllChildren(place.current);
      if (!document.execCommand("copy")) return;
    }
    setCopied(true);
  };
  return html`<div class="code">
    <pre tabindex="0" role="region" aria-label=${name}><code ref=${place}>${text}</code></pre>
    <button type="button" onClick=${copy} aria-label=${`Copy: ${name}`}>${isCopied ? "Copied" : "Copy"}</button>
  </div>`;
}

/** One of a few. choices: [value, label]. */
export function Choice({ name, label, choices, value, onChange }) {
  return html`<fieldset class="choice">
    <legend>${label}</legend>
    ${choices.map(
      ([each, words]) => html`<label key=${each} class=${each === value ? "chosen" : ""}>
        <input type="radio" name=${name} value=${each} checked=${each === value} onChange=${() => onChange(each)} />
        ${words}
      </label>`,
    )}
  </fieldset>`;
}

/** A time of the viewer's own place. */
export function Time({ at }) {
  const when = date(at);
  const iso = Number.isNaN(when.getTime()) ? undefined : when.toISOString();
  return html`<time datetime=${iso}>${dayTime(at)}</time>`;
}

/** A table whose rows become cards on a narrow screen; its roles are said since browsers drop those of a grid. columns: [title, row -> cell, class?]; the first names a row.
    Classes: "number"; "minor", left out on a narrow screen; "long", which has a line of its own there. */
export function Table({ caption, columns, rows, keyOf, empty = "None." }) {
  if (rows.length === 0) return html`<p class="note">${empty}</p>`;
  return html`<table role="table">
    <caption class="unseen">${caption}</caption>
    <thead role="rowgroup">
      <tr role="row">
        ${columns.map(([title, , kind = ""]) => html`<th key=${title} scope="col" role="columnheader" class=${kind}>${title || html`<span class="unseen">Kind</span>`}</th>`)}
      </tr>
    </thead>
    <tbody role="rowgroup">
      ${rows.map(
        (row, index) => html`<tr role="row" key=${keyOf ? keyOf(row) : index}>
          ${columns.map(([title, cell, kind = ""], at) =>
            at === 0
              ? html`<th key=${title} scope="row" role="rowheader" class=${kind}>${cell(row)}</th>`
              : html`<td key=${title} role="cell" class=${kind} data-name=${title}>${cell(row) ?? NONE}</td>`,
          )}
        </tr>`,
      )}
    </tbody>
  </table>`;
}

/** Why the buttons are not here. */
export function MayNot({ session }) {
  return html`<p class="note">
    You may look, and change nothing.${" "}
    ${session?.is_logged_in
      ? "Log out, and in again with a token that has the right control."
      : "The daemon lets this page change things where it is started with --allow-control."}
  </p>`;
}
