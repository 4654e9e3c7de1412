/* Try it: send a picture, a text, a sound or JSON to a model, and see what it says and how long that took. */

import { html, useCallback, useEffect, useRef, useState } from "./html.js";
import { infer, offers, useDaemon, useOperation } from "./daemon.js";
import { Card, Choice, Code, Problem, Told } from "./parts.js";
import { Answer } from "./answers.js";
import { Chat } from "./chat.js";
import { draw, testPicture } from "./drawing.js";
import { bodyOf, codeOf, exampleOf, kindsOf } from "./requests.js";
import { ms, plural } from "./words.js";

const KINDS = { chat: "A chat", prompt: "A text to go on with", picture: "A picture", text: "A text", sound: "A sound", json: "JSON" };
const KEPT = { golden: "the golden input of its release", "warm-up": "the input of its warm-up" };

export function TryIt({ name }) {
  const models = useOperation("models");
  const names = [...new Set((models.result ?? []).filter((each) => ["ready", "on_demand"].includes(each.state)).map((each) => each.name))];
  const model = name || names[0] || null;
  return html`
    <h1>Try it</h1>
    <${Told} told=${models} what="The models could not be read.">
      ${() =>
        model === null
          ? html`<p>No model is ready. Copy one into the models folder, as <code>NAME/1/model.onnx</code>.</p>`
          : html`
              <label class="pick">Model
                <select value=${model} onChange=${(event) => { location.hash = `#/try/${encodeURIComponent(event.target.value)}`; }}>
                  ${(names.includes(model) ? names : [model, ...names]).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
                </select>
              </label>
              <${OfModel} key=${model} model=${model} />
            `}
    <//>
  `;
}

function OfModel({ model }) {
  const metadata = useOperation("metadata", { model });
  return html`<${Told} told=${metadata} what=${`${model} cannot be tried now.`}>
    ${(told) => html`<${Bench} model=${model} metadata=${told} />`}
  <//>`;
}

function Bench({ model, metadata }) {
  const { session } = useDaemon();
  const stats = useOperation("stats");
  const kinds = kindsOf(metadata);
  const [kind, choose] = useState(kinds[0]);
  const [texts, write] = useState({ text: "", json: exampleOf(metadata, "json") });
  const isText = kind === "text" || kind === "json";
  const example = useOperation(isText && !metadata.language && offers(session, "example") ? "example" : null, { model });
  const kept = example.result?.body ?? null; // an input that the device has for it
  const [timeoutMs, setTimeoutMs] = useState("");
  const [sent, setSent] = useState(null); // what was sent: kind, value, and of a picture its bitmap
  const [told, tell] = useState(null); // answer and tookMs, or error
  const [isBusy, setBusy] = useState(false);
  const number = useRef(0);

  useEffect(() => {
    if (!kept) return;
    const made = exampleOf(metadata, "json");
    write((now) => ({ text: now.text || exampleOf(metadata, "text", kept), json: now.json === made ? exampleOf(metadata, "json", kept) : now.json }));
  }, [kept]);

  const send = useCallback(async (what) => {
    const mine = ++number.current;
    setBusy(true);
    tell(null);
    setSent(what);
    const wishes = { timing: true, ...(timeoutMs ? { timeout_ms: Number(timeoutMs) } : {}) };
    let found;
    try {
      found = await ask(model, what, wishes);
    } catch (error) {
      found = { error };
    }
    if (mine !== number.current) return;
    tell(found);
    setBusy(false);
  }, [model, timeoutMs]);

  const sendFile = async (file, value) => {
    let bitmap = null;
    try {
      bitmap = kind === "picture" ? await createImageBitmap(file) : null;
    } catch {
      // A picture that this browser cannot show may still be one that the daemon reads.
    }
    await send({ kind, file, value, bitmap });
  };

  const sendText = async (event) => {
    event.preventDefault();
    try {
      await send(kind === "text" ? { kind, value: texts.text } : { kind, value: bodyOf(texts.json, kept) });
    } catch (error) {
      setSent(null);
      tell({ error: { message: error.message, code: "decode_failed", retryAfterMs: null } });
    }
  };

  const useExample = async () => {
    if (kind === "picture") {
      await sendFile(new File([await testPicture()], "test.png", { type: "image/png" }), "test.png");
      return;
    }
    write({ ...texts, [kind]: exampleOf(metadata, kind, kept) });
  };

  const choice = kinds.length > 1 && html`<${Choice} name="kind" label="Send" value=${kind} choices=${kinds.map((each) => [each, KINDS[each]])}
    onChange=${(each) => { choose(each); setSent(null); tell(null); }} />`;
  const mqtt = stats.result?.mqtt ?? null;
  const elsewhere = sent && html`<${SameRequest} code=${codeOf(model, sent, { origin: location.origin, needsToken: session.is_logged_in, mqtt, metadata })} hasMqtt=${Boolean(mqtt)} />`;
  if (kind === "chat" || kind === "prompt") {
    return html`<${Chat} key=${kind} model=${model} kind=${kind} side=${choice} onSent=${setSent} />${elsewhere}`;
  }
  return html`
    <div class="bench">
      <${Card} title="What to send">
        ${choice}
        ${kind === "picture" && html`<${PictureInput} onFile=${sendFile} onExample=${useExample} />`}
        ${kind === "sound" && html`<${SoundInput} onFile=${sendFile} metadata=${metadata} />`}
        ${isText &&
        html`<form onSubmit=${sendText}>
          <label for="body">${kind === "text" ? "Text" : "JSON of the request"}</label>
          <textarea id="body" rows=${kind === "text" ? 4 : 10} spellcheck=${kind === "text"} value=${texts[kind]}
            placeholder=${kind === "text" ? "Write something" : ""} onInput=${(event) => write({ ...texts, [kind]: event.target.value })}></textarea>
          ${kept && html`<p class="note">It begins with ${KEPT[example.result.source]}.</p>`}
          ${kind === "json" && html`<p class="note">An input without data is sent ${kept ? "as it is there, of another shape as" : "as"} zeros.</p>`}
          <div class="buttons">
            <button type="submit" class="main" disabled=${isBusy || !texts[kind].trim()}>Send</button>
            <button type="button" onClick=${useExample}>Use an example</button>
          </div>
        </form>`}
        <label class="inline">Answer within <input type="number" min="1" max="600000" inputmode="numeric" value=${timeoutMs} placeholder="any" onInput=${(event) => setTimeoutMs(event.target.value)} /> ms</label>
      <//>
      <${Card} title="What it says">
        <div aria-live="polite">
          ${isBusy && html`<p class="note">Asking ${model}…</p>`}
          ${!isBusy && told === null && html`<p class="note">Nothing was sent yet.</p>`}
          ${told?.error && html`<${Problem} error=${told.error} what=${`${model} did not answer.`} />`}
        </div>
        ${sent?.bitmap && html`<${Drawn} bitmap=${sent.bitmap} answer=${told?.answer} />`}
        ${told?.answer && html`
          <${Answer} answer=${told.answer} text=${sent.kind === "text" ? sent.value : ""} />
          <${Timing} answer=${told.answer} tookMs=${told.tookMs} />
          <details><summary>The answer as JSON</summary><${Code} name="The answer as JSON" text=${shortened(told.answer)} /></details>`}
      <//>
    </div>
    ${elsewhere}
  `;
}

async function ask(model, { kind, file, value }, wishes) {
  if (kind === "picture") {
    const form = new FormData();
    form.append("picture", file);
    for (const [name, wish] of Object.entries(wishes)) form.append(name, String(wish));
    return infer(model, form);
  }
  if (kind === "sound") return infer(model, { picture: await base64(file), parameters: wishes });
  const body = kind === "text" ? { text: value } : value;
  return infer(model, { ...body, parameters: { ...body.parameters, ...wishes } });
}

function base64(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => fail(new Error("This file could not be read."));
    reader.readAsDataURL(file);
  });
}

/** Drop, choose, paste, or take a picture. onFile: (file, its name). */
function PictureInput({ onFile, onExample }) {
  const [isOver, setOver] = useState(false);
  const [hasCamera, setCamera] = useState(false);
  const take = (list) => {
    const file = [...(list ?? [])].find((each) => each.type.startsWith("image/"));
    if (file) onFile(file, file.name || "photo.jpg");
  };
  useEffect(() => {
    const paste = (event) => take(event.clipboardData?.files);
    addEventListener("paste", paste);
    return () => removeEventListener("paste", paste);
  });
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    take(event.dataTransfer.files);
  };
  return html`
    <div class=${`drop ${isOver ? "over" : ""}`} onDrop=${dropped}
      onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)}>
      <p>Drop a picture here, or</p>
      <div class="buttons">
        <label class="button main">Choose a picture<input type="file" class="unseen" accept="image/*" onChange=${(event) => take(event.target.files)} /></label>
        ${canCapture
          ? html`<button type="button" onClick=${() => setCamera(true)}>Take a picture</button>`
          : html`<label class="button">Take a picture<input type="file" class="unseen" accept="image/*" capture="environment" onChange=${(event) => take(event.target.files)} /></label>`}
        <button type="button" onClick=${onExample}>Use an example</button>
      </div>
    </div>
    ${hasCamera && html`<${Camera} onFile=${onFile} onEnd=${() => setCamera(false)} />`}
  `;
}

// Browsers give a page the camera over HTTPS and on the machine itself; elsewhere a phone's own camera makes the file.
const canCapture = Boolean(navigator.mediaDevices?.getUserMedia);

function Camera({ onFile, onEnd }) {
  const video = useRef(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let stream = null;
    let isHere = true;
    navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } }).then(
      (found) => {
        stream = found;
        if (isHere) video.current.srcObject = found;
        else stop(found);
      },
      (error) => isHere && setProblem(error),
    );
    return () => {
      isHere = false;
      if (stream) stop(stream);
    };
  }, []);
  const take = () => {
    const canvas = document.createElement("canvas");
    canvas.width = video.current.videoWidth;
    canvas.height = video.current.videoHeight;
    canvas.getContext("2d").drawImage(video.current, 0, 0);
    canvas.toBlob((blob) => onFile(new File([blob], "photo.jpg", { type: "image/jpeg" }), "photo.jpg"), "image/jpeg", 0.9);
    onEnd();
  };
  return html`<div class="camera">
    ${problem
      ? html`<div class="problem" role="alert"><p>The browser gave no camera: ${problem.message}</p></div>`
      : html`<video ref=${video} autoplay playsinline muted aria-label="What the camera sees"></video>`}
    <div class="buttons">
      ${!problem && html`<button type="button" class="main" onClick=${take}>Take it</button>`}
      <button type="button" onClick=${onEnd}>Leave it</button>
    </div>
  </div>`;
}

const stop = (stream) => stream.getTracks().forEach((track) => track.stop());

function SoundInput({ onFile, metadata }) {
  const table = Object.values(metadata.steps?.inputs ?? {}).find((each) => each.from === "series") ?? {};
  return html`<div class="drop">
    <p>A WAV file of ${table.rate ? `${table.rate} samples a second` : "the model's own rate"}</p>
    <div class="buttons">
      <label class="button main">Choose a file<input type="file" class="unseen" accept=".wav,.flac,audio/*" onChange=${(event) => {
        const file = event.target.files[0];
        if (file) onFile(file, file.name);
      }} /></label>
    </div>
  </div>`;
}

function Drawn({ bitmap, answer }) {
  const place = useRef(null);
  useEffect(() => draw(place.current, bitmap, answer), [bitmap, answer]);
  const seen = (answer?.answers ?? [answer ?? {}])[0] ?? {};
  const things = seen.boxes ?? seen.masks ?? seen.keypoints ?? [];
  const words = things.length > 0 ? `with ${plural(things.length, "thing")} marked: ${things.slice(0, 10).map((each) => each.label).join(", ")}` : "as it was sent";
  return html`<canvas class="drawn" ref=${place} role="img" aria-label=${`The picture, ${words}`}></canvas>`;
}

/** Where the time went, as one bar. */
function Timing({ answer, tookMs }) {
  const told = answer.parameters ?? answer.timing ?? {};
  const waited = told.queue_ms ?? 0;
  const ran = told.run_ms ?? 0;
  const rest = Math.max(0, tookMs - waited - ran);
  const parts = [["Waiting in the queue", waited, "line-3"], ["Running", ran, "line-1"], ["The way, reading and writing", rest, "line-2"]];
  return html`<div class="timing">
    <h3>${ms(tookMs)} in all</h3>
    <div class="stack" aria-hidden="true">${parts.map(([words, value, kind]) => html`<div key=${words} class=${kind} style=${{ width: `${(100 * value) / Math.max(tookMs, 1e-9)}%` }}></div>`)}</div>
    <ul class="legend">${parts.map(([words, value, kind]) => html`<li key=${words}><span class=${`swatch ${kind}`} aria-hidden="true"></span>${words} <strong>${ms(value)}</strong></li>`)}</ul>
    ${told.batch_rows > 0 && html`<p class="note">It ran in a batch of ${plural(told.batch_rows, "row")}.</p>`}
  </div>`;
}

function SameRequest({ code, hasMqtt }) {
  const [way, choose] = useState("curl");
  return html`<${Card} title="The same from elsewhere">
    <${Choice} name="way" label="By" value=${way} onChange=${choose} choices=${[["curl", "curl"], ["python", "Python"], ["mosquitto_rr", "mosquitto_rr"]]} />
    <${Code} name=${`The same request by ${way}`} text=${code[way]} />
    ${way === "mosquitto_rr" && !hasMqtt && html`<p class="note">MQTT is off on this device; [mqtt] of its configuration, or --mqtt, switches it on.</p>`}
  <//>`;
}

const MOST_CHARACTERS = 20_000;

function shortened(answer) {
  const text = JSON.stringify(answer, null, 1);
  return text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}\n… ${text.length - MOST_CHARACTERS} characters more` : text;
}
