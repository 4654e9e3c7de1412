"""Tensors for a model from the command line: .npy, .json, raw bytes, pictures, literals, or made-up numbers.

Owns: the meaning of the input options; client/input_files.py reads files. The model's metadata decides the datatypes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.cli.arguments import UsageError, nearest, positive
from edge_runtime.cli.screen import Screen, stdin_text
from edge_runtime.client.core import declared_steps, input_name
from edge_runtime.client.input_files import INPUT_SUFFIXES, filled_shape, json_value, tensor_from_file, tensor_from_json
from edge_runtime.client.pictures import SUFFIXES as PICTURE_SUFFIXES
from edge_runtime.client.pictures import read_picture
from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, datatype

RAW_SUFFIXES = (".bin", ".raw")
"""Raw bytes: shape and datatype are the model's, or given by options."""

PATH_CHARACTERS = 4096
"""Longer is not a path (PATH_MAX of Linux)."""

TOKENS = 10
"""Made-up integers are below this: inside any vocabulary or table that they may index."""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """The input options as given. texts: by input name, "" for a model's only one."""

    texts: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    datatypes: Mapping[str, str]
    fill: str
    rows: int
    seed: int


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the input options."""
    group = parser.add_argument_group("inputs")
    group.add_argument(
        "--input",
        metavar="[NAME=]FILE",
        action="append",
        default=[],
        help="a .npy, .json or .bin file, a picture, @JSON for a value (@TEXT for BYTES), or - for stdin: JSON, or "
        "values, a row a line; NAME= may be left out where the model has one input",
    )
    fill = group.add_mutually_exclusive_group()
    fill.add_argument("--random", action="store_true", help="made-up values for every input not given")
    fill.add_argument("--zeros", action="store_true", help="zeros for every input not given")
    group.add_argument("--rows", metavar="N", type=positive, default=1, help="rows of made-up inputs (default 1)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="for --random (default 0)")
    group.add_argument(
        "--shape", metavar="[NAME=]N,N,…", action="append", default=[], help="shape of a .bin or made-up input"
    )
    group.add_argument("--datatype", metavar="[NAME=]T", action="append", default=[], help="datatype of a .bin input")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of texts."""
    parser.add_argument(
        "--text", metavar="TEXT|-", action="append", default=[], help="a text; -: each line of stdin; may be repeated"
    )
    parser.add_argument(
        "--pair", metavar="TEXT", nargs=2, action="append", default=[], help="a pair of texts: for reranking"
    )
    parser.add_argument("--labels", metavar="LABEL,…", help="labels to choose from, for zero-shot classification")


def input_options(arguments: argparse.Namespace, *, fill: str = "") -> InputOptions:
    """Read the input options. Raises UsageError."""
    return InputOptions(
        texts=_by_name("--input", arguments.input),
        shapes={name: _shape(text) for name, text in _by_name("--shape", arguments.shape).items()},
        datatypes={name: _datatype(text) for name, text in _by_name("--datatype", arguments.datatype).items()},
        fill="random" if arguments.random else "zeros" if arguments.zeros else fill,
        rows=arguments.rows,
        seed=arguments.seed,
    )


def specs_of(metadata: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's inputs."""
    return tuple(
        TensorSpec(str(spec["name"]), str(spec["datatype"]), tuple(spec["shape"]))
        for spec in metadata.get("inputs", ())
    )


def form_specs(metadata: Mapping[str, Any], name: str) -> tuple[TensorSpec, ...]:
    """Return the specs of the inputs of a model that is asked with the input of this name in place of others."""
    forms = [form for form in metadata.get("forms", ()) if any(each["name"] == name for each in form["inputs"])]
    return specs_of(forms[0] if forms else metadata)


def texts_of(
    arguments: argparse.Namespace, metadata: Mapping[str, Any], values: Sequence[str] = ()
) -> dict[str, Array] | None:
    """Return the texts, pairs or texts with labels for the input that takes them; None where none are given.

    values: further texts, for a model that takes them. Raises UsageError: the model takes no texts, or they do not go
    together.
    """
    name = input_name(metadata, "text")
    lines = [each for text in arguments.text for each in (stdin_text().splitlines() if text == "-" else [text])]
    lines += values if name else []
    if not lines and not arguments.pair:
        if arguments.text:
            raise UsageError("--text -: stdin is empty; wanted a text a line")
        return None
    if not name:
        raise UsageError(
            f"--text: model {metadata.get('name')!r} takes no texts; its model.toml, or a config.json beside it, "
            "declares them (docs/text.md)"
        )
    labels = arguments.labels.split(",") if arguments.labels else []
    chooses = getattr(declared_steps(metadata).inputs[name], "hypothesis", None)
    if labels and not chooses:
        raise UsageError(f"--labels: model {metadata.get('name')!r} has labels of its own; leave them out")
    if not labels and chooses:
        raise UsageError(
            f"model {metadata.get('name')!r} chooses among labels; wanted --labels LABEL,… beside the text"
        )
    if arguments.pair and (lines or labels):
        raise UsageError("got --pair beside other texts; ask twice")
    rows = arguments.pair or ([[line, *labels] for line in lines] if labels else lines)
    found = np.array(rows, object)
    texts: Array = np.empty(found.size, object)
    texts[:] = [each.encode("utf-8", "surrogateescape") for each in found.reshape(-1)]
    return {name: texts.reshape(found.shape)}


def tensors(
    options: InputOptions, specs: Sequence[TensorSpec], screen: Screen, picture: str = "", *, takes_text: bool = False
) -> dict[str, Array]:
    """Return one array for each input of the model. Raises UsageError for a missing or unknown one.

    picture: the input that takes pictures, which is given them as they are. takes_text: whether texts may be given in
    place of these.
    """
    texts = _named(options.texts, specs, "--input")
    shapes = _named(options.shapes, specs, "--shape")
    datatypes = _named(options.datatypes, specs, "--datatype")
    if texts.get("-") == "-":
        return _from_stdin(specs)
    random = np.random.default_rng(options.seed)
    found: dict[str, Array] = {}
    for spec in specs:
        text = texts.get(spec.name)
        if text is not None:
            if Path(text).suffix.lower() in PICTURE_SUFFIXES and not text.startswith("@"):
                found[spec.name] = _picture(Path(text), spec, picture)
                continue
            found[spec.name] = _read(text, spec, shapes.get(spec.name), datatypes.get(spec.name), screen)
        elif options.fill and spec.name == picture and spec.datatype == "BYTES":
            raise UsageError(
                f"input {spec.name!r} takes a picture, which is not made up; wanted --input {spec.name}=FILE"
            )
        elif options.fill:
            found[spec.name] = made_up(
                spec, shapes.get(spec.name), options.rows, random if options.fill == "random" else None
            )
        else:
            wanted = " ".join(f"--input {each.name}=FILE" for each in specs)
            is_text = spec.datatype == "BYTES" or takes_text
            words = "a PICTURE, or " if spec.name == picture else "a TEXT, or " if is_text else ""
            raise UsageError(f"input {spec.name!r} is missing; the model wants {words}{wanted} (or --random, --zeros)")
    return found


def made_up(spec: TensorSpec, shape: tuple[int, ...] | None, rows: int, random: np.random.Generator | None) -> Array:
    """Make a tensor of zeros or random numbers. Open dimensions: rows first, 1 elsewhere."""
    lengths = shape or tuple(
        length if length != DYNAMIC else (rows if axis == 0 else 1) for axis, length in enumerate(spec.shape)
    )
    if shape is not None and not spec.fits(shape):
        raise UsageError(f"--shape of {spec.name!r}: got {list(shape)}, the model wants {list(spec.shape)} (-1: any)")
    kind = datatype(spec.datatype)
    if kind.name == "BYTES":
        texts: Array = np.full(lengths, b"" if random is None else b"edge", dtype=object)
        return texts
    if random is None:
        return np.zeros(lengths, kind.dtype)
    if kind.dtype.kind == "f":
        return random.random(lengths, dtype=np.float32).astype(kind.dtype)
    return random.integers(0, 2 if kind.name == "BOOL" else TOKENS, lengths).astype(kind.dtype)


def bytes_of(values: Sequence[str], spec: TensorSpec, screen: Screen) -> Array:
    """Return texts as the elements of an input of BYTES; a value that names a picture is that file's bytes.

    Raises UsageError where the input has no place for as many.
    """
    lengths = filled_shape(spec, len(values))
    if lengths is None or math.prod(lengths) != len(values):
        raise UsageError(
            f"input {spec.name!r} is BYTES {list(spec.shape)} (-1: any), got {len(values)} values; wanted "
            f"--input '{spec.name}=@JSON', with lists as its shape has them"
        )
    found: Array = np.empty(len(values), object)
    for place, value in enumerate(values):
        path = Path(value)
        if path.suffix.lower() in PICTURE_SUFFIXES and path.is_file():
            found[place] = read_picture(path)
            continue
        if len(value) < PATH_CHARACTERS and path.is_file():
            screen.note(f"{value} is sent as text; the lines of the file: --input - < {value}")
        found[place] = value.encode("utf-8", "surrogateescape")
    return found.reshape(lengths)


# ---- private --------------------------------------------------------------------------------------------------------


def _picture(path: Path, spec: TensorSpec, picture: str) -> Array:
    """A picture as it is. Raises TensorMismatch where the model does not declare what it means."""
    if spec.name != picture and spec.datatype != "BYTES":
        raise TensorMismatch(
            f"input {spec.name!r}: the model does not declare how a picture becomes its tensor: write "
            f"[input.{spec.name}] into its model.toml, or say it once: infer MODEL {path} --as range=0..1,fit=stretch"
        )
    found: Array = np.empty(1, object)
    found[0] = read_picture(path)
    return found


def _read(text: str, spec: TensorSpec, shape: tuple[int, ...] | None, kind: str | None, screen: Screen) -> Array:
    if text.startswith("@"):
        if spec.datatype == "BYTES" and not text[1:].lstrip().startswith(("[", '"')):
            return tensor_from_json([text[1:]], spec)
        return tensor_from_json(_json(text[1:], f"input {spec.name!r}"), spec)
    if text == "-":
        return _from_values(stdin_text(), spec)
    path = Path(text)
    suffix = path.suffix.lower()
    if suffix in RAW_SUFFIXES:
        return _from_bytes(path, spec, shape, kind)
    if suffix not in INPUT_SUFFIXES:
        raise UsageError(
            f"input {spec.name!r}: {text or 'nothing'} is none of {', '.join((*INPUT_SUFFIXES, *RAW_SUFFIXES))}; "
            f"a value itself is written {'@TEXT or @JSON' if spec.datatype == 'BYTES' else '@JSON'}"
        )
    with path.open("rb") as content:
        return tensor_from_file(content, text, spec, screen.note)


def _from_bytes(path: Path, spec: TensorSpec, shape: tuple[int, ...] | None, kind: str | None) -> Array:
    data = path.read_bytes()
    dtype = datatype(kind or spec.datatype).dtype
    if dtype.kind == "O":
        raise UsageError(f"input {spec.name!r}: BYTES cannot be read from {path}; use .json or @JSON")
    lengths = shape or filled_shape(spec, len(data) // dtype.itemsize)
    if lengths is None:
        raise UsageError(f"input {spec.name!r}: its shape {list(spec.shape)} is not known from {path}; give --shape")
    if math.prod(lengths) * dtype.itemsize != len(data):
        wanted = math.prod(lengths) * dtype.itemsize
        raise TensorMismatch(f"{path} is {len(data)} bytes; {dtype} of shape {list(lengths)} is {wanted}")
    array: Array = np.frombuffer(data, dtype).reshape(lengths)
    return array


def _from_stdin(specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Read {"name": data, …}, the Open Inference Protocol's {"inputs": [{"name", "data", …}]}, or bare values."""
    text = stdin_text()
    if not text.lstrip().startswith("{"):
        if len(specs) != 1:
            names = ", ".join(spec.name for spec in specs)
            raise UsageError(f'stdin: the model has {len(specs)} inputs ({names}); wanted {{"input name": data, …}}')
        return {specs[0].name: _from_values(text, specs[0])}
    said = _json(text, "stdin")
    if isinstance(said.get("inputs"), list) and all(isinstance(item, dict) for item in said["inputs"]):
        said = {str(item.get("name", "")): _shaped(item) for item in said["inputs"]}
    said = _named(said, specs, "stdin")
    missing = [spec.name for spec in specs if spec.name not in said]
    if missing:
        raise UsageError(f"stdin: input {missing[0]!r} is missing")
    return {spec.name: tensor_from_json(said[spec.name], spec) for spec in specs}


def _from_values(text: str, spec: TensorSpec) -> Array:
    """Read the values of one input: JSON, or else a row a line: text, or numbers between blanks and commas."""
    if not text.strip():
        raise UsageError("stdin is empty; wanted JSON, or values, a row a line")
    try:
        value = json_value(text, "stdin")
    except TensorMismatch as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if spec.datatype == "BYTES":
            return tensor_from_json(lines, spec)
        try:
            rows = [json_value(_as_list(line), "stdin") for line in lines]
        except TensorMismatch:
            raise UsageError(f"{error.message}; wanted JSON, or numbers, a row a line") from None
        return tensor_from_json(rows if len(rows) > 1 else rows[0], spec)
    return tensor_from_json(value if isinstance(value, list) else [value], spec)


def _as_list(line: str) -> str:
    return line if line.lstrip().startswith("[") else f"[{', '.join(line.replace(',', ' ').split())}]"


def _shaped(item: Mapping[str, Any]) -> Any:
    data, shape = item.get("data"), item.get("shape")
    if shape is None:
        return data
    try:
        return np.reshape(np.asarray(data, dtype=object), shape).tolist()
    except (ValueError, TypeError):
        raise TensorMismatch(f"stdin: data of input {item.get('name')!r} does not have shape {shape}") from None


def _json(text: str, source: str) -> Any:
    try:
        return json_value(text, source)
    except TensorMismatch as error:
        raise UsageError(error.message) from None


def _by_name(option: str, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, has_name, value = text.partition("=")
        if not has_name or name.startswith(("@", "[", "{")):
            name, value = ("-" if option == "--input" and text == "-" else ""), text
        if name in found:
            raise UsageError(f"{option}: {name or 'the only input'} is given twice")
        found[name] = value
    return found


def _named(said: Mapping[str, Any], specs: Sequence[TensorSpec], option: str) -> dict[str, Any]:
    """Return values by input name; a value without a name belongs to a model's only input."""
    names = [spec.name for spec in specs]
    found: dict[str, Any] = {}
    for name, value in said.items():
        if name == "" and len(names) == 1:
            found[names[0]] = value
        elif name == "":
            raise UsageError(f"{option}: the model has {len(names)} inputs, say which: {', '.join(names)}")
        elif name in names or name == "-":
            found[name] = value
        else:
            raise UsageError(f"{option}: no input {name!r}{nearest(name, names)}; the model wants {', '.join(names)}")
    return found


def _shape(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.strip("[]").split(",") if part.strip())
    except ValueError:
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise UsageError(f"--shape: got {text!r}, wanted lengths separated by commas, for example 1,3,224,224")
    return lengths


def _datatype(text: str) -> str:
    if text.upper() not in DATATYPES:
        raise UsageError(
            f"--datatype: got {text!r}{nearest(text.upper(), DATATYPES)}; wanted one of {', '.join(DATATYPES)}"
        )
    return text.upper()
