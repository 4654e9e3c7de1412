"""A small model of BERT's kind and its WordPiece tokenizer, made by script: weights by seed, words of a little story.

Every function writes a folder as Hugging Face's exporters leave it: `model.onnx`, `tokenizer.json`, `config.json`. What
such a model should answer is computed by tests with the tokenizer and the raw run alone, `expected_logits` and others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_STORY = """
the a an of and to in on at it is was were be been not no very all some one two film story river house old new
good bad great poor dull warm cold bright dark long short rain sun night day morning door stairs step water road
anna peter maria berlin paris london north sea bank office company bought sold went came saw liked hated loved
they he she we you i this that with without from by for as so but or if then there here when where who what how
much many few more most other own same such only just over under again further once price ticket train station
"""
WORDS = _STORY.split()
"""The vocabulary, beside letters, endings and special tokens."""

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = [
    *SPECIAL, *WORDS, *LETTERS, *(f"##{each}" for each in LETTERS), "##ing", "##ed", "##s", "##er", "##ly",
    *".,!?'-:;()",
]  # fmt: skip

HIDDEN, HEADS, POSITIONS = 32, 4, 64


class Size(NamedTuple):
    """Of a model: numbers of a token, and layers, each with 4 heads and twice as many numbers in its middle."""

    hidden: int = HIDDEN
    layers: int = 1


SMALL = Size()


SENTIMENT = ("negative", "neutral", "positive")
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
ENTAILMENT = ("contradiction", "neutral", "entailment")

OPSET, IR_VERSION = 17, 8


def write_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json`: WordPiece, lower case, `[CLS] a [SEP] b [SEP]`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    known = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", known["[SEP]"]), ("[CLS]", known["[CLS]"]))
    tokenizer.add_special_tokens(list(SPECIAL))
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def classifier(folder: Path, labels: Sequence[str] = SENTIMENT, size: Size = SMALL, **config: Any) -> Path:
    """input_ids, attention_mask, token_type_ids -> logits FP32 [rows, labels], by the first token."""
    nodes = [*_body(size), *_first_token(), *_head("first", "logits")]
    _write(folder, "logits", nodes, ["rows", len(labels)], len(labels), size)
    return _beside(folder, "BertForSequenceClassification", labels, config)


def tagger(folder: Path, labels: Sequence[str] = ENTITIES, **config: Any) -> Path:
    """The same inputs -> logits FP32 [rows, tokens, labels]."""
    shape = ["rows", "tokens", len(labels)]
    _write(folder, "logits", [*_body(SMALL), *_head("body", "logits")], shape, len(labels))
    return _beside(folder, "BertForTokenClassification", labels, config)


def encoder(folder: Path, pooling: str = "mean_tokens", length: int = 16, **config: Any) -> Path:
    """The same inputs -> last_hidden_state FP32 [rows, tokens, 32], as sentence-transformers leaves it."""
    nodes = [*_body(SMALL), helper.make_node("Identity", ["body"], ["last_hidden_state"])]
    _write(folder, "last_hidden_state", nodes, ["rows", "tokens", HIDDEN], 0)
    _beside(folder, "BertModel", (), config)
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": HIDDEN, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "type": "sentence_transformers.models.Transformer"}]))
    return folder


# ---- the graph ------------------------------------------------------------------------------------------------------


def _weights(classes: int, size: Size) -> list[onnx.TensorProto]:
    random = np.random.default_rng(7)
    hidden = size.hidden

    def made(*shape: int, scale: float = 1.0) -> Any:
        return (random.normal(size=shape) * scale).astype(np.float32)

    narrow = hidden**-0.5
    arrays = {
        "words": made(len(VOCABULARY), hidden), "positions": made(POSITIONS, hidden, scale=0.3),
        "types": made(2, hidden, scale=0.5), "gain": np.ones(hidden, np.float32), "shift": np.zeros(hidden, np.float32),
    }  # fmt: skip
    for layer in range(size.layers):
        arrays |= {f"{name}{layer}": made(hidden, hidden, scale=narrow) for name in ("wq", "wk", "wv", "wo")}
        arrays |= {
            f"up{layer}": made(hidden, 2 * hidden, scale=narrow),
            f"down{layer}": made(2 * hidden, hidden, scale=narrow),
        }
    arrays |= {
        "head": made(hidden, max(classes, 1), scale=0.4), "scale": np.array((hidden // HEADS) ** -0.5, np.float32),
        "one": np.array(1, np.float32), "much": np.array(-1e4, np.float32),
        "split": np.array([0, 0, HEADS, hidden // HEADS], np.int64), "whole": np.array([0, 0, hidden], np.int64),
        "axes": np.array([1, 2], np.int64), "zero": np.array(0, np.int64), "step": np.array(1, np.int64),
        "second": np.array(1, np.int64),
    }  # fmt: skip
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def _body(size: Size) -> list[onnx.NodeProto]:
    """Embeddings, then layers: attention behind the mask, and a net, each with its sum normalised."""
    node = helper.make_node
    nodes = [
        node("Shape", ["input_ids"], ["sides"]),
        node("Gather", ["sides", "second"], ["length"]),
        node("Range", ["zero", "length", "step"], ["places"]),
        node("Gather", ["words", "input_ids"], ["w"]),
        node("Gather", ["positions", "places"], ["p"]),
        node("Gather", ["types", "token_type_ids"], ["t"]),
        node("Add", ["w", "p"], ["wp"]),
        node("Add", ["wp", "t"], ["sum"]),
        node("LayerNormalization", ["sum", "gain", "shift"], ["x0"]),
        node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        node("Sub", ["one", "seen"], ["hidden"]),
        node("Mul", ["hidden", "much"], ["far"]),
        node("Unsqueeze", ["far", "axes"], ["mask"]),
    ]
    for layer in range(size.layers):
        nodes += _layer(str(layer), f"x{layer + 1}")
    return [*nodes, node("Identity", [f"x{size.layers}"], ["body"])]


def _layer(number: str, result: str) -> list[onnx.NodeProto]:
    def node(kind: str, sources: list[str], names: list[str], **words: Any) -> onnx.NodeProto:
        return helper.make_node(kind, sources, names, **words)

    def own(name: str) -> str:
        return f"{name}{number}"

    nodes = []
    for name, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", [own("x"), own(f"w{name}")], [own(f"{name}_flat")]),
            node("Reshape", [own(f"{name}_flat"), "split"], [own(f"{name}_split")]),
            node("Transpose", [own(f"{name}_split")], [own(f"{name}_head")], perm=axes),
        ]
    return [
        *nodes,
        node("MatMul", [own("q_head"), own("k_head")], [own("qk")]),
        node("Mul", [own("qk"), "scale"], [own("scaled")]),
        node("Add", [own("scaled"), "mask"], [own("masked")]),
        node("Softmax", [own("masked")], [own("share")], axis=-1),
        node("MatMul", [own("share"), own("v_head")], [own("mixed")]),
        node("Transpose", [own("mixed")], [own("turned")], perm=[0, 2, 1, 3]),
        node("Reshape", [own("turned"), "whole"], [own("joined")]),
        node("MatMul", [own("joined"), own("wo")], [own("attended")]),
        node("Add", [own("x"), own("attended")], [own("residual")]),
        node("LayerNormalization", [own("residual"), "gain", "shift"], [own("y")]),
        node("MatMul", [own("y"), own("up")], [own("wide")]),
        node("Relu", [own("wide")], [own("rectified")]),
        node("MatMul", [own("rectified"), own("down")], [own("narrow")]),
        node("Add", [own("y"), own("narrow")], [own("last")]),
        node("LayerNormalization", [own("last"), "gain", "shift"], [result]),
    ]


def _first_token() -> list[onnx.NodeProto]:
    return [helper.make_node("Gather", ["body", "zero"], ["first"], axis=1)]


def _head(source: str, result: str) -> list[onnx.NodeProto]:
    return [helper.make_node("MatMul", [source, "head"], [result])]


def _write(
    folder: Path, output: str, nodes: list[onnx.NodeProto], shape: Sequence[Any], classes: int, size: Size = SMALL
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"]) for name in names]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, list(shape))]
    used = {name for node in nodes for name in node.input}
    weights = [each for each in _weights(classes, size) if each.name in used]
    graph = helper.make_graph(nodes, "main", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(made)
    onnx.save(made, str(folder / "model.onnx"))


def _beside(folder: Path, architecture: str, labels: Sequence[str], config: dict[str, Any]) -> Path:
    """Write the tokenizer and the files of Hugging Face's that say what the model is."""
    write_tokenizer(folder)
    said: dict[str, Any] = {"architectures": [architecture], "model_type": "bert", "max_position_embeddings": POSITIONS}
    if labels:
        said["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps({**said, **config}))
    told = {"model_max_length": POSITIONS, "pad_token": "[PAD]", "tokenizer_class": "BertTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


# ---- what it should answer ------------------------------------------------------------------------------------------


def texts(count: int, seed: int = 3) -> list[str]:
    """Made-up texts of one to 40 words, with names, numbers, punctuation, and words that the vocabulary lacks."""
    random = np.random.default_rng(seed)
    others = ["Zürich", "x-ray", "1984", "naïve", "film's", "walking", "unseen", "GREAT", "日本", "river-bank", "😀"]
    found = []
    for _ in range(count):
        words = random.choice([*WORDS, *others], size=int(random.integers(1, 40)))
        ends = random.choice(["", ".", "!", " ...", "?"])
        found.append(" ".join(map(str, words)) + str(ends))
    return found


class PlainModel:
    """A folder asked with nothing but the tokenizer, the raw run and numpy, a row at a time, without padding."""

    def __init__(self, folder: Path, length: int = POSITIONS) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        self._run = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"]).run
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(length)

    def output(self, *given: str) -> Any:
        """The model's output for one text, or one pair, without its axis of rows."""
        read = self._tokenizer.encode(*given)
        rows = {"input_ids": read.ids, "attention_mask": read.attention_mask, "token_type_ids": read.type_ids}
        (output,) = self._run(None, {name: np.array([row], np.int64) for name, row in rows.items()})
        return output[0]

    def probabilities(self, *given: str) -> Any:
        """Softmax of the logits of one text."""
        return softmax(self.output(*given))

    def sentence(self, *given: str) -> Any:
        """The mean of the tokens' vectors, of length 1."""
        mean = self.output(*given).mean(axis=0)
        return mean / np.linalg.norm(mean)


def softmax(logits: Any) -> Any:
    """Probabilities of the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
