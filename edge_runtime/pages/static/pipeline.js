/* A pipeline as a graph: its steps from left to right by their levels, each with its share of the time. */

import { html } from "./html.js";
import { Card, Table } from "./parts.js";
import { ms, share, whole } from "./words.js";

const WIDTH = 150;
const HEIGHT = 58;
const ACROSS = 46;
const DOWN = 22;
const MARGIN = 8;

/** pipeline: as metadata has it; steps: its shares by name, of `stats`. */
export function PipelineGraph({ pipeline, steps }) {
  const columns = [["input"], ...pipeline.levels, ["output"]];
  const tallest = Math.max(...columns.map((each) => each.length));
  const height = MARGIN * 2 + tallest * HEIGHT + (tallest - 1) * DOWN;
  const width = MARGIN * 2 + columns.length * WIDTH + (columns.length - 1) * ACROSS;
  const places = new Map();
  columns.forEach((names, column) => {
    const top = (height - names.length * HEIGHT - (names.length - 1) * DOWN) / 2;
    names.forEach((name, row) => {
      // A step may be called as the ends are, so these have names of their own.
      const key = column === 0 ? ":input" : column === columns.length - 1 ? ":output" : name;
      places.set(key, { name, x: MARGIN + column * (WIDTH + ACROSS), y: top + row * (HEIGHT + DOWN) });
    });
  });
  const byName = new Map(pipeline.steps.map((each) => [each.name, each]));
  const edges = edgesOf(pipeline).filter(([from, to]) => places.has(from) && places.has(to));
  const all = Object.values(steps ?? {}).reduce((sum, each) => sum + each.queue_s + each.run_s, 0);
  const partOf = (name) => {
    const told = steps?.[name];
    return told && all > 0 ? (told.queue_s + told.run_s) / all : null;
  };
  const way = columns.map((names) => (names.length > 1 ? `[${names.join(" and ")}]` : names[0])).join(", then ");
  return html`<${Card} title="Pipeline">
    <div class="graph" tabindex="0" role="region" aria-label="The pipeline as a graph">
      <svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img" aria-label=${`From ${way}`}>
        ${edges.map(([from, to]) => {
          const a = places.get(from);
          const b = places.get(to);
          const [x1, y1, x2, y2] = [a.x + WIDTH, a.y + HEIGHT / 2, b.x, b.y + HEIGHT / 2];
          return html`<path key=${`${from} ${to}`} class="edge" d=${`M${x1},${y1} C${x1 + ACROSS / 2},${y1} ${x2 - ACROSS / 2},${y2} ${x2},${y2}`} />`;
        })}
        ${[...places].map(([key, { name, x, y }]) => {
          const step = byName.get(key);
          const part = step ? partOf(key) : null;
          return html`<g key=${key} transform=${`translate(${x},${y})`} class=${step ? "step" : "end"}>
            <rect width=${WIDTH} height=${HEIGHT} rx="8" />
            ${part !== null && html`<rect class="part" y=${HEIGHT - 5} width=${WIDTH * part} height="5" rx="2" />`}
            <text x=${WIDTH / 2} y=${step ? 23 : HEIGHT / 2 + 5}>${short(name)}</text>
            ${step && html`<text class="small" x=${WIDTH / 2} y="43">${part === null ? short(step.model ?? "Python") : share(part)}</text>`}
          </g>`;
        })}
      </svg>
    </div>
    <${Table} caption="Steps of the pipeline" rows=${pipeline.steps} keyOf=${(each) => each.name} columns=${[
      ["Step", (each) => each.name],
      ["Asks", (each) => (each.model ? html`<a href=${`#/model/${encodeURIComponent(each.model)}`}>${each.model}</a>` : each.python)],
      ["Runs", runs],
      ["Share", (each) => share(partOf(each.name)), "number"],
      ["Waited", (each) => mean(steps?.[each.name], "queue_s"), "number"],
      ["Ran", (each) => mean(steps?.[each.name], "run_s"), "number"],
      ["Requests", (each) => whole(steps?.[each.name]?.requests ?? 0), "number"],
    ]} />
  <//>`;
}

const short = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);

const mean = (told, key) => (told?.requests ? ms((told[key] / told.requests) * 1000) : null);

function runs(step) {
  const words = [];
  if (step.map) words.push(`for each of ${step.map.join(", ")}`);
  if (step.crop) words.push(`cut out of ${step.crop.picture}`);
  if (step.when) words.push(`when ${step.when}`);
  return words.join(", ") || "always";
}

/** Pairs of steps: who reads of whom. A place is written as step.tensor. */
function edgesOf(pipeline) {
  const names = new Set(pipeline.steps.map((each) => each.name));
  const from = (place) => {
    const step = String(place).split(".")[0];
    return names.has(step) ? step : ":input";
  };
  const found = [];
  for (const step of pipeline.steps) {
    const read = [...Object.values(step.inputs), ...(step.map ?? []), ...(step.crop ? [step.crop.picture, step.crop.box] : [])];
    for (const source of new Set(read.map(from))) found.push([source, step.name]);
  }
  for (const source of new Set(Object.values(pipeline.outputs).map(from))) found.push([source, ":output"]);
  return found;
}
