/* One model: versions, what it takes and gives, how long it takes, its hosts, its last errors; load and unload. */

import { html, useState } from "./html.js";
import { call, offers, useDaemon, useOperation } from "./daemon.js";
import { ActionButton, Card, Facts, MayNot, ModelState, Problem, Table, Told } from "./parts.js";
import { EventList } from "./log.js";
import { LastMinutes } from "./overview.js";
import { PipelineGraph } from "./pipeline.js";
import { NONE, bytes, meaning, ms, number, plural, rate, shape, whole } from "./words.js";

const SAMPLE_MS = 5000;
const READ_EVENTS = 200;
const SHOWN_LABELS = 200;

export function Model({ name }) {
  const { session, overview } = useDaemon();
  const models = useOperation("models", {}, { everyMs: SAMPLE_MS });
  const entries = (models.result ?? []).filter((each) => each.name === name);
  const isReady = entries.some((each) => each.state === "ready");
  const metadata = useOperation(isReady ? "metadata" : null, { model: name }, { key: entries.map((each) => each.version + each.state).join() });
  const stats = useOperation("stats", {}, { everyMs: SAMPLE_MS });
  const history = useOperation(isReady ? "history" : null, { model: name }, { everyMs: SAMPLE_MS });
  const now = overview?.models.find((each) => each.name === name && each.state === "ready");
  const metrics = stats.result?.metrics.models[name] ?? null;
  const mayControl = session.may.includes("control");
  return html`
    <div class="heading">
      <h1>${name}</h1>
      <a class="button" href=${`#/try/${encodeURIComponent(name)}`}>Try it</a>
    </div>
    <${Told} told=${models} what="The models could not be read.">
      ${() => html`
        ${entries.length === 0 && html`<p>There is no model of this name. <a href="#/">All models</a></p>`}
        ${entries.length > 0 && html`<${Versions} name=${name} entries=${entries} mayControl=${mayControl} session=${session} again=${models.again} />`}
      `}
    <//>
    ${now && html`<${Figures} now=${now} metrics=${metrics} />`}
    ${history.result && html`<${LastMinutes} history=${history.result} />`}
    ${metrics && html`<${Phases} metrics=${metrics} phases=${history.result?.phases} />`}
    ${now && metadata.result?.language && html`<${Writing} language=${metadata.result.language} metrics=${metrics} />`}
    ${isReady &&
    html`<${Told} told=${metadata} what="The model's description could not be read.">
      ${(told) => html`<${Described} told=${told} entry=${entries.find((each) => each.state === "ready")} metrics=${metrics} why=${now?.why} name=${name} />`}
    <//>`}
    <${Errors} name=${name} />
  `;
}

function Versions({ name, entries, mayControl, session, again }) {
  const act = (operation, version) => async () => {
    await call(operation, version ? { model: name, version } : { model: name });
    again();
  };
  const columns = [
    ["Version", (each) => (each.version === null ? "a file" : `Version ${each.version}`)],
    ["State", (each) => html`<${ModelState} state=${each.state} />${each.reason && html`<span class="note">${each.reason}</span>`}`, "long"],
    ["Runs by", (each) => [each.backend, each.precision, each.device].filter(Boolean).join(", ") || null],
    ["Memory", (each) => (each.memory_bytes ? bytes(each.memory_bytes) : null), "number"],
    ["Host", (each) => (each.state !== "ready" ? null : each.host ? html`process ${each.host.pid ?? "is begun again"}${each.host.restarts ? html`<span class="note">begun again ${plural(each.host.restarts, "time")}; the last end: ${each.host.last_end || "not told"}</span>` : ""}` : "in the daemon")],
    ...(mayControl
      ? [["Do", (each) => each.version !== null && html`<${Actions} entry=${each} act=${act} name=${name} />`, "long"]]
      : []),
  ];
  return html`<${Card} title="Versions" class="flush">
    <${Table} caption=${`Versions of ${name}`} columns=${columns} rows=${entries} keyOf=${(each) => `${each.version} ${each.path ?? ""}`} />
    ${!mayControl && html`<${MayNot} session=${session} />`}
  <//>`;
}

function Actions({ entry, act, name }) {
  const isLoaded = entry.state === "ready" || entry.state === "loading";
  if (entry.state === "on_demand") {
    return html`<${ActionButton} label="Warm up" busy="Warming up…" act=${act("load", entry.version)} done="It is ready." />`;
  }
  return html`<span class="buttons">
    <${ActionButton} label=${isLoaded ? "Load anew" : "Load"} busy="Loading…" act=${act("load", entry.version)} done="It is ready." />
    <${ActionButton} label="Unload" busy="Unloading…" act=${act("unload", entry.version)} done="It is unloaded." isOffered=${isLoaded}
      ask=${{ title: `Unload ${name} version ${entry.version}?`, text: "Requests that were taken are answered first. Later ones are refused until it is loaded again, or its files change." }} />
  </span>`;
}

function Figures({ now, metrics }) {
  return html`<${Card} title="Now">
    <${Facts} rows=${[
      ["Requests", rate(now.rate), `${whole(now.requests)} since the daemon began`],
      ["Answered within", now.p50_ms === null ? "no request in the last minute" : ms(now.p95_ms),
        now.p50_ms === null ? null : `95 of 100; half within ${ms(now.p50_ms)}, 99 of 100 within ${ms(now.p99_ms)}`],
      ["Waiting", plural(now.queue_rows ?? 0, "row")],
      ["Rows a run", metrics?.batch_rows?.mean ? number(metrics.batch_rows.mean) : NONE, metrics?.runs ? `${plural(metrics.runs, "run")}` : null],
      ["Refused", refusals(now.refused)],
    ]} />
  <//>`;
}

/** How a language model writes. metrics: its numbers now, which metadata had once. */
function Writing({ language, metrics }) {
  const now = { ...language, ...metrics };
  return html`<${Card} title="Writing">
    <${Facts} rows=${[
      ["Answers under way", `${whole(now.streams)} of ${whole(language.max_streams)}`],
      ["First token", now.first_token_ms ? ms(now.first_token_ms) : NONE, now.first_token_ms ? "after a request came, on average" : "none was written yet"],
      ["A step", now.step_ms ? ms(now.step_ms) : NONE, now.step_ms ? `some ${number(1000 / now.step_ms)} tokens/s for each answer` : null],
      ["Reads", now.prefill_tokens_s ? `${number(now.prefill_tokens_s)} tokens/s` : NONE, `${plural(now.prompt_tokens ?? 0, "token")} since it was loaded`],
      ["Wrote", plural(now.written_tokens ?? 0, "token"), "since it was loaded"],
      ["Cache", now.kv_total_tokens ? `${whole(now.kv_used_tokens)} of ${plural(now.kv_total_tokens, "token")}` : NONE],
      ["Longest", language.context ? plural(language.context, "token") : null, "a prompt with its answer"],
    ]} />
  <//>`;
}

function refusals(counts) {
  const said = Object.entries(counts ?? {});
  return said.length ? html`<ul class="bare">${said.map(([code, count]) => html`<li key=${code}>${whole(count)} ${meaning(code)}</li>`)}</ul>` : "none";
}

/** Where the time goes: each phase's quantiles, and where the daemon tells them its counts. */
function Phases({ metrics, phases }) {
  const names = { queue: "Waiting in the queue", run: "Running", total: "Both" };
  const rows = Object.entries(names)
    .map(([key, words]) => ({ key, words, told: metrics[`${key}_ms`] }))
    .filter(({ told }) => told && told.mean !== null);
  if (rows.length === 0) return null;
  const most = Math.max(...rows.map(({ told }) => told.p99 ?? 0), 1e-9);
  return html`<${Card} title="Where the time goes">
    <p class="note">Since the daemon began. A bar ends where 99 of 100 requests were done; its dark part where half were.</p>
    <table class="phases">
      <caption class="unseen">Time by phase</caption>
      <thead><tr><th scope="col">Phase</th><th scope="col"><span class="unseen">As a bar</span></th><th scope="col" class="number">p50</th><th scope="col" class="number">p95</th><th scope="col" class="number">p99</th></tr></thead>
      <tbody>
        ${rows.map(
          ({ key, words, told }) => html`<tr key=${key}>
            <th scope="row">${words}</th>
            <td class="bar-cell"><div class="spread" aria-hidden="true">
              <div class="p99" style=${{ width: `${(100 * told.p99) / most}%` }}></div>
              <div class="p50" style=${{ width: `${(100 * told.p50) / most}%` }}></div>
            </div></td>
            <td class="number">${ms(told.p50)}</td><td class="number">${ms(told.p95)}</td><td class="number">${ms(told.p99)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
    ${phases && html`<${Histogram} phases=${phases} names=${names} />`}
  <//>`;
}

/** Counts of requests by time. phases: bounds_ms, and counts of each phase, of which the last has no upper bound. */
function Histogram({ phases, names }) {
  const [key, choose] = useState("total");
  const counts = phases[key] ?? [];
  const first = counts.findIndex((count) => count > 0);
  if (first < 0) return null;
  const last = counts.length - 1 - [...counts].reverse().findIndex((count) => count > 0);
  const shown = counts.slice(first, last + 1);
  const most = Math.max(...shown);
  const sum = counts.reduce((all, count) => all + count, 0);
  const bound = (index) => (index < phases.bounds_ms.length ? ms(phases.bounds_ms[index]) : `over ${ms(phases.bounds_ms.at(-1))}`);
  return html`<div class="histogram">
    <div class="head"><h3>How many took how long</h3>
      <select aria-label="Phase" value=${key} onChange=${(event) => choose(event.target.value)}>
        ${Object.entries(names).map(([each, words]) => phases[each] && html`<option key=${each} value=${each}>${words}</option>`)}
      </select></div>
    <div class="columns" role="img" aria-label=${`${names[key]}: ${plural(sum, "request")} from under ${bound(first)} to under ${bound(last)}`}>
      ${shown.map((count, index) => html`<div key=${index} title=${`under ${bound(first + index)}: ${whole(count)}`} style=${{ height: `${(100 * count) / most}%` }}></div>`)}
    </div>
    <div class="ends"><span>under ${bound(first)}</span><span>${bound(last)}</span></div>
  </div>`;
}

function Described({ told, entry, metrics, why, name }) {
  const tensors = (list) => list.map((each) => ({ ...each, key: each.name }));
  const columns = [
    ["Name", (each) => each.name],
    ["Datatype", (each) => each.datatype],
    ["Shape", (each) => shape(each.shape)],
  ];
  const steps = told.steps;
  return html`
    ${told.pipeline && html`<${PipelineGraph} pipeline=${told.pipeline} steps=${metrics?.steps} />`}
    <${Card} title="What it takes and gives">
      <${Facts} rows=${[
        ["Batches", told.batches === true ? `yes, up to ${plural(told.max_batch_rows, "row")} a run` : told.batches === false ? "no" : null],
        ["Largest tensor", told.max_frame_bytes ? bytes(told.max_frame_bytes) : null],
        ["Converted from", told.conversion?.source],
      ]} />
      <h3>Inputs</h3>
      <${Table} caption="Inputs" columns=${columns} rows=${tensors(told.inputs)} keyOf=${(each) => each.name} />
      <h3>Outputs</h3>
      <${Table} caption="Outputs" columns=${columns} rows=${tensors(told.outputs)} keyOf=${(each) => each.name} />
    <//>
    ${steps && html`<${Steps} steps=${steps} />`}
    <${Backend} told=${told} entry=${entry} why=${why ?? told.why} name=${name} />
  `;
}

/** What model.toml declares, in its own keys. */
function Steps({ steps }) {
  const said = (table) =>
    Object.entries(table)
      .filter(([, value]) => value !== null && value !== false && !(Array.isArray(value) && value.length === 0))
      .map(([key, value]) => `${key} ${Array.isArray(value) ? value.join(" ") : value}`)
      .join(" · ");
  const rows = [
    ...Object.entries(steps.inputs).map(([name, table]) => ["Reads", name, said(table)]),
    ...Object.entries(steps.outputs).map(([name, table]) => ["Answers", name, said(table)]),
  ];
  const labels = Object.entries(steps.labels ?? {}).filter(([, names]) => names.length > 0);
  return html`<${Card} title="Steps">
    <${Table} caption="Steps" keyOf=${([kind, name]) => `${kind} ${name}`} rows=${rows}
      columns=${[["", ([kind]) => kind], ["Tensor", ([, name]) => name, "long"], ["How", ([, , how]) => how, "long"]]} />
    ${labels.map(([output, names]) => html`<${Labels} key=${output} output=${output} names=${names} />`)}
  <//>`;
}

function Labels({ output, names }) {
  const [wanted, want] = useState("");
  const found = names.map((name, index) => [index, name]).filter(([, name]) => name.toLowerCase().includes(wanted.toLowerCase()));
  return html`<details>
    <summary>${plural(names.length, "label")} of ${output}</summary>
    ${names.length > 20 &&
    html`<label class="find">Find <input type="search" value=${wanted} onInput=${(event) => want(event.target.value)} /></label>`}
    <ol class="labels" tabindex="0" aria-label=${`Labels of ${output}`}>
      ${found.slice(0, SHOWN_LABELS).map(([index, name]) => html`<li key=${index} value=${index}>${name}</li>`)}
    </ol>
    ${found.length > SHOWN_LABELS && html`<p class="note">and ${whole(found.length - SHOWN_LABELS)} more</p>`}
  </details>`;
}

function Backend({ told, entry, why, name }) {
  const { session } = useDaemon();
  const tuned = useOperation(!told.pipeline && offers(session, "tuning") ? "tuning" : null, { model: name });
  return html`<${Card} title="How it runs">
    <${Facts} rows=${[
      ["Backend", entry.backend],
      ["Platform", told.platform],
      ["Precision", entry.precision],
      ["Device", entry.device],
      ["Mode", entry.mode],
      ["Why", why],
    ]} />
    ${tuned.result?.reasons.length > 0 && html`<h3>What tune found</h3><ul>${tuned.result.reasons.map((each) => html`<li key=${each}>${each}</li>`)}</ul>`}
    ${tuned.result?.picture && html`<img class="tune" src=${`data:image/svg+xml,${encodeURIComponent(tuned.result.picture)}`} alt="Rate against latency of each way to run it, as tune measured them" />`}
    ${tuned.result?.reasons.length === 0 && html`<p class="note"><code>edge-runtime tune ${name}</code> measures which way is the fastest on this device.</p>`}
  <//>`;
}

function Errors({ name }) {
  const told = useOperation("events", { count: READ_EVENTS });
  const { events } = useDaemon();
  if (told.error) return html`<${Problem} error=${told.error} what="The last errors could not be read." again=${told.again} />`;
  const known = new Set(events.map((each) => each.id));
  const all = [...events, ...(told.result ?? []).filter((each) => !known.has(each.id))];
  const found = all.filter((each) => each.model === name && each.level !== "info");
  return html`<${Card} title="Last errors">
    <${EventList} events=${found.slice(0, 20)} empty="None since the daemon began." />
  <//>`;
}
