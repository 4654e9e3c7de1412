/* An answer in words and figures: classes, boxes, tags, numbers, windows, and bare tensors. */

import { html } from "./html.js";
import { Table } from "./parts.js";
import { colourOf } from "./drawing.js";
import { number, plural, score, shape, whole } from "./words.js";

const SHOWN_THINGS = 50;
const SHOWN_VALUES = 24;
const SHOWN_ROWS = 20;

/** answer: JSON of the daemon. text: what was sent, in which tags are shown. */
export function Answer({ answer, text = "" }) {
  const rows = answer.answers ?? [answer];
  return html`<div class="answer">
    ${rows.slice(0, SHOWN_ROWS).map(
      (each, index) => html`<div key=${index}>
        ${rows.length > 1 && html`<h3>Row ${index + 1}</h3>`}
        <${One} answer=${each} text=${text} />
      </div>`,
    )}
    ${rows.length > SHOWN_ROWS && html`<p class="note">and ${whole(rows.length - SHOWN_ROWS)} rows more</p>`}
    ${answer.outputs?.map((each) => html`<${Tensor} key=${each.name} tensor=${each} />`)}
  </div>`;
}

function One({ answer, text }) {
  const things = answer.boxes ?? answer.masks ?? answer.keypoints;
  return html`
    ${answer.classes && html`<${Classes} classes=${answer.classes} />`}
    ${things && html`<${Things} things=${things} />`}
    ${answer.number && html`<p class="large">${answer.number.value === null ? "not a number" : number(answer.number.value)} ${answer.number.unit ?? ""}</p>`}
    ${typeof answer.text === "string" && html`<blockquote>${answer.text}</blockquote>`}
    ${answer.tags && html`<${Tags} tags=${answer.tags} text=${text} />`}
    ${answer.embedding && html`<${Embedding} vector=${answer.embedding} />`}
    ${Array.isArray(answer.mask) && html`<p class="note">A mask of ${answer.mask[0]?.length} × ${answer.mask.length}, shown in the picture.</p>`}
    ${answer.windows && html`<${Windows} windows=${answer.windows} />`}
  `;
}

function Classes({ classes }) {
  if (classes.length === 0) return html`<p>No class.</p>`;
  return html`<ol class="classes">
    ${classes.map(
      (each) => html`<li key=${each.index}>
        <span class="name">${each.label}</span>
        <span class="meter" aria-hidden="true"><span class="good" style=${{ width: `${Math.max(0, Math.min(1, each.score)) * 100}%` }}></span></span>
        <span class="number">${each.score >= 0 && each.score <= 1 ? score(each.score) : number(each.score)}</span>
      </li>`,
    )}
  </ol>`;
}

function Things({ things }) {
  return html`<${Table} caption="What was found" rows=${things.slice(0, SHOWN_THINGS)} empty="Nothing was found." columns=${[
    ["What", (each) => html`<span class="swatch" style=${{ background: colourOf(each.index) }} aria-hidden="true"></span>${each.label}${each.track !== undefined ? ` #${each.track}` : ""}`],
    ["Score", (each) => score(each.score), "number"],
    ["Left, top", (each) => `${Math.round(each.box[0])}, ${Math.round(each.box[1])}`, "number"],
    ["Size", (each) => `${Math.round(each.box[2] - each.box[0])} × ${Math.round(each.box[3] - each.box[1])}`, "number"],
  ]} />
  ${things.length > SHOWN_THINGS && html`<p class="note">and ${whole(things.length - SHOWN_THINGS)} more</p>`}`;
}

/** Spans of a text in their places, where these are known; else as a list. */
function Tags({ tags, text }) {
  const letters = [...text];
  const isPlaced = tags.length > 0 && tags.every((each) => letters.slice(each.start, each.end).join("") === each.text);
  const parts = [];
  let at = 0;
  if (isPlaced) {
    for (const each of tags) {
      parts.push(letters.slice(at, each.start).join(""));
      parts.push(html`<mark key=${each.start}>${each.text} <small>${each.label}</small></mark>`);
      at = each.end;
    }
    parts.push(letters.slice(at).join(""));
  }
  return html`${isPlaced && html`<p class="tagged">${parts}</p>`}
    <${Table} caption="Tags" rows=${tags} empty="No tag." columns=${[
      ["Text", (each) => each.text ?? `${each.start} to ${each.end}`],
      ["Label", (each) => each.label],
      ["Score", (each) => score(each.score), "number"],
    ]} />`;
}

function Embedding({ vector }) {
  return html`<p>${plural(vector.length, "number")}: <span class="tensor">${vector.slice(0, SHOWN_VALUES).map(number).join(", ")}${vector.length > SHOWN_VALUES ? ", …" : ""}</span></p>`;
}

function Windows({ windows }) {
  return html`<${Table} caption="Windows" rows=${windows.slice(0, SHOWN_THINGS)} columns=${[
    ["From, to", (each) => `${each.start_s.toFixed(2)} to ${each.end_s.toFixed(2)} s`],
    ["Answer", briefly],
  ]} />
  ${windows.length > SHOWN_THINGS && html`<p class="note">and ${whole(windows.length - SHOWN_THINGS)} windows more</p>`}`;
}

function briefly(answer) {
  if (answer.classes) return answer.classes.slice(0, 3).map((each) => `${each.label} ${score(each.score)}`).join(", ") || "no class";
  if (answer.number) return `${answer.number.value === null ? "not a number" : number(answer.number.value)} ${answer.number.unit ?? ""}`;
  if (answer.tags) return plural(answer.tags.length, "tag");
  if (answer.embedding) return plural(answer.embedding.length, "number");
  return answer.text ?? "";
}

function Tensor({ tensor }) {
  const values = (tensor.data ?? []).flat(Infinity);
  const numbers = values.filter((each) => typeof each === "number");
  const words = values.slice(0, SHOWN_VALUES).map((each) => (typeof each === "number" ? number(each) : String(each)));
  return html`<div class="tensor-head"><strong>${tensor.name}</strong> <span class="note">${tensor.datatype} ${shape(tensor.shape)}</span></div>
    <p class="tensor">${words.join(", ")}${values.length > SHOWN_VALUES ? ", …" : ""}</p>
    ${numbers.length > 1 && html`<p class="note">least ${number(numbers.reduce((a, b) => Math.min(a, b)))}, most ${number(numbers.reduce((a, b) => Math.max(a, b)))}, at place ${whole(numbers.indexOf(numbers.reduce((a, b) => Math.max(a, b))))}</p>`}`;
}
