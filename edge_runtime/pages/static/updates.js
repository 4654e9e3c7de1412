/* Updates: what runs, what is offered, what was refused and why, what is under way, and what was. */

import { html, useState } from "./html.js";
import { call, offers, useDaemon, useOperation } from "./daemon.js";
import { ActionButton, Card, Facts, Mark, MayNot, Table, Time, Told } from "./parts.js";
import { bytes, duration, plural, share } from "./words.js";

const WATCH_MS = 2000;
const READ_HISTORY = 50;
const STATES = {
  idle: "nothing is under way",
  verifying: "signatures are checked",
  staging: "files are fetched",
  warming: "tried in a child process",
  observing: "serves, and is observed",
  rolling_back: "taken back",
  rejecting: "refused",
};

export function Updates() {
  const { session, overview } = useDaemon();
  const isOffered = offers(session, "update_status");
  const told = useOperation(isOffered ? "update_status" : null, {}, { everyMs: WATCH_MS });
  const history = useOperation(isOffered ? "update_history" : null, { count: READ_HISTORY }, { key: JSON.stringify(overview?.update ?? null) });
  const mayControl = session.may.includes("control");

  if (!isOffered || told.error?.code === "unsupported") return html`<${NotConfigured} />`;
  const again = () => {
    told.again();
    history.again();
  };
  return html`
    <h1>Updates</h1>
    <${Told} told=${told} what="The state of updates could not be read.">
      ${(status) => html`
        <${Status} status=${status} />
        ${mayControl ? html`<${Actions} again=${again} />` : html`<${MayNot} session=${session} />`}
        ${status.under_way && html`<${UnderWay} step=${status.under_way} />`}
        <${Runs} models=${status.models} mayControl=${mayControl} again=${again} />
        ${status.checked && html`<${LastCheck} checked=${status.checked} />`}
        <${RefusedReleases} refused=${status.refused} />
      `}
    <//>
    <${Card} title="History">
      <${Told} told=${history} what="The history could not be read.">${(entries) => html`<${History} entries=${entries} />`}<//>
    <//>
  `;
}

function NotConfigured() {
  return html`<h1>Updates</h1>
    <${Card} title="This device takes no updates">
      <p>Add <code>[update]</code> with <code>root_file</code>, and <code>url</code> or <code>folder</code>, to the daemon's configuration, and restart it.</p>
      <p class="note">It then takes models that their owner signed, tries each, and goes back by itself where one does badly.</p>
    <//>`;
}

function Status({ status }) {
  const clock = status.clock ?? {};
  const level = status.state_lost ? "bad" : status.under_way ? "busy" : "good";
  return html`<section class="health ${level}" aria-label="State of updates">
    <p class="sentence"><${Mark} level=${level}>${sentence(status)}<//></p>
    <p>Group ${status.group}, device ${status.device_id}.
      ${status.next_check_s > 0 && ` It looks again by itself in ${duration(status.next_check_s)}.`}
      ${clock.is_behind && " Its clock is behind what it was before, and installs nothing new until it is right."}
      ${clock.is_synchronised === false && " Its clock is not set by the network."}</p>
  </section>`;
}

function sentence(status) {
  if (status.state_lost) return "The record of updates was unreadable; the device serves what it had, and looks anew.";
  if (status.under_way) return `${status.under_way.model} version ${status.under_way.version}: ${words(status.under_way.state)}.`;
  return `${plural(Object.keys(status.models).length, "model")} by updates; ${STATES.idle}.`;
}

const words = (state) => STATES[state] ?? String(state).replaceAll("_", " ");

function Actions({ again }) {
  const [offers, show] = useState(null);
  const act = (operation) => async () => {
    show(null);
    const checked = await call(operation);
    show(checked);
    again();
    return checked;
  };
  const said = (checked) => (checked.is_ok ? "The repository answered." : "");
  return html`<div class="buttons">
    <${ActionButton} label="Look for updates" busy="Looking…" act=${act("update_check")} done=${said} />
    <${ActionButton} label="Install what is meant for this device" busy="Installing…" kind="main" act=${act("update_apply")} done=${said}
      ask=${{ title: "Install now?", text: "Each release is checked, tried in a child process, put in place without losing a request, and observed. One that does badly is taken back." }} />
    ${offers && !offers.is_ok && html`<div class="problem" role="alert"><p><strong>The repository could not be read.</strong></p><p>${offers.reason}</p></div>`}
  </div>`;
}

function UnderWay({ step }) {
  const part = step.total_bytes > 0 ? step.done_bytes / step.total_bytes : null;
  const names = ["verifying", "staging", "warming", "observing"];
  const at = names.indexOf(step.state);
  return html`<${Card} title="Under way">
    <p><strong>${step.model}</strong> version ${step.version} (release ${step.release})</p>
    <ol class="steps">
      ${names.map((each, index) => html`<li key=${each} class=${index < at ? "done" : index === at ? "now" : ""} aria-current=${index === at ? "step" : null}>${words(each)}</li>`)}
    </ol>
    ${at < 0 && html`<p>${words(step.state)}</p>`}
    ${part !== null && html`<progress value=${part} max="1" aria-label="Fetched"></progress><p class="note">${bytes(step.done_bytes)} of ${bytes(step.total_bytes)}, ${share(part)}</p>`}
    ${step.detail && html`<p>${step.detail}</p>`}
    ${step.observation && html`<${Observation} rows=${step.observation} />`}
  <//>`;
}

/** What is observed of the release before and of this one. rows: name, before, now. */
function Observation({ rows }) {
  return html`<${Table} caption="Observation" rows=${rows} columns=${[
    ["Figure", (each) => each.name],
    ["Before", (each) => each.before, "number"],
    ["Now", (each) => each.now, "number"],
  ]} />`;
}

function Runs({ models, mayControl, again }) {
  const rows = Object.entries(models).map(([name, each]) => ({ name, ...each }));
  const columns = [
    ["Model", (each) => html`<a href=${`#/model/${encodeURIComponent(each.name)}`}>${each.name}</a>`],
    ["Version", (each) => each.version, "number"],
    ["Release", (each) => each.release, "number"],
    ["Before it", (each) => each.previous_release, "number"],
    ["State", (each) => (each.not_served ? html`<${Mark} level="bad">does not answer<//><span class="note">${each.not_served}</span>` : html`<${Mark} level="good">serves<//>`)],
    ...(mayControl ? [["Do", (each) => html`<${RollBack} entry=${each} again=${again} />`]] : []),
  ];
  return html`<${Card} title="What runs" class="flush">
    <${Table} caption="Models by updates" columns=${columns} rows=${rows} keyOf=${(each) => each.name} empty="No model has come by an update yet." />
  <//>`;
}

function RollBack({ entry, again }) {
  if (entry.previous_release === null) return html`<span class="note">no release before it is here</span>`;
  const act = async () => {
    await call("update_rollback", { model: entry.name });
    again();
  };
  return html`<${ActionButton} label="Roll back" busy="Rolling back…" act=${act} done="The release before serves again."
    ask=${{ title: `Roll ${entry.name} back to release ${entry.previous_release}?`, text: `This device refuses release ${entry.release} from then on, until it is published anew.` }} />`;
}

function LastCheck({ checked }) {
  return html`<${Card} title="What is offered">
    <${Facts} rows=${[
      ["Looked", html`<${Time} at=${checked.at_utc} />`],
      ["At", checked.source],
      ["Ended", checked.is_ok ? "well" : html`<${Mark} level="warning">${checked.reason}<//>`],
    ]} />
    <${Table} caption="Offers" rows=${checked.offers} keyOf=${(each) => `${each.model} ${each.release}`} empty="Nothing is offered to this device's group." columns=${[
      ["Model", (each) => each.model],
      ["Release", (each) => each.release, "number"],
      ["Version", (each) => each.version, "number"],
      ["Devices", (each) => share(each.percent / 100), "number"],
      ["What of it", (each) => html`${each.action}${each.reason && html`<span class="note">${each.reason}</span>`}`, "long"],
    ]} />
  <//>`;
}

function RefusedReleases({ refused }) {
  return html`<${Card} title="Refused for good">
    <${Table} caption="Refused releases" rows=${[...refused].reverse()} keyOf=${(each) => `${each.model} ${each.release}`} empty="No release was refused." columns=${[
      ["Model", (each) => each.model],
      ["Release", (each) => each.release, "number"],
      ["Why", (each) => each.reason, "long"],
    ]} />
  <//>`;
}

function History({ entries }) {
  return html`<${Table} caption="History of updates" rows=${entries} empty="Nothing yet." columns=${[
    ["When", (each) => html`<${Time} at=${each.at_utc} />`],
    ["Model", (each) => each.model || null],
    ["Release", (each) => each.counter ?? null, "number"],
    ["What", (each) => html`${String(each.what).replaceAll("_", " ")}${each.reason && html`<span class="note">${each.reason}</span>`}`, "long"],
  ]} />`;
}
