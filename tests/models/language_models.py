"""Language models with random weights, as `optimum-cli export openvino` writes them: graph, tokenizer, detokenizer.

Made without torch and without a download, by a process of its own: `openvino_tokenizers` changes OpenVINO's classes for
all that import it. `tiny_model` is what tests serve; `large_model` has the weight of a small model in use, for figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SPECIAL_TOKENS = ("<|end|>", "<|start|>", "<|pad|>", "<image>")
"""The end of a text, or of a message; the beginning of a message; padding; a place of a picture."""

PATCH = 14
"""Pixels of a side of what makes one token of a picture."""

BYTES = 256
"""The first tokens are the bytes in their order, so a text without `MERGES` has as many tokens as bytes."""

MERGES = ("t h", "h e", "th e", "i n", "a n", "an d", "e r", "o n", "Ġ the", "Ġ and")
"""Pairs that are one token; Ġ stands for a space."""

CHAT_TEMPLATE = (
    "{% if tools %}<|start|>system\nTools: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class Size(NamedTuple):
    """The size of a model. context: most tokens of a prompt with its answer, which config.json tells.

    sees: tokens of each side of a picture; 0: it reads text alone.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 128
    vocabulary: int = 512
    context: int = 512
    is_int8: bool = False
    seed: int = 1
    follows: str = ""
    sees: int = 0


LARGE = Size(768, 12, 12, 4, 2048, 8192, 4096, is_int8=True)
"""88 M parameters: of these bars are told."""


def tiny_model(folder: Path, *, follows: str = "", **size: Any) -> Path:
    """Write a model of 0.2 M parameters into a version's folder, with its chat template; gives the folder back.

    follows: a text whose bytes are all different: greedy answers then go on with it, from the byte that the prompt ends
    with (a new line, as a chat does: from its beginning), and end with the token `<|end|>` behind it. That makes one
    score far higher than all others, as a trained model's mostly is, so that every CPU writes the same; without it
    two scores may be as near as rounding. size: other fields of `Size`.
    """
    return _make(folder, Size(**size, follows=follows))


def tiny_vision_model(folder: Path, **size: Any) -> Path:
    """Write a model of that size that sees pictures, too, as LLaVA does: each is 16 tokens, behind its new line."""
    return _make(folder, Size(**{"sees": 4, **size}))


def large_model(folder: Path) -> Path:
    """Write the model of 88 M parameters in int8."""
    return _make(folder, LARGE)


def _make(folder: Path, size: Size) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, str(folder), json.dumps(size)], check=True, stdout=subprocess.DEVNULL)
    return folder


# ---- in the process of its own --------------------------------------------------------------------------------------


def _write(folder: Path, size: Size) -> None:
    _write_tokenizer(folder, size)
    _write_graph(folder, size)
    if size.sees:
        _write_eyes(folder, size)
    special = {token: _special_id(token) for token in SPECIAL_TOKENS}
    text = {"max_position_embeddings": size.context, "vocab_size": size.vocabulary}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **text,
        "eos_token_id": special["<|end|>"],
        "pad_token_id": special["<|pad|>"],
    }
    if size.sees:
        seen = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
        config = {**config, **seen, "hidden_size": size.width, "vision_config": {"patch_size": PATCH}}
    generation = {"eos_token_id": special["<|end|>"], "pad_token_id": special["<|pad|>"], "do_sample": False}
    tokenizer = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": size.context,
        "added_tokens_decoder": {str(number): {"content": token, "special": True} for token, number in special.items()},
    }
    for name, content in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))


def _special_id(token: str) -> int:
    return BYTES + len(MERGES) + SPECIAL_TOKENS.index(token)


def _byte_letters() -> list[str]:
    """The letters by which byte-level tokenizers write the bytes, in the order of the bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [each for each in range(BYTES) if each not in shown]
    letters = {each: chr(each) for each in shown} | {each: chr(BYTES + at) for at, each in enumerate(hidden)}
    return [letters[each] for each in range(BYTES)]


def _write_tokenizer(folder: Path, size: Size) -> None:
    import openvino
    from openvino_tokenizers import tokenizer_pipeline as steps
    from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

    special = {token: _special_id(token) for token in SPECIAL_TOKENS}
    vocabulary = [*_byte_letters(), *(each.replace(" ", "") for each in MERGES), *SPECIAL_TOKENS]
    vocabulary += [f"<{number}>" for number in range(len(vocabulary), size.vocabulary)]
    pipeline = steps.TokenizerPipeline()
    pipeline.skip_tokens = list(special.values())
    pipeline.add_steps(steps.SpecialTokensSplit.from_string_iter(SPECIAL_TOKENS))
    pipeline.add_steps(steps.RegexSplitStep.byte_level_splitter())
    pipeline.add_steps(steps.BytesToCharsStep())
    pipeline.add_steps(steps.BPETokenizationStep(vocabulary, list(MERGES), added_tokens=special))
    pipeline.add_steps(steps.CombineSegmentsStep([steps.Sequence()]))
    pipeline.add_steps(steps.PaddingStep(token="<|pad|>", _token_id=special["<|pad|>"]))
    decoded = [bytes([each]) for each in range(BYTES)]
    decoded += [each.replace(" ", "").replace("Ġ", " ").encode() for each in MERGES]
    decoded += [each.encode() for each in vocabulary[len(decoded) :]]
    pipeline.add_steps(steps.VocabDecoderStep(decoded, list(special.values())))
    pipeline.add_steps(steps.FuseStep())
    pipeline.add_steps(steps.UTF8ValidateStep(mode=steps.UTF8ReplaceMode.REPLACE))
    for name, model in (
        ("openvino_tokenizer", change_outputs_type(pipeline.get_tokenizer_ov_subgraph(), openvino.Type.i64)),
        ("openvino_detokenizer", change_inputs_type(pipeline.get_detokenizer_ov_subgraph(), openvino.Type.i64)),
    ):
        for key, value in (("eos_token_id", special["<|end|>"]), ("pad_token_id", special["<|pad|>"])):
            model.set_rt_info(value, key)
        model.set_rt_info(CHAT_TEMPLATE, "chat_template")
        openvino.save_model(model, str(folder / f"{name}.xml"))


def _write_graph(folder: Path, size: Size) -> None:
    """Write a Llama: rotary positions, grouped heads, a gated hidden layer, keys and values kept as states."""
    import numpy as np
    import openvino
    from openvino import opset13 as op

    random = np.random.default_rng(size.seed)
    head = size.width // size.heads

    def number(value: Any, kind: Any = np.int64) -> Any:
        return op.constant(np.array(value, kind))

    def linear(x: Any, rows: int, columns: int, values: Any = None) -> Any:
        """x times a weight [rows, columns], transposed."""
        if values is None and size.is_int8:
            integers = random.integers(-127, 128, (rows, columns), np.int8)
            scale = np.full((rows, 1), columns**-0.5 / 73.3, np.float32)
            weight = op.multiply(op.convert(op.constant(integers), "f32"), op.constant(scale))
        else:
            made = random.standard_normal((rows, columns), np.float32) * columns**-0.5 if values is None else values
            weight = op.constant(np.float32(made))
        return op.matmul(x, weight, False, True)

    def normed(x: Any) -> Any:
        mean = op.reduce_mean(op.power(x, number(2, np.float32)), number([-1]), True)
        return op.multiply(x, op.power(op.add(mean, number(1e-5, np.float32)), number(-0.5, np.float32)))

    def parameter(name: str, shape: list[int], kind: Any) -> Any:
        made = op.parameter(openvino.PartialShape(shape), kind, name=name)
        made.output(0).set_names({name})
        return made

    ids = parameter("input_ids", [-1, -1], np.int64)
    embedded = parameter("inputs_embeds", [-1, -1, size.width], np.float32)
    mask = parameter("attention_mask", [-1, -1], np.int64)
    positions = parameter("position_ids", [-1, -1], np.int64)
    beams = parameter("beam_idx", [-1], np.int32)

    table, out = _following(size, random) if size.follows else (None, None)
    if table is None:
        table = random.standard_normal((size.vocabulary, size.width), np.float32)
    x = op.gather(op.constant(np.float32(table)), op.convert(ids, "i32"), number(0, np.int32))
    if size.sees:
        x.output(0).set_names({"inputs_embeds"})
        texts = openvino.Model([op.result(x)], [ids], "text_embeddings")
        openvino.save_model(texts, str(folder / "openvino_text_embeddings_model.xml"), compress_to_fp16=False)
        x = ids = embedded
    batch = op.gather(op.shape_of(ids), number([0]), number(0))

    frequencies = (10000.0 ** (-np.arange(0, head, 2) / head)).astype(np.float32).reshape(1, head // 2, 1)
    angles = op.transpose(
        op.matmul(op.constant(frequencies), op.unsqueeze(op.convert(positions, "f32"), number(1)), False, False),
        number([0, 2, 1]),
    )
    angles = op.unsqueeze(op.concat([angles, angles], -1), number(1))
    cosine, sine = op.cos(angles), op.sin(angles)

    def heads_of(y: Any, count: int) -> Any:
        return op.transpose(op.reshape(y, number([0, 0, count, head]), True), number([0, 2, 1, 3]))

    def turned(y: Any) -> Any:
        first, second = op.split(y, number(-1), 2).outputs()
        other = op.concat([op.multiply(second, number(-1, np.float32)), first], -1)
        return op.add(op.multiply(y, cosine), op.multiply(other, sine))

    sinks = []

    def kept(y: Any, name: str) -> Any:
        described = openvino.op.util.VariableInfo()
        described.data_shape = openvino.PartialShape([-1, size.kv_heads, -1, head])
        described.data_type, described.variable_id = openvino.Type.f32, name
        variable = openvino.op.util.Variable(described)
        shape = op.concat([batch, number([size.kv_heads]), number([0]), number([head])], 0)
        past = op.read_value(op.broadcast(number(0, np.float32), shape), variable)
        whole = op.concat([op.gather(past, beams, number(0, np.int32)), y], 2)
        sinks.append(op.assign(whole, variable))
        return whole

    def repeated(y: Any) -> Any:
        """Each head of keys or values for all queries of its group."""
        group = size.heads // size.kv_heads
        shape = op.concat(
            [batch, number([size.kv_heads]), number([group]), op.gather(op.shape_of(y), number([2]), number(0)),
             number([head])], 0,
        )  # fmt: skip
        wide = op.broadcast(op.unsqueeze(y, number(2)), shape, "BIDIRECTIONAL")
        return op.reshape(wide, number([0, size.heads, -1, head]), True)

    # What a position may see: none that comes later, and no padding.
    total = op.gather(op.shape_of(mask), number(1), number(0))
    length = op.gather(op.shape_of(ids), number(1), number(0))
    all_places = op.range(number(0), total, number(1), output_type="i64")
    own_places = op.range(op.subtract(total, length), total, number(1), output_type="i64")
    earlier = op.less_equal(op.unsqueeze(all_places, number(0)), op.unsqueeze(own_places, number(1)))
    seen = op.logical_and(
        op.unsqueeze(op.unsqueeze(earlier, number(0)), number(0)),
        op.unsqueeze(op.unsqueeze(op.convert(mask, "boolean"), number(1)), number(1)),
    )
    bias = op.select(seen, number(0, np.float32), number(-65504, np.float32))

    for layer in range(size.layers):
        y = normed(x)
        query = turned(heads_of(linear(y, size.width, size.width), size.heads))
        key = kept(turned(heads_of(linear(y, size.kv_heads * head, size.width), size.kv_heads)), f"key.{layer}")
        value = kept(heads_of(linear(y, size.kv_heads * head, size.width), size.kv_heads), f"value.{layer}")
        seen_values = op.scaled_dot_product_attention(query, repeated(key), repeated(value), bias, causal=False)
        joined = op.reshape(op.transpose(seen_values, number([0, 2, 1, 3])), number([0, 0, size.width]), True)
        silent = np.zeros((size.width, size.width), np.float32) if size.follows else None
        x = op.add(x, linear(joined, size.width, size.width, silent))
        y = normed(x)
        gated = op.multiply(op.swish(linear(y, size.hidden, size.width)), linear(y, size.hidden, size.width))
        silent = np.zeros((size.width, size.hidden), np.float32) if size.follows else None
        x = op.add(x, linear(gated, size.width, size.hidden, silent))
    logits = linear(normed(x), size.vocabulary, size.width, out)
    logits.output(0).set_names({"logits"})
    inputs = [ids, mask, positions, beams]
    model = openvino.Model([op.result(logits)], sinks, inputs, "language_model")
    name = "openvino_language_model.xml" if size.sees else "openvino_model.xml"
    openvino.save_model(model, str(folder / name), compress_to_fp16=False)


def _write_eyes(folder: Path, size: Size) -> None:
    """Write what makes tokens of a picture: a weight for the pixels of each patch, and one for its place."""
    import numpy as np
    import openvino
    from openvino import opset13 as op

    random = np.random.default_rng(size.seed + 1)
    side, tokens = size.sees * PATCH, size.sees**2
    pixels = op.parameter(openvino.PartialShape([-1, 3, -1, -1]), np.float32, name="pixel_values")
    pixels.output(0).set_names({"pixel_values"})
    weight = random.standard_normal((size.width, 3, PATCH, PATCH), np.float32) * (3 * PATCH**2) ** -0.5 * 4
    patches = op.convolution(pixels, op.constant(weight.astype(np.float32)), [PATCH, PATCH], [0, 0], [0, 0], [1, 1])
    rows = op.transpose(
        op.reshape(patches, op.constant(np.array([0, size.width, tokens], np.int64)), True),
        op.constant(np.array([0, 2, 1], np.int64)),
    )
    places = random.standard_normal((1, tokens, size.width), np.float32)
    seen = op.add(rows, op.constant(places))
    seen.output(0).set_names({"last_hidden_state"})
    model = openvino.Model([op.result(seen)], [pixels], "vision_embeddings")
    openvino.save_model(model, str(folder / "openvino_vision_embeddings_model.xml"), compress_to_fp16=False)
    square = {"height": side, "width": side}
    config = {
        "image_processor_type": "CLIPImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "crop_size": square,
        "size": {"shortest_edge": side},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=1))


def _following(size: Size, random: Any) -> tuple[Any, Any]:
    """Return the table of tokens and the last weight of a model whose likeliest token follows from the last one."""
    import numpy as np

    table = random.standard_normal((size.vocabulary, size.width), np.float32)
    text = size.follows.encode()
    assert len(set(text)) == len(text), "each byte of it says which comes next, so it comes once"
    nexts = dict(zip(text, (*text[1:], _special_id("<|end|>")), strict=True))
    nexts.setdefault(ord("\n"), text[0])  # with which the chat template ends
    out = np.zeros_like(table)
    for token, following in nexts.items():
        out[following] += table[token] / np.linalg.norm(table[token])
    return table, out


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Size(*json.loads(sys.argv[2])))
