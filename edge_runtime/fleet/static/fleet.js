/* The page of a fleet: its devices by search and pages, releases, who is slow, what happened, one device by its link.

   Views are named by what follows the address's #: #/ , #/groups, #/releases, #/slow, #/history, #/device/ID. All text of devices is
   put into templates as text. */

import { html, render, useEffect, useRef, useState } from "/page/html.js";
import { Card, Facts, Mark, placeIn } from "/page/parts.js";
import { NONE, bytes, celsius, dayTime, duration, ms, plural, rate, whole } from "/page/words.js";

const HEADERS = { "x-edge-page": "1" };
const PAGE = 100;
const AGAIN_MS = 10_000;
const TYPED_MS = 250;
const RETRY_MS = 2_000;

const TABS = [["", "Devices"], ["groups", "Groups"], ["releases", "Releases"], ["slow", "Slow"], ["history", "History"]];
const CONDITIONS = {
  ok: ["good", "well"],
  degraded: ["warning", "degraded"],
  starting: ["busy", "starting"],
  stopping: ["busy", "stopping"],
  stopped: ["quiet", "stopped"],
  offline: ["bad", "offline"],
  mute: ["bad", "mute"],
  unknown: ["quiet", "unknown"],
};
const KINDS = { refused: "refused it", waiting: "wait" };

// ---- what the server says -------------------------------------------------------------------------------------------

class AskError extends Error {}

async function ask(path, body = null) {
  const options = { credentials: "same-origin", cache: "no-store", headers: { ...HEADERS } };
  if (body !== null) {
    options.method = "POST";
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new AskError("The fleet's process did not answer; the page goes on trying.");
  }
  const text = await response.text();
  let found = {};
  try {
    found = JSON.parse(text);
  } catch {
    found = { error: { message: text.slice(0, 300) } };
  }
  if (!response.ok) {
    if (response.status === 401) open();
    throw new AskError(found.error?.message ?? `HTTP ${response.status}`);
  }
  return found;
}

let state = { session: null, overview: null, lostSince: null, changed: [], changes: 0 };
const listeners = new Set();
let source = null;
let timer = null;

function change(fields) {
  state = { ...state, ...fields };
  listeners.forEach((listener) => listener(state));
}

function useFleet() {
  const [seen, see] = useState(state);
  useEffect(() => {
    listeners.add(see);
    see(state);
    return () => listeners.delete(see);
  }, []);
  return seen;
}

async function open() {
  shut();
  try {
    const session = await ask("/page/session");
    change({ session });
    if (session.needs_token) return change({ lostSince: null, overview: null });
  } catch {
    return lose();
  }
  shut();
  source = new EventSource("/fleet/stream");
  source.addEventListener("change", (event) => {
    const { devices, overview } = JSON.parse(event.data);
    change({ overview, changed: devices, changes: state.changes + 1, lostSince: null });
  });
  source.addEventListener("bye", lose);
  source.addEventListener("error", lose);
}

function lose() {
  shut();
  if (state.lostSince === null) change({ lostSince: new Date() });
  timer = setTimeout(open, RETRY_MS);
}

function shut() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

/** The answer of a path, read again each AGAIN_MS, and at a change that `concerns` it. */
function useAnswer(path, concerns = () => false) {
  const { changes, changed, lostSince } = useFleet();
  const [told, tell] = useState({ answer: null, error: null, path });
  const [count, again] = useState(0);
  const seen = useRef(changes);
  useEffect(() => {
    let isOld = false;
    ask(path).then(
      (answer) => isOld || tell({ answer, error: null, path }),
      (error) => isOld || tell((last) => ({ ...last, error })),
    );
    return () => { isOld = true; };
  }, [path, count, lostSince === null]);
  useEffect(() => {
    const each = setInterval(() => document.hidden || again((n) => n + 1), AGAIN_MS);
    return () => clearInterval(each);
  }, []);
  useEffect(() => {
    if (changes !== seen.current && (changed === null || concerns(changed, told.answer))) again((n) => n + 1);
    seen.current = changes;
  }, [changes]);
  return told;
}

function Answer({ told, children }) {
  return html`${told.error && html`<p class="problem" role="alert">${told.error.message}</p>`}
    ${told.answer !== null ? children(told.answer) : !told.error && html`<p class="note" role="status">Reading…</p>`}`;
}

// ---- parts ----------------------------------------------------------------------------------------------------------

function Condition({ condition }) {
  const [level, words] = CONDITIONS[condition] ?? ["quiet", condition];
  return html`<${Mark} level=${level}>${words}<//>`;
}

const ago = (since) => (since === null ? "" : duration(Math.max(Date.now() / 1000 - since, 0)));

const link = (device) => html`<a href=${`#/device/${encodeURIComponent(device)}`}>${device}</a>`;

const named = (counts) => Object.keys(counts ?? {});

function Choice({ label, value, set, options, all }) {
  return html`<label>${label}<select value=${value} onChange=${(event) => set(event.target.value)}>
    <option value="">${all}</option>
    ${options.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
  </select></label>`;
}

// ---- views ----------------------------------------------------------------------------------------------------------

function Devices() {
  const { overview } = useFleet();
  const [typed, type] = useState("");
  const [asked, setAsked] = useState({ search: "", group: "", condition: "", offset: 0 });
  useEffect(() => {
    const soon = setTimeout(() => typed !== asked.search && setAsked({ ...asked, search: typed, offset: 0 }), TYPED_MS);
    return () => clearTimeout(soon);
  }, [typed]);
  const set = (fields) => setAsked({ ...asked, offset: 0, ...fields });
  const told = useAnswer(
    `/fleet/devices?${new URLSearchParams({ ...asked, limit: PAGE })}`,
    (changed, answer) => answer === null || answer.count < PAGE || answer.devices.some((each) => changed.includes(each.device)),
  );
  return html`<${Overview} overview=${overview} choose=${(condition) => set({ condition })} />
    <${Card} title="Devices">
      <form class="search" role="search" onSubmit=${(event) => event.preventDefault()}>
        <label>Search<input type="search" value=${typed} onInput=${(event) => type(event.target.value)}
          placeholder="id, group, version, model, reason" /></label>
        <${Choice} label="Group" all="all groups" value=${asked.group} set=${(group) => set({ group })}
          options=${named(overview?.groups)} />
        <${Choice} label="Condition" all="all" value=${asked.condition} set=${(condition) => set({ condition })}
          options=${[...named(overview?.conditions), "silent"]} />
      </form>
      <${Answer} told=${told}>${(answer) => html`
        <table>
          <caption class="unseen">Devices</caption>
          <thead><tr><th>Device</th><th>Condition</th><th>For</th><th>Health</th><th>Groups</th><th>Version</th>
            <th>Profile</th><th>Rate</th><th>p95</th></tr></thead>
          <tbody>${answer.devices.map((each) => html`<tr key=${each.device}>
            <th scope="row">${link(each.device)}</th>
            <td data-name="Condition"><${Condition} condition=${each.condition} /></td>
            <td data-name="For">${ago(each.since)}</td>
            <td data-name="Health" class="long"><span class="clip">${each.health}</span>
              ${each.clock_off_s !== null && html`<span class="note">its clock is off by ${duration(Math.abs(each.clock_off_s))}</span>`}
              ${each.refused && html`<span class="note">refused ${each.refused.model} release ${each.refused.release}</span>`}</td>
            <td data-name="Groups">${each.groups.join(", ") || NONE}</td>
            <td data-name="Version">${each.version || NONE}</td>
            <td data-name="Profile" class="minor">${each.profile || NONE}</td>
            <td data-name="Rate" class="number">${rate(each.rate_per_s)}</td>
            <td data-name="p95" class="number">${ms(each.p95_ms)}</td>
          </tr>`)}</tbody>
        </table>
        <div class="pages">
          <span class="note" role="status">${answer.count === 0 ? "None" : `${whole(answer.offset + 1)} to ${whole(answer.offset + answer.devices.length)}`} of ${whole(answer.count)}</span>
          <button type="button" disabled=${answer.offset === 0} onClick=${() => set({ offset: Math.max(asked.offset - PAGE, 0) })}>Back</button>
          <button type="button" disabled=${answer.offset + answer.devices.length >= answer.count}
            onClick=${() => set({ offset: asked.offset + PAGE })}>Next</button>
        </div>`}
      <//>
    <//>`;
}

function Overview({ overview, choose }) {
  if (overview === null) return null;
  const ignored = Object.values(overview.ignored).reduce((sum, count) => sum + count, 0);
  const lines = [
    !overview.broker && `The broker ${overview.broker_url} is away: ${overview.broker_reason || "connecting"}`,
    overview.repository_reason && `The repository cannot be read: ${overview.repository_reason}`,
    overview.clocks_off > 0 && `${plural(overview.clocks_off, "device has", "devices have")} a wrong clock.`,
    ignored > 0 && `${plural(ignored, "message", "messages")} on the broker made no sense, and were left out.`,
  ].filter(Boolean);
  return html`<section class="health ${overview.broker ? "good" : "bad"}" aria-label="Overview">
    <h1 class="sentence">${plural(overview.devices, "device")}${overview.is_loaded ? "" : ", and the broker goes on telling"}.</h1>
    <p class="buttons">${Object.entries(overview.conditions).map(([each, count]) => html`<button key=${each} type="button"
      onClick=${() => choose(each)}><${Condition} condition=${each} /> ${whole(count)}</button>`)}</p>
    ${lines.map((each) => html`<p key=${each}>${each}</p>`)}
  </section>`;
}

function Counts({ counts }) {
  return Object.entries(counts).map(([name, count]) => `${name || "unknown"} ${whole(count)}`).join(", ") || NONE;
}

function Groups() {
  const told = useAnswer("/fleet/groups");
  return html`<h1>Groups</h1><${Card} title="Devices by group"><${Answer} told=${told}>${(groups) => html`
    ${groups.length === 0 && html`<p>No device is known.</p>`}
    <table>
      <caption class="unseen">Groups</caption>
      <thead><tr><th>Group</th><th>Devices</th><th>Silent</th><th>Conditions</th><th>Refused a release</th><th>Rate</th>
        <th>Versions</th><th>Profiles</th></tr></thead>
      <tbody>${groups.map((each) => html`<tr key=${each.group}>
        <th scope="row">${each.group || "(none)"}</th>
        <td data-name="Devices" class="number">${whole(each.devices)}</td>
        <td data-name="Silent" class="number">${whole(each.silent)}</td>
        <td data-name="Conditions"><${Counts} counts=${each.conditions} /></td>
        <td data-name="Refused a release" class="number">${whole(each.refusing)}</td>
        <td data-name="Rate" class="number">${rate(each.rate_per_s)}</td>
        <td data-name="Versions"><${Counts} counts=${each.versions} /></td>
        <td data-name="Profiles" class="minor"><${Counts} counts=${each.profiles} /></td>
      </tr>`)}</tbody>
    </table>`}
  <//><//>`;
}

function Releases() {
  const { session } = useFleet();
  const told = useAnswer("/fleet/releases");
  return html`<h1>Releases</h1><${Card} title="By group">
    <${Answer} told=${told}>${({ repository, reason, releases }) => html`
      <p class="note">${repository ? `Assigned by ${repository}.` : "As devices tell of them: no repository was named."}
        ${reason && ` It cannot be read now: ${reason}`}</p>
      ${releases.length === 0 && html`<p>No group of devices has a release.</p>`}
      <table>
        <caption class="unseen">Releases</caption>
        <thead><tr><th>Model</th><th>Group</th><th>Share</th><th>Progress</th><th>Installed</th><th>Refused</th><th>Waiting</th>
          <th>Reasons</th></tr></thead>
        <tbody>${releases.map((each) => html`<tr key=${`${each.group}/${each.model}/${each.release}`}>
          <th scope="row">${each.model} ${each.version ?? ""}<span class="note">release ${each.release}</span></th>
          <td data-name="Group">${each.group}</td>
          <td data-name="Share" class="number">${each.percent} %</td>
          <td data-name="Progress"><${Share} counts=${each} /></td>
          <td data-name="Installed" class="number">${whole(each.installed)} of ${whole(each.devices)}</td>
          <td data-name="Refused" class="number">${whole(each.refused)}</td>
          <td data-name="Waiting" class="number">${whole(each.waiting)}</td>
          <td data-name="Reasons" class="long">${each.reasons.map((why) => html`<span class="note clip" key=${why.kind + why.reason}>
            ${whole(why.devices)} ${KINDS[why.kind] ?? why.kind}: ${why.reason}</span>`)}
            ${each.version && each.percent < 100 && html`<code class="command" tabindex="0">edge-runtime repo assign ${each.group} ${each.model}=${each.version} --percent ${Math.min(each.percent * 2, 100)}</code>`}</td>
        </tr>`)}</tbody>
      </table>`}
    <//>
    <h3>Give a group another release</h3>
    <p class="note">This page holds no key. On the publisher's machine:</p>
    <code class="command" tabindex="0">edge-runtime repo assign GROUP MODEL=VERSION --percent 10</code>
    <${Wake} may=${session?.may.includes("control")} />
  <//>`;
}

function Share({ counts }) {
  const parts = ["installed", "refused", "waiting"];
  const all = Math.max(parts.reduce((sum, part) => sum + counts[part], 0), 1);
  const words = parts.map((part) => `${counts[part]} ${part}`).join(", ");
  return html`<div class="share" role="img" aria-label=${words}>
    ${parts.map((part) => html`<div key=${part} class=${part} style=${{ width: `${(counts[part] / all) * 100}%` }}></div>`)}
  </div>`;
}

function Wake({ may }) {
  const { overview } = useFleet();
  const [group, setGroup] = useState("");
  const [said, say] = useState("");
  if (!may) return null;
  const wake = () => ask("/fleet/wake", { group }).then(() => say(`${group} was woken.`), (error) => say(error.message));
  return html`<h3>Wake a group</h3>
    <p class="note">Its devices look for updates now. What is installed, signatures say.</p>
    <p class="buttons"><${Choice} label="Group to wake" all="a group" value=${group} set=${setGroup} options=${named(overview?.groups)} />
      <button type="button" disabled=${group === ""} onClick=${wake}>Wake</button><span role="status">${said}</span></p>`;
}

function Slow() {
  const told = useAnswer("/fleet/slow");
  return html`<h1>Slow</h1><${Card} title="The worst against their own kind first">
    <${Answer} told=${told}>${(answer) => html`
      ${answer.length === 0 && html`<p>No device that is online tells of answers.</p>`}
      <table>
        <caption class="unseen">Models by profile</caption>
        <thead><tr><th>Model</th><th>Profile</th><th>Devices</th><th>Median p95</th><th>Worst p95</th><th>Times</th><th>Slowest</th></tr></thead>
        <tbody>${answer.slice(0, 200).map((each) => html`<tr key=${`${each.profile}/${each.model}`}>
          <th scope="row">${each.model}</th>
          <td data-name="Profile">${each.profile || NONE}</td>
          <td data-name="Devices" class="number">${whole(each.devices)}</td>
          <td data-name="Median p95" class="number">${ms(each.median_p95_ms)}</td>
          <td data-name="Worst p95" class="number">${ms(each.worst_p95_ms)}</td>
          <td data-name="Times" class="number">${each.worst_ratio}</td>
          <td data-name="Slowest" class="long">${each.slowest.slice(0, 5).map((slow) => html`<span class="note" key=${slow.device}>
            ${link(slow.device)} ${ms(slow.p95_ms)}</span>`)}</td>
        </tr>`)}</tbody>
      </table>`}
    <//>
  <//>`;
}

function Happened({ entries, names = true }) {
  if (entries.length === 0) return html`<p class="note">Nothing since this process looks.</p>`;
  return html`<ul class="happened">${entries.map((each, index) => html`<li key=${index}><time>${dayTime(each.time)}</time>
    ${names && link(each.device)} ${each.what}</li>`)}</ul>`;
}

function History() {
  const told = useAnswer("/fleet/history?count=200", () => true);
  return html`<h1>History</h1><${Card} title="What happened, the newest first"><${Answer} told=${told}>${(entries) => html`<${Happened} entries=${entries} />`}<//><//>`;
}

function Device({ name }) {
  const told = useAnswer(`/fleet/device/${encodeURIComponent(name)}`, (changed) => changed.includes(name));
  return html`<${Answer} told=${told}>${(each) => html`
    <section class="health ${(CONDITIONS[each.condition] ?? ["quiet"])[0]}">
      <h1 class="sentence">${each.device}</h1>
      <p><${Condition} condition=${each.condition} /> ${each.since !== null && `for ${ago(each.since)}. `}${each.health}</p>
      ${each.reasons.slice(1).map((reason) => html`<p key=${reason}>${reason}</p>`)}
    </section>
    <${Card} title="About">
      <${Facts} rows=${[
        ["Groups", each.groups.join(", ")],
        ["Version", each.version],
        ["Profile", each.profile],
        ["Rate", rate(each.rate_per_s)],
        ["p95", each.p95_ms === null ? null : ms(each.p95_ms)],
        ["Memory", each.memory_bytes === null ? null : bytes(each.memory_bytes)],
        ["Temperature", each.temperature_celsius === null ? null : celsius(each.temperature_celsius)],
        ["Clock", each.clock_off_s === null ? null : `off by ${duration(Math.abs(each.clock_off_s))}`],
        ["Updates", each.update.is_on ? each.update.trouble || each.update.state : "off"],
        ["Last check", each.update.checked_at && dayTime(each.update.checked_at)],
      ]} />
      ${[...each.update.refused, ...each.update.open].map((note, index) => html`<p key=${index}>${note.model} release ${note.release}:
        ${note.action}${note.reason && `: ${note.reason}`}</p>`)}
    <//>
    <${Card} title="Models">
      <table>
        <caption class="unseen">Models</caption>
        <thead><tr><th>Model</th><th>State</th><th>Version</th><th>Release</th><th>Rate</th><th>p95</th></tr></thead>
        <tbody>${each.models.map((model) => html`<tr key=${model.name}>
          <th scope="row">${model.name}${model.reason && html`<span class="note">${model.reason}</span>`}</th>
          <td data-name="State">${model.state}</td>
          <td data-name="Version" class="number">${model.version ?? NONE}</td>
          <td data-name="Release" class="number">${model.release ?? NONE}</td>
          <td data-name="Rate" class="number">${rate(model.rate_per_s)}</td>
          <td data-name="p95" class="number">${ms(model.p95_ms)}</td>
        </tr>`)}</tbody>
      </table>
    <//>
    <${Card} title="History"><${Happened} entries=${each.history} names=${false} /><//>`}
  <//>`;
}

function Login() {
  const [token, type] = useState("");
  const [error, fail] = useState("");
  const begin = (event) => {
    event.preventDefault();
    ask("/page/login", { token }).then(open, (failed) => fail(failed.message));
  };
  return html`<h1 class="unseen">Fleet</h1><${Card} title="Log in" class="narrow"><form onSubmit=${begin}>
    <label for="token">Token</label>
    <input id="token" type="password" autocomplete="current-password" value=${token} onInput=${(event) => type(event.target.value)} />
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <button class="main">Log in</button>
  </form><//>`;
}

// ---- the frame ------------------------------------------------------------------------------------------------------

const VIEWS = { "": Devices, groups: Groups, releases: Releases, slow: Slow, history: History, device: Device };

function App() {
  const { session, overview, lostSince } = useFleet();
  const [{ view, name }, go] = useState(placeIn(VIEWS));
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    const changed = () => go(placeIn(VIEWS));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    document.title = `${name || TABS.find(([each]) => each === view)?.[1] || "Fleet"} · Fleet`;
    if (!isFirst.current) {
      main.current?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [view, name]);
  const View = VIEWS[view];
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header>
      <div class="top">
        <a class="brand" href="#/"><img src="/page/icon.svg" alt="" width="28" height="28" /><span>Fleet</span></a>
        <div class="session">${session?.name ?? overview?.broker_url ?? ""}
          ${session?.is_logged_in && html` <button type="button" class="plain" onClick=${() => ask("/page/logout", {}).then(open)}>Log out</button>`}</div>
      </div>
      ${!session?.needs_token && html`<nav aria-label="Views">${TABS.map(([each, words]) => html`<a key=${each} href=${`#/${each}`}
        aria-current=${each === (view === "device" ? "" : view) ? "page" : null}>${words}</a>`)}</nav>`}
    </header>
    <div class="bars" role="status">${lostSince && html`<p class="bar lost">No answer since ${dayTime(lostSince)}; trying again.</p>`}</div>
    <main id="main" tabindex="-1" ref=${main} class=${lostSince ? "old" : ""}>
      ${session?.needs_token ? html`<${Login} />` : session !== null && html`<${View} key=${`${view}/${name}`} name=${name} />`}
    </main>
    <footer>edge-runtime ${session?.version ?? ""}</footer>`;
}

render(html`<${App} />`, document.getElementById("app"));
open();
