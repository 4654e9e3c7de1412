"""Real files of every kind that people drop in, and mutations of them: damaged, cut, spliced, with absurd numbers.

Owns: one real file of each kind (`write_real`), and `mutated`, which the same seed repeats. What only its own library
can write is made where that is installed; its kind is left out elsewhere, and `MISSING` says what it needs.
"""

from __future__ import annotations

import importlib.util
import io
import random
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.models import catboost_models, ir_models, onnx_models, paddle_models

TENSORFLOW = Path(__file__).parent / "tensorflow"

_ABSURD = (b"-1", b"0", b"1e999", b"NaN", b"18446744073709551616", b"99999999999", b'"x"', b"[]", b"null")
_ODD_WORDS = ("../../outside", "/etc/passwd", "a" * 300, "2147483648", "-9", "\u00e9")
_EDGES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f")


def _onnx(folder: Path) -> None:
    onnx_models.mlp(folder)


def _ir(folder: Path) -> None:
    onnx_models.mlp(folder / "made")
    ir_models.from_onnx(folder / "made" / "model.onnx", folder)
    shutil.rmtree(folder / "made")


def _ort(folder: Path) -> None:
    import onnxruntime

    made = onnx_models.mlp(folder / "made")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(made), options, providers=["CPUExecutionProvider"])
    shutil.rmtree(folder / "made")


def _paddle(folder: Path) -> None:
    paddle_models.mlp(folder)


def _copied(name: str, to: str) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        if (TENSORFLOW / name).is_dir():
            shutil.copytree(TENSORFLOW / name, folder, dirs_exist_ok=True)
        else:
            shutil.copy(TENSORFLOW / name, folder / to)

    return copy


PICKLED = b"\x80\x02cos\nsystem\n(S'touch canary'\ntR."
"""A pickle that makes a file when it is read, written by hand: nothing here can unpickle."""


def _pickle(folder: Path) -> None:
    (folder / "model.pkl").write_bytes(PICKLED)


def _pickled_weights(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", PICKLED)
        archive.writestr("model/version", b"3")
        archive.writestr("model/data/0", bytes(64))


def _mar(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", b'{"model": {"handler": "handler.py", "serializedFile": "model.pt"}}')
        archive.writestr("handler.py", b"import pathlib\npathlib.Path('canary').touch()\n")
        archive.writestr("model.pt", PICKLED)


CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x", data_type: TYPE_FP32, dims: [ 16 ] } ]
output [ { name: "y", data_type: TYPE_FP32, dims: [ 4 ], label_filename: "labels.txt" } ]
version_policy: { latest: { num_versions: 1 } }
instance_group [ { count: 2, kind: KIND_CPU } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  priority_levels: 2
  default_priority_level: 1
  default_queue_policy { timeout_action: DELAY, default_timeout_microseconds: 500000, max_queue_size: 64 }
}
model_warmup [ { name: "first", batch_size: 1, inputs { key: "x", value: { data_type: TYPE_FP32, dims: [ 16 ], zero_data: true } } } ]
parameters { key: "intra_op_thread_count", value: { string_value: "1" } }
"""  # noqa: E501

ENSEMBLE = """platform: "ensemble"
max_batch_size: 8
input [ { name: "IN", data_type: TYPE_FP32, dims: [ 16 ] } ]
output [ { name: "OUT", data_type: TYPE_FP32, dims: [ 4 ] } ]
ensemble_scheduling {
  step [ { model_name: "good", model_version: -1, input_map { key: "x", value: "IN" }, output_map { key: "y", value: "OUT" } } ]
}
"""  # noqa: E501

PIPELINE = """[[step]]
name = "first"
model = "good"
inputs = {x = "input.x"}

[[step]]
name = "again"
model = "good"
version = 1
inputs = {x = "input.x"}
when = "first.y > 0"

[[step]]
name = "each"
model = "good"
inputs = {x = "input.rows"}
map = "input.rows"

[output]
y = "first.y"
again = "again.y"
each = "each.y"

[input.rows]
datatype = "FP32"
shape = [-1, 16]
"""


def _text(name: str, text: str, *, has_model: bool) -> Callable[[Path], None]:
    """A model's folder whose meaning stands in one text."""

    def write(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")
        if has_model:
            onnx_models.mlp(folder / "1")
            (folder / "labels.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")

    return write


def _made(source_format: str, name: str) -> Callable[[Path], None]:
    """A model of the converters' tests, made by its own library."""

    def make(folder: Path) -> None:
        from edge_runtime_converters.formats import SourceFormat
        from tests.converters.sources import source_of

        with warnings.catch_warnings():  # PyTorch's about TorchScript
            warnings.simplefilter("ignore")
            source_of(SourceFormat[source_format], folder).rename(folder / name)

    return make


def _ubj(folder: Path) -> None:
    import xgboost

    _made("XGBOOST", "made.json")(folder)
    xgboost.Booster(model_file=folder / "made.json").save_model(folder / "model.ubj")
    (folder / "made.json").unlink()


def _cbm_words(folder: Path) -> None:
    catboost_models.words(folder)


REAL: Mapping[str, Callable[[Path], None]] = {
    "onnx": _onnx,
    "xml": _ir,
    "ort": _ort,
    "tflite": _copied("model.tflite", "model.tflite"),
    "saved_model": _copied("saved_model", ""),
    "pdmodel": _paddle,
    "keras": _copied("digits.keras", "model.keras"),
    "h5": _copied("digits.h5", "model.h5"),
    "pickle": _pickle,
    "pickled_pt": _pickled_weights,
    "mar": _mar,
    "pt": _made("TORCHSCRIPT", "model.pt"),
    "pt2": _made("PYTORCH", "model.pt2"),
    "xgboost": _made("XGBOOST", "model.json"),
    "ubj": _ubj,
    "cbm": _made("CATBOOST", "model.cbm"),
    "cbm_words": _cbm_words,
    "lightgbm": _made("LIGHTGBM", "model.txt"),
    "skops": _made("SKLEARN", "model.skops"),
}

FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "config": _text("config.pbtxt", CONFIG, has_model=True),
    "ensemble": _text("config.pbtxt", ENSEMBLE, has_model=False),
    "pipeline": _text("pipeline.toml", PIPELINE, has_model=False),
}

"""Kinds that are a model's whole folder, and no file that somebody drops in."""

TEXTS = {"config": "config.pbtxt", "ensemble": "config.pbtxt", "pipeline": "pipeline.toml"}
"""The one file of each of these that is changed."""

NEEDS = {
    "pt": "torch",
    "pt2": "torch",
    "xgboost": "xgboost",
    "ubj": "xgboost",
    "cbm": "catboost",
    "cbm_words": "catboost",
    "lightgbm": "lightgbm",
    "skops": "skops",
}

MISSING = {kind: module for kind, module in NEEDS.items() if importlib.util.find_spec(module) is None}
"""Kinds that cannot be made here, and what each needs."""


def write_real(kind: str, folder: Path) -> None:
    """Write a real model of one kind into a version's folder, or into a model's for TEXTS."""
    folder.mkdir(parents=True, exist_ok=True)
    {**REAL, **FOLDERS}[kind](folder)


def mutate(folder: Path, seed: int, name: str | None = None) -> None:
    """Change one file of a folder, often the first that is read, or the named one, in a way that the seed decides."""
    chance = random.Random(seed)
    if name is not None:
        text = (folder / name).read_text(encoding="utf-8")
        content = _with_other_words(text, chance).encode()
        (folder / name).write_bytes(content if chance.random() < 0.7 else mutated(content, chance))
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(files)
    path.write_bytes(mutated(path.read_bytes(), chance))


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a file's bytes, changed: as a whole, inside one member of a zip, or by a number where it is text."""
    if content.startswith(b"PK") and chance.random() < 0.6:
        return _with_other_member(content, chance)
    if chance.random() < 0.5 and _is_text(content):
        return _with_other_number(content, chance)
    return _damaged(content, chance)


def _damaged(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    if not data:
        return chance.randbytes(chance.randrange(64))
    at = chance.randrange(len(data))
    match chance.randrange(8):
        case 0:  # cut short
            del data[at:]
        case 1:  # a block lost
            del data[at : at + chance.randrange(1, 512)]
        case 2:  # a block twice
            data[at:at] = data[at : at + chance.randrange(1, 512)]
        case 3:  # a block of zeros, as a disk leaves it
            end = min(at + chance.randrange(1, 4096), len(data))
            data[at:end] = bytes(end - at)
        case 4:  # rubbish behind it
            data += chance.randbytes(chance.randrange(1, 4096))
        case 5:  # a number with an edge value, near the beginning, where sizes and offsets are
            at = chance.randrange(min(len(data), 256))
            edge = chance.choice(_EDGES)
            data[at : at + len(edge)] = edge
        case _:  # some bytes
            for _ in range(chance.randrange(1, 17)):
                data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _is_text(content: bytes) -> bool:
    return b"\x00" not in content[:512]


def _with_other_number(content: bytes, chance: random.Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content[: 1 << 20]))
    if not numbers:
        return _damaged(content, chance)
    found = chance.choice(numbers)
    return content[: found.start()] + chance.choice(_ABSURD) + content[found.end() :]


def _with_other_words(text: str, chance: random.Random) -> str:
    """Change words and lines, so that most of what comes out still reads as its language."""
    lines = text.split("\n")
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(lines))
        match chance.randrange(5):
            case 0:  # a line lost
                del lines[at]
            case 1:  # a line twice, or a thousand times
                lines[at:at] = [lines[at]] * chance.choice((1, 1, 1000))
            case 2:  # two lines in another order
                other = chance.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case _:  # a word in the place of another
                words = re.findall(r"[A-Za-z_.]+|-?[0-9.]+", text)
                found = list(re.finditer(r"[A-Za-z_.]+|-?[0-9.]+", lines[at]))
                if found:
                    old = chance.choice(found)
                    new = chance.choice([*words, *_ODD_WORDS])
                    lines[at] = lines[at][: old.start()] + new + lines[at][old.end() :]
        if not lines:
            break
    return "\n".join(lines)


def _with_other_member(content: bytes, chance: random.Random) -> bytes:
    """Change one member of a zip, and write sums that fit, so that its reader gets to what it holds."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {each.filename: archive.read(each) for each in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return _damaged(content, chance)
    name = chance.choice(sorted(members))
    change = chance.randrange(6)
    if change == 0:
        del members[name]
    elif change == 1:
        members[chance.choice(("../outside", "/tmp/outside", "a" * 300, name + "/x"))] = members[name]
    else:
        members[name] = mutated(members[name], chance)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return made.getvalue()
