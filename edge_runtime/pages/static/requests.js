/* What a model can be sent, by its metadata, and the same request for curl, Python and mosquitto_rr. Pure. */

const FEW = 512;
const SHORT_BYTES = 2000;
const NUMPY = {
  BOOL: "np.bool_", UINT8: "np.uint8", UINT16: "np.uint16", UINT32: "np.uint32", UINT64: "np.uint64", INT8: "np.int8",
  INT16: "np.int16", INT32: "np.int32", INT64: "np.int64", FP16: "np.float16", FP32: "np.float32", FP64: "np.float64",
};
const SENTENCE = "The device answered at once, and everybody was glad.";

/** Messages for a language model. */
export const SENTENCES = { chat: "Name three colours, and a fruit of each.", prompt: "Once upon a time, a small device" };

/** What may be sent, the best first: "chat", "prompt", "picture", "text", "sound", "json". */
export function kindsOf(metadata) {
  if (metadata.language) return ["chat", "prompt", "json"];
  const sources = Object.values(metadata.steps?.inputs ?? {}).map((each) => each.from);
  const takesBytes = (metadata.forms ?? []).some((form) => form.inputs.some((each) => each.datatype === "BYTES"));
  const kinds = [];
  if (takesBytes && sources.includes("picture")) kinds.push("picture");
  if (sources.includes("text")) kinds.push("text");
  if (sources.includes("series")) kinds.push("sound");
  return [...kinds, "json"];
}

/** An example of a kind that is text. kept: a body that the daemon has one of, or null. */
export function exampleOf(metadata, kind, kept = null) {
  if (kind === "text") return keptText(metadata, kept) || SENTENCE;
  if (kept) return inLines(kept.inputs.map(({ data, ...head }) => (data.length <= FEW ? { ...head, data } : head)));
  if (metadata.language) return `${JSON.stringify({ inputs: [bytesOf("chat", JSON.stringify({ messages: [{ role: "user", content: SENTENCES.chat }] }))], parameters: { max_tokens: 100 } }, null, 2)}\n`;
  const inputs = metadata.inputs.map((each) => {
    const sides = each.shape.map((side) => (side < 0 ? 1 : side));
    const few = sides.reduce((a, b) => a * b, 1) <= FEW;
    const head = { name: each.name, datatype: each.datatype, shape: sides };
    return few ? { ...head, data: blank(each.datatype, sides) } : head;
  });
  return inLines(inputs);
}

const inLines = (inputs) => `{\n  "inputs": [\n${inputs.map((each) => `    ${JSON.stringify(each)}`).join(",\n")}\n  ]\n}`;

/** The text that a kept example has for a model of texts; "" where it has none. */
function keptText(metadata, kept) {
  const found = kept?.inputs.find((each) => each.name === textInput(metadata) && each.datatype === "BYTES");
  return found?.data[0] ?? "";
}

/** JSON that somebody wrote, as a body; inputs without data get those of the kept example, else zeros. Throws a sentence. */
export function bodyOf(text, kept = null) {
  let body;
  try {
    body = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) throw new Error('Wanted an object, as {"inputs": […]}.');
  if (!Array.isArray(body.inputs)) return body;
  const dataOf = ({ name, datatype, shape }) =>
    kept?.inputs.find((each) => each.name === name && each.datatype === datatype && String(each.shape) === String(shape))?.data ?? blank(datatype, shape);
  const inputs = body.inputs.map((each) => (each.data === undefined && Array.isArray(each.shape) ? { ...each, data: dataOf(each) } : each));
  return { ...body, inputs };
}

function blank(datatype, sides) {
  const count = sides.reduce((a, b) => a * b, 1);
  return new Array(count).fill(datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0);
}

/** A message to a language model, with what was said before it: body, of `generate_stream`; messages, or text; parameters.
    kind: "chat", or "prompt" for a text as it is. settings: by the words of the request, as text; "": the model's own. */
export function chatOf(kind, turns, message, { system, ...settings }) {
  const parameters = {};
  for (const [name, value] of Object.entries(settings)) if (String(value).trim() && Number.isFinite(Number(value))) parameters[name] = Number(value);
  if (kind === "prompt") return { kind, value: message, parameters, body: { text: message, parameters } };
  const said = turns.filter((turn) => turn.text).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.text },
  ]);
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  const messages = [...first, ...said, { role: "user", content: message }];
  return { kind, value: messages, parameters, body: { chat: JSON.stringify({ messages }), parameters } };
}

const bytesOf = (name, data) => ({ name, datatype: "BYTES", shape: [1], data: [data] });

/** The same request elsewhere. sent: kind, and its value: a file's name, text, or a body. mqtt: of `stats`, or null. */
export function codeOf(model, sent, { origin, needsToken, mqtt, metadata }) {
  const named = encodeURIComponent(model);
  const token = needsToken ? " \\\n  -H 'Authorization: Bearer TOKEN'" : "";
  const url = `${origin}/v2/models/${named}/infer`;
  const topic = `${mqtt?.topics ?? "edge/DEVICE/"}infer/${model}`;
  const host = hostOf(mqtt?.broker);
  const ask = `mosquitto_rr -V 5${host} -t ${quoted(topic)} -e reply/me`;
  if (sent.kind === "picture" || sent.kind === "sound") {
    const type = sent.kind === "sound" ? ` \\\n  -H 'Content-Type: audio/wav' --data-binary @${quoted(sent.value)}` : ` \\\n  -F picture=@${quoted(sent.value)}`;
    return {
      curl: `curl -s ${quoted(url)}${token}${type}`,
      python: python(model, origin, needsToken, sent.kind === "picture" ? [`picture=${text(sent.value)}`] : null, sent.kind === "sound" ? soundLines(metadata, sent.value) : null),
      mosquitto_rr: `${ask} \\\n  -f ${quoted(sent.value)}   # mosquitto 2.1 and later`,
    };
  }
  if (sent.kind === "chat" || sent.kind === "prompt") {
    const input = sent.kind === "chat" ? bytesOf("chat", sent.body.chat) : bytesOf("text", sent.value);
    return {
      curl: `curl -sN ${quoted(`${origin}/v2/models/${named}/generate_stream`)}${token} \\\n  -d ${quoted(JSON.stringify(sent.body))}`,
      python: streamed(model, origin, needsToken, sent),
      mosquitto_rr: `${ask} \\\n  -m ${quoted(JSON.stringify({ inputs: [input], parameters: sent.parameters }))}`,
    };
  }
  const body = sent.kind === "text" ? { text: sent.value } : sent.value;
  const json = JSON.stringify(body);
  const isShort = json.length <= SHORT_BYTES;
  return {
    curl: `curl -s ${quoted(url)}${token} \\\n  -d ${isShort ? quoted(json) : "@request.json"}`,
    python: sent.kind === "text"
      ? python(model, origin, needsToken, null, [`    inputs = {${text(textInput(metadata))}: [${text(sent.value)}]}`])
      : python(model, origin, needsToken, null, arrayLines(body)),
    mosquitto_rr: `${ask} \\\n  ${isShort ? `-m ${quoted(json)}` : "-f request.json"}`,
  };
}

function python(model, origin, needsToken, picture, lines) {
  const usesNumpy = lines?.some((line) => line.includes("np."));
  const asks = picture ? `client.infer(${text(model)}, ${picture.join(", ")})` : `client.infer(${text(model)}, inputs)`;
  return [
    ...(usesNumpy ? ["import numpy as np"] : []),
    "from edge_runtime import OipClient",
    "",
    ...(needsToken ? ["# The token is read from the environment: EDGE_RUNTIME_TOKEN."] : []),
    `with OipClient(${text(origin)}) as client:`,
    ...(lines ?? []),
    `    result = ${asks}`,
    "    print(result.answers or result.outputs)",
  ].join("\n");
}

/** A script that prints an answer as it is written. */
function streamed(model, origin, needsToken, { kind, value, parameters }) {
  const given = Object.entries(parameters).map(([name, each]) => `, ${name}=${each}`).join("");
  return [
    "from edge_runtime import OipClient",
    "",
    ...(needsToken ? ["# The token is read from the environment: EDGE_RUNTIME_TOKEN."] : []),
    `${kind === "chat" ? "messages" : "prompt"} = ${JSON.stringify(value, null, kind === "chat" ? 1 : 0)}`,
    `with OipClient(${text(origin)}) as client:`,
    `    for part in client.stream(${text(model)}, ${kind === "chat" ? "chat=messages" : "text=prompt"}${given}):`,
    '        print(part["text"][0].decode(), end="", flush=True)',
  ].join("\n");
}

function soundLines(metadata, file) {
  const name = Object.keys(metadata.steps?.inputs ?? {})[0] ?? "sound";
  return [`    inputs = {${text(name)}: np.array([open(${text(file)}, "rb").read()], object)}`];
}

function arrayLines(body) {
  const inputs = (body.inputs ?? []).map((each) => {
    const kind = NUMPY[each.datatype] ?? "object";
    const flat = (each.data ?? []).flat(Infinity);
    const values = flat.length > 0 && flat.every((value) => value === 0 || value === false)
      ? `np.zeros(${JSON.stringify(each.shape)}, ${kind})`
      : flat.length <= FEW
        ? `np.array(${literal(flat)}, ${kind}).reshape(${JSON.stringify(each.shape)})`
        : `np.load("${each.name}.npy")`;
    return `        ${text(each.name)}: ${values},`;
  });
  return ["    inputs = {", ...inputs, "    }"];
}

const textInput = (metadata) => Object.entries(metadata.steps?.inputs ?? {}).find(([, each]) => each.from === "text")?.[0] ?? "text";

const literal = (values) => JSON.stringify(values).replaceAll("true", "True").replaceAll("false", "False").replaceAll("null", "None");

const text = (value) => JSON.stringify(value);

/** A word of a shell. */
const quoted = (value) => (/^[\w@%+=:,./-]+$/.test(value) ? value : `'${value.replaceAll("'", "'\\''")}'`);

function hostOf(broker) {
  const found = /^mqtts?:\/\/(?:[^@/]*@)?(\[[^\]]+\]|[^:/]+)(?::(\d+))?/.exec(broker ?? "");
  if (!found) return "";
  return ` -h ${found[1].replace(/[[\]]/g, "")}${found[2] ? ` -p ${found[2]}` : ""}`;
}
