/* Log and doctor: last warnings with what to do, and a bundle for a bug report. */

import { html, useState } from "./html.js";
import { offers, useDaemon, useOperation } from "./daemon.js";
import { Card, Choice, Facts, Mark, Time, Told } from "./parts.js";

const READ_EVENTS = 300;
const LEVELS = { error: ["bad", "Error"], warning: ["warning", "Warning"], info: ["quiet", "Note"] };

export function Log() {
  const { session } = useDaemon();
  const [level, choose] = useState("warning");
  const told = useOperation("events", { count: READ_EVENTS });
  const { events } = useDaemon();
  const isShown = (each) => level === "info" || each.level !== "info";
  return html`
    <h1>Log and doctor</h1>
    ${offers(session, "doctor") && html`<${Doctor} />`}
    <${Card} title="What happened" side=${html`<${Choice} name="level" label="Show" value=${level} onChange=${choose}
      choices=${[["warning", "Warnings and errors"], ["info", "All"]]} />`}>
      <${Told} told=${told} what="The log could not be read.">
        ${(result) => {
          const known = new Set(events.map((each) => each.id));
          const all = [...events, ...result.filter((each) => !known.has(each.id))].filter(isShown);
          return html`<${EventList} events=${all} empty=${level === "info" ? "Nothing yet." : "No warning and no error since the daemon began."} />`;
        }}
      <//>
    <//>
  `;
}

/** Events, each with what to do. */
export function EventList({ events, empty }) {
  if (events.length === 0) return html`<p class="note">${empty}</p>`;
  return html`<ul class="log">
    ${events.map((each) => {
      const [level, word] = LEVELS[each.level] ?? LEVELS.info;
      const fields = Object.entries(each.fields ?? {}).filter(([, value]) => value !== "" && value !== null);
      return html`<li key=${each.id} class=${level}>
        <p class="when"><${Time} at=${each.time} /> <${Mark} level=${level}>${word}<//>
          ${each.model && html`<a href=${`#/model/${encodeURIComponent(each.model)}`}>${each.model}${each.version ? ` version ${each.version}` : ""}</a>`}
          ${each.repeated > 0 && html`<span class="note">and ${each.repeated} times more</span>`}</p>
        <p>${each.what}</p>
        ${each.advice && html`<p class="advice">${each.advice}</p>`}
        ${each.docs && html`<p class="note">The handbook has more: ${each.docs}</p>`}
        ${fields.length > 0 && html`<details><summary>Details</summary><${Facts} rows=${fields.map(([name, value]) => [name, String(value)])} /></details>`}
      </li>`;
    })}
  </ul>`;
}

function Doctor() {
  const [isAsked, ask] = useState(false);
  const told = useOperation(isAsked ? "doctor" : null);
  return html`<${Card} title="Doctor">
    <p>A bundle for a bug report: what runs, its configuration, the last of the log. Tokens, passwords and keys are left out.${" "}
      <code>edge-runtime doctor</code> makes the same.</p>
    <div class="buttons">
      <a class="button main" href="/page/doctor" download>Download the bundle</a>
      <button type="button" onClick=${() => (isAsked ? told.again() : ask(true))}>Look at it here</button>
    </div>
    ${isAsked && html`<${Told} told=${told} what="The device could not be looked at.">${(result) => html`<${Findings} result=${result} />`}<//>`}
  <//>`;
}

function Findings({ result }) {
  return html`<section aria-label="What the doctor found">
    ${Object.entries(result.files).map(
      ([name, text]) => html`<details key=${name}>
        <summary>${name}</summary>
        <pre class="report" tabindex="0" role="region" aria-label=${name}>${text}</pre>
      </details>`,
    )}
  </section>`;
}
