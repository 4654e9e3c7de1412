/* Live: the last results of each rule that publishes, and of each camera, while somebody looks. */

import { html, useEffect, useRef, useState } from "./html.js";
import { offers, useDaemon, useOperation } from "./daemon.js";
import { Card, Mark, Time, Told } from "./parts.js";
import { Answer } from "./answers.js";

const LOOK_MS = 1000;
const PICTURE_MS = 400;

export function Live() {
  const { session } = useDaemon();
  const isOffered = offers(session, "results");
  const results = useOperation(isOffered ? "results" : null, {}, { everyMs: LOOK_MS });
  const cameras = useOperation(offers(session, "cameras") ? "cameras" : null, {}, { everyMs: LOOK_MS * 5 });
  const [isStill, hold] = useState(matchMedia("(prefers-reduced-motion: reduce)").matches);
  if (!isOffered || results.error?.code === "unsupported") return html`<${NothingPublished} />`;
  return html`
    <div class="heading"><h1>Live</h1>
      <button type="button" aria-pressed=${isStill} onClick=${() => hold(!isStill)}>${isStill ? "Move" : "Hold still"}</button></div>
    ${cameras.result?.length > 0 && html`<${CameraList} cameras=${cameras.result} />`}
    <${Told} told=${results} what="The results could not be read.">
      ${(found) => html`
        ${found.length === 0 && html`<p class="note">No rule publishes anything. A rule [[publish]] of the configuration says what is shown here.</p>`}
        <div class="live">${found.map((each) => html`<${Result} key=${each.topic} result=${each} isStill=${isStill} maySee=${session.may.includes("view")} />`)}</div>
      `}
    <//>
  `;
}

function NothingPublished() {
  return html`<h1>Live</h1>
    <${Card} title="Nothing is published">
      <p>A rule <code>[[publish]]</code> of the configuration names a model, and a camera or a folder that it looks at. Its last results are shown here.</p>
    <//>`;
}

function CameraList({ cameras }) {
  const levels = { online: "good", starting: "busy", lost: "bad", unused: "quiet" };
  return html`<${Card} title="Cameras">
    <ul class="bare">
      ${cameras.map(
        (each) => html`<li key=${`${each.camera} ${each.model} ${each.name}`}>
          <strong>${each.camera || each.from}</strong>${" "}<${Mark} level=${levels[each.state] ?? "quiet"}>${each.state}<//>
          ${each.reason && html`<span class="note">${each.reason}</span>`}
        </li>`,
      )}
    </ul>
  <//>`;
}

function Result({ result, isStill, maySee }) {
  const title = [result.camera, result.model].filter(Boolean).join(" · ");
  const picture = `/page/picture/${result.topic.split("/").map(encodeURIComponent).join("/")}`;
  return html`<${Card} title=${title || result.topic} id=${`result-${result.topic}`}>
    <p class="note">${result.topic}${result.answer?.time && html` · <${Time} at=${result.answer.time} />`}</p>
    ${result.has_picture && (maySee ? html`<${Moving} source=${picture} isStill=${isStill} name=${title} />` : html`<p class="note">Pictures of cameras need the right view.</p>`)}
    ${result.answer === null ? html`<p class="note">No result yet.</p>` : html`<${Answer} answer=${result.answer} />`}
  <//>`;
}

/** A picture that is asked for again and again, the next once the last is there. */
function Moving({ source, isStill, name }) {
  const [shown, show] = useState(null);
  const last = useRef(null);
  useEffect(() => {
    let isHere = true;
    let timer = null;
    const next = async () => {
      try {
        const response = document.hidden ? null : await fetch(source, { headers: { "x-edge-page": "1" } });
        if (response?.ok && isHere) {
          const url = URL.createObjectURL(await response.blob());
          if (last.current) URL.revokeObjectURL(last.current);
          last.current = url;
          show(url);
        }
      } catch {
        // The daemon is away; the page says so.
      }
      if (isHere && !isStill) timer = setTimeout(next, PICTURE_MS);
    };
    next();
    return () => {
      isHere = false;
      clearTimeout(timer);
    };
  }, [source, isStill]);
  useEffect(() => () => last.current && URL.revokeObjectURL(last.current), []);
  return shown ? html`<img class="frame" src=${shown} alt=${`The last picture of ${name}, with what was seen`} />` : html`<p class="note">No picture yet.</p>`;
}
