/* What a model can be sent, by its metadata, and the same request for curl, Python and mosquitto_rr. Pure. */

const FEW = 512;
const SHORT_BYTES = 2000;
const NUMPY = {
  BOOL: "np.bool_", UINT8: "np.uint8", UINT16: "np.uint16", UINT32: "np.uint32", UINT64: "np.uint64", INT8: "np.int8",
  INT16: "np.int16", INT32: "np.int32", INT64: "np.int64", FP16: "np.float16", FP32: "np.float32", FP64: "np.float64",
};
const SENTENCE = "The device answered at once, and everybody was glad.";

/** What may be sent, the best first: "picture", "text", "sound", "json". */
export function kindsOf(metadata) {
  const sources = Object.values(metadata.steps?.inputs ?? {}).map((each) => each.from);
  const takesBytes = (metadata.forms ?? []).some((form) => form.inputs.some((each) => each.datatype === "BYTES"));
  const kinds = [];
  if (takesBytes && sources.includes("picture")) kinds.push("picture");
  if (sources.includes("text")) kinds.push("text");
  if (sources.includes("series")) kinds.push("sound");
  return [...kinds, "json"];
}

/** An example of a kind that is text. */
export function exampleOf(metadata, kind) {
  if (kind === "text") return SENTENCE;
  const inputs = metadata.inputs.map((each) => {
    const sides = each.shape.map((side) => (side < 0 ? 1 : side));
    const few = sides.reduce((a, b) => a * b, 1) <= FEW;
    const head = { name: each.name, datatype: each.datatype, shape: sides };
    return few ? { ...head, data: blank(each.datatype, sides) } : head;
  });
  const lines = inputs.map((each) => `    ${JSON.stringify(each)}`);
  return `{\n  "inputs": [\n${lines.join(",\n")}\n  ]\n}`;
}

/** JSON that somebody wrote, as a body; inputs without data get zeros. Throws a sentence. */
export function bodyOf(text) {
  let body;
  try {
    body = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (body === null || typeof body !== "object" || Array.isArray(body)) throw new Error('Wanted an object, as {"inputs": […]}.');
  if (!Array.isArray(body.inputs)) return body;
  const inputs = body.inputs.map((each) => (each.data === undefined && Array.isArray(each.shape) ? { ...each, data: blank(each.datatype, each.shape) } : each));
  return { ...body, inputs };
}

function blank(datatype, sides) {
  const count = sides.reduce((a, b) => a * b, 1);
  return new Array(count).fill(datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0);
}

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
