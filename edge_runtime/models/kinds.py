"""Kinds of files in the models folder: one table of kinds, recognised by first bytes and a zip's list of names.

Owns: every kind of file that people have models in; what serves or converts each; which may hold code; and the sentence
that says what a file is and what it lacks. Reads at most `HEAD_BYTES` of a file, of a zip its list of names, and of a
CatBoost model how many features it has of each sort: loads nothing, runs nothing. Called by the walk, the choice of
artifacts, and the converters.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from edge_runtime.models.names import suffix_of

HEAD_BYTES = 512

MAX_NAMES_BYTES = 8 << 20
"""Of a zip's list of names: a PyTorch program has one member a weight, 70 000 of some 120 bytes."""


class FileKind(Struct, frozen=True):
    """One kind of file. name: for people, with its article. suffixes: that such files have, the usual one first.

    may_hold_code: reading one may run code that is in it. served_with: what to install that serves one as it is, "" for
    nothing. converts_to: "onnx" or "openvino", "" where no converter takes it; extra: that converter's. advice: what
    its owner does, where neither is enough said; FILE in it stands for the file's path. is_refused_by_backend: a
    backend says why it does not load one.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    may_hold_code: bool = False
    served_with: str = ""
    converts_to: str = ""
    extra: str = ""
    advice: str = ""
    is_refused_by_backend: bool = False

    @property
    def is_model(self) -> bool:
        """Whether a backend or a converter takes it, so that a file of this kind is a version."""
        return bool(self.served_with or self.converts_to)

    def sentence(self, path: str) -> str:
        """Say what a file of this kind is, and what it lacks to be served: the end of "<path> is ..."."""
        import shlex

        if self.advice:
            return f"is {self.name}: {self.advice.replace('FILE', shlex.quote(path))}"
        ways = [f"to serve it as it is, install {self.served_with}"] if self.served_with else []
        if self.converts_to:
            ways.append(f"to have it converted here, install edge-runtime[{self.extra}]")
            ways.append(f"to convert it elsewhere: edge-runtime convert {shlex.quote(path)} --to {self.converts_to}")
        return f"is {self.name}; {'; '.join(ways)}"


ONNX = FileKind("an ONNX model", (".onnx",), served_with="edge-runtime[onnxruntime]")
ORT = FileKind(
    "an ONNX Runtime model (.ort)",
    (".ort",),
    advice="it is made for one build of ONNX Runtime; put the .onnx here that it was made of",
)
IR = FileKind("an OpenVINO IR", (".xml",), served_with="edge-runtime[openvino]")
TENSORRT = FileKind(
    "a TensorRT engine",
    (".plan", ".engine", ".trt"),
    may_hold_code=True,
    advice="it runs on one machine and version only; put the .onnx here, of which the daemon builds its own",
    is_refused_by_backend=True,
)
LITERT = FileKind(
    "a TensorFlow Lite model",
    (".tflite", ".lite"),
    served_with="edge-runtime[litert] or edge-runtime[openvino]",
    converts_to="openvino",
    extra="convert-openvino",
)
SAVED_MODEL = FileKind(
    "a TensorFlow SavedModel",
    ("saved_model.pb",),
    may_hold_code=True,
    served_with="edge-runtime[openvino]",
    converts_to="openvino",
    extra="convert-openvino",
)
FROZEN_GRAPH = FileKind(
    "a TensorFlow graph without a signature",
    (".pb", ".graphdef"),
    advice=(
        "where it was made, export a SavedModel (model.export('FOLDER')), and put that folder here; or convert it "
        "elsewhere: edge-runtime convert FILE --to openvino"
    ),
)
PADDLE = FileKind("a PaddlePaddle model", (".pdmodel",), served_with="edge-runtime[openvino]")
PADDLE_PIR = FileKind(
    "a PaddlePaddle 3 program (.json)",
    (".json",),
    advice="nothing here reads that format; save it with FLAGS_enable_pir_api=0, which writes a .pdmodel",
)
TORCHSCRIPT = FileKind(
    "a TorchScript program of PyTorch",
    (".pt", ".pth", ".torchscript"),
    may_hold_code=True,
    served_with="torch",
    converts_to="onnx",
    extra="convert-pytorch",
)
PYTORCH_PROGRAM = FileKind(
    "an exported program of PyTorch",
    (".pt2",),
    may_hold_code=True,
    served_with="torch",
    converts_to="onnx",
    extra="convert-pytorch",
)
PYTORCH_WEIGHTS = FileKind(
    "a pickle of PyTorch (torch.save), weights or a module, without a program",
    (".pt", ".pth", ".bin", ".ckpt"),
    may_hold_code=True,
    advice=(
        "reading one can run code, so it is never loaded; where it was made, "
        "torch.export.save(torch.export.export(model, (example,)), 'model.pt2') (Ultralytics: "
        "yolo export model=best.pt format=onnx), or its weights as safetensors beside a model.py that builds the "
        "module (docs/python-models.md)"
    ),
)
SAFETENSORS = FileKind(
    "weights without a program (safetensors)",
    (".safetensors",),
    advice=(
        "put it beside a model.py that builds the module (docs/python-models.md), or where it was made, load it into "
        "the module, and torch.export.save(program, 'model.pt2'); of a language model, export its folder for OpenVINO: "
        "optimum-cli export openvino --model FOLDER NAME/1 (docs/language.md)"
    ),
)
XGBOOST = FileKind("an XGBoost model", (".json", ".ubj", ".bst"), converts_to="onnx", extra="convert-xgboost")
XGBOOST_BINARY = FileKind(
    "an XGBoost model in the format before 2020",
    (".bin", ".model", ".deprecated", ".bst"),
    advice="in the XGBoost that made it, booster.save_model('model.json'), and put that here",
)
LIGHTGBM = FileKind("a LightGBM model", (".txt", ".bst"), converts_to="onnx", extra="convert-lightgbm")
CATBOOST = FileKind("a CatBoost model", (".cbm", ".json"), converts_to="onnx", extra="convert-catboost")
CATBOOST_WORDS = FileKind(
    "a CatBoost model with categories or text", (".cbm", ".json"), served_with="edge-runtime[catboost]"
)
SKOPS = FileKind(
    "a scikit-learn model (skops)", (".skops",), may_hold_code=True, converts_to="onnx", extra="convert-sklearn"
)
KERAS = FileKind(
    "a Keras model",
    (".keras", ".h5", ".hdf5"),
    may_hold_code=True,
    converts_to="onnx",
    extra="convert-keras",
)
PICKLE = FileKind(
    "a pickle (of scikit-learn?), which holds code",
    (".pkl", ".pickle", ".joblib"),
    may_hold_code=True,
    advice=(
        "reading one runs that code, so nothing here does; where it was made, skops.io.dump(model, 'model.skops') for "
        "scikit-learn, model.save_model('model.json') for XGBoost, torch.export.save(program, 'model.pt2') for PyTorch"
    ),
)
MAR = FileKind(
    "a TorchServe archive (.mar)",
    (".mar",),
    may_hold_code=True,
    advice=(
        "it is a zip of a model and its Python handler: edge-runtime import FILE --models DIR takes both "
        "(docs/from-torchserve.md)"
    ),
)
GGUF = FileKind(
    "a language model of llama.cpp (GGUF)",
    (".gguf", ".ggml"),
    advice=(
        "no backend here runs it; where the model came from, export it for OpenVINO, and put that folder here as a "
        "version: optimum-cli export openvino --model ORIGINAL NAME/1 (docs/language.md)"
    ),
)
COREML = FileKind(
    "a Core ML model", (".mlmodel",), advice="only Apple's systems run it; export ONNX where it was trained"
)
TREE_DUMP = FileKind(
    "a dump of trees for people to read, which leaves out what a model needs",
    (".json", ".txt"),
    advice=(
        "where it was made, model.save_model('model.json') for XGBoost, model.save_model('model.txt') for LightGBM, "
        "and put that here"
    ),
)
FOREIGN = FileKind(
    "a model of a system that nothing here reads",
    (".caffemodel", ".rknn", ".hef", ".pte", ".mnn", ".dlc", ".pmml"),
    advice="where it was trained, export ONNX, and put that here",
)
COMPRESSED = FileKind(
    "an archive or a compressed file",
    (".gz", ".tgz", ".tar", ".bz2", ".xz", ".7z", ".zst", ".rar"),
    advice=(
        "unpack it, and put the model's file or folder here (one of TorchServe: edge-runtime import FILE --models DIR)"
    ),
)
OTHER_ZIP = FileKind(
    "a zip archive that is not a model known here",
    (".zip",),
    advice="unpack it, and put the model's file or folder here",
)
LFS_POINTER = FileKind(
    "a Git LFS pointer, not the file itself",
    advice="where it was cloned, git lfs pull fetches the file; copy that here",
)
WEB_PAGE = FileKind(
    "a web page, not a model",
    advice="the download was answered with a page (a login, an error); download it again, and look at the file",
)
ERROR_TEXT = FileKind(
    "text, not a model",
    advice="the download was answered with a message (not found, denied); look at the file, and download it again",
)
EMPTY = FileKind("empty", advice="the copy or download did not happen; copy it again")
CUT = FileKind(
    "a damaged zip archive, or one cut short",
    advice="the copy did not end, or went wrong; copy it again",
)
NOT_AS_NAMED = FileKind(
    "not what its name says",
    advice="its first bytes are of no such model, so it is damaged or of another kind; copy it again",
)

KINDS = (
    ONNX, ORT, IR, TENSORRT, LITERT, SAVED_MODEL, FROZEN_GRAPH, PADDLE, PADDLE_PIR, TORCHSCRIPT, PYTORCH_PROGRAM,
    PYTORCH_WEIGHTS, SAFETENSORS, XGBOOST, XGBOOST_BINARY, LIGHTGBM, CATBOOST, CATBOOST_WORDS, SKOPS, KERAS, PICKLE,
    MAR, GGUF, COREML, TREE_DUMP, FOREIGN, COMPRESSED, OTHER_ZIP, LFS_POINTER, WEB_PAGE, ERROR_TEXT, EMPTY, CUT,
    NOT_AS_NAMED,
)  # fmt: skip

TOLD_BY_CONTENT = frozenset((".json", ".txt", ".bin", ".bst", ".ckpt", ".model", ".deprecated", *COMPRESSED.suffixes))
"""Suffixes that other files have too: such a file is a model only where its bytes say so. `.bst` is KServe's name for
boosters of XGBoost and of LightGBM."""

SUFFIXES = frozenset(suffix for kind in KINDS for suffix in kind.suffixes)
"""Of all kinds: a file with another suffix is not looked at."""


def kind_of(path: Path) -> FileKind | None:
    """Return the kind of a file, or of a folder that is a model; None: none that is known, or it cannot be read.

    Follows a symbolic link; the caller has decided that it may. Reads a file again only when it has changed.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    if stat.S_ISDIR(found.st_mode):
        return SAVED_MODEL if (path / "saved_model.pb").is_file() else None
    if not stat.S_ISREG(found.st_mode):
        return None
    return _read_kind(path, (found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode))


def what_it_lacks(path: str) -> str | None:
    """Say what a file is and what it lacks to be served, "is an XGBoost model; to have it ..."; None: nothing known.

    ONNX and IR lack nothing that is not said elsewhere: every device has a backend for one of them.
    """
    folder, _, name = path.rpartition("/")
    kind = kind_of(Path(path)) if may_be_model(name) else None
    if kind is None or kind in (ONNX, IR):
        return None
    return kind.sentence((folder or ".") if name == "saved_model.pb" else path)


def stand_ins(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield for each file that stands in for another, a Git LFS pointer or a web page, its name and what it is.

    names: relative to the folder, of any suffix: weights beside a model are cloned and downloaded too.
    """
    for name in names:
        kind = kind_of(folder / name)
        if kind in (LFS_POINTER, WEB_PAGE):
            yield f"{name} {kind.sentence(str(folder / name))}"


def may_be_model(name: str) -> bool:
    """Return whether a file's name is one that models have, so that its bytes are worth a look."""
    return suffix_of(name).lower() in SUFFIXES


def head_of(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` bytes of a plain file. Raises OSError."""
    # O_NONBLOCK: opening a fifo would otherwise wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, HEAD_BYTES)
    finally:
        os.close(descriptor)


# ---- private --------------------------------------------------------------------------------------------------------

# Patterns are text here, compiled when a file is first compared with them: few daemons ever do.
_COMPRESSED = rb"(?s)\x1f\x8b|BZh[1-9]|\xfd7zXZ|7z\xbc\xaf\x27\x1c|\x28\xb5\x2f\xfd|Rar!\x1a\x07|.{257}ustar"
"""gzip, bzip2, xz, 7z, Zstandard, RAR, tar."""

_PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""A pickle of protocol 2 to 5; earlier ones are text, recognised by their suffix."""

_XGBOOST_JSON = rb'\s*\{\s*("version"\s*:\s*\[[\d,\s]*\]\s*,\s*)?"learner"\s*:\s*\{'
_XGBOOST_UBJ = rb"\{[UIilL]\0*\x07learner"
"""Universal Binary JSON: an object whose first key has seven letters, its length in one to eight bytes."""

_LIGHTGBM = rb"tree\r?\nversion="
_PIR = rb'\s*\{\s*"base_code"\s*:\s*\{\s*"magic"\s*:\s*"pir"'
_XGBOOST_DUMP = rb'booster\[\d+\]:\r?\n\d+:|\s*\[\s*\{\s*"nodeid"\s*:'
_LIGHTGBM_DUMP = rb'\s*\{\s*"name"\s*:\s*"tree"\s*,\s*"version"\s*:'
_CATBOOST_JSON = rb'\s*\{\s*"(ctr_data|features_info|model_info|oblivious_trees)"\s*:'
_CATBOOST_JSON_WORDS = (
    rb'\s*\{\s*"(ctr_data"|features_info"\s*:\s*\{\s*"(cat_features_hash|categorical_features)"\s*:\s*\[\s*\{)'
)
"""Statistics of categories come first in a file that has any, else the categories themselves: keys are sorted."""

_CBM_TREES, _CBM_WORDS = 1, (4, 12, 18)
"""Numbers of fields: the trees of TModelCore; the categorical, text and embedding features of TModelTrees. Source:
catboost/libs/model/flatbuffers/model.fbs."""

_WEB_PAGE = rb"(?is)(\xef\xbb\xbf)?\s*((<\?xml[^>]*>|<!--.*?-->)\s*)*<(!doctype\s+html|html|head|body)[\s>]"
_ERROR_TEXT = (
    rb"(?i)\s*(<\?xml|<error|\{\s*\"|\[\s*\{)|[\x09\x0a\x0d\x20-\x7e]{0,200}?"
    rb"\b(not found|denied|forbidden|unauthori[sz]ed|error|invalid|expired|too many|bad gateway|unavailable)\b"
)
"""Texts that servers send in place of a file: XML, JSON, or a sentence."""

_TEXTS = (
    (rb"version https://git-lfs\.github\.com/spec/", LFS_POINTER),
    (_WEB_PAGE, WEB_PAGE),
    (_LIGHTGBM, LIGHTGBM),
    (_XGBOOST_JSON, XGBOOST),
    (_XGBOOST_UBJ, XGBOOST),
    (_PIR, PADDLE_PIR),
    (_XGBOOST_DUMP, TREE_DUMP),
    (_LIGHTGBM_DUMP, TREE_DUMP),
)
"""How files begin whose first byte is a character, in this order."""

_CHARACTERS = frozenset(b"\t\n\v\f\r\xef" + bytes(range(0x20, 0x7F)))
"""First bytes of text, that of a byte order mark included. ONNX files seldom begin so, and need no pattern."""

_MAGIC = (
    (4, b"TFL3", LITERT),
    (4, b"ORTM", ORT),
    (0, b"binf", XGBOOST_BINARY),
    (0, b"CBM1", CATBOOST),
    (0, b"GGUF", GGUF),
    (0, b"GGML", GGUF),
    (0, b"\x89HDF\r\n\x1a\n", KERAS),
)
"""Bytes that kinds of files have at a place."""

_SAFETENSORS = rb"(?s).{8}\{\s*\""
"""As weak as that format: the suffix has to say so, too."""

_BY_NAME = (ONNX, IR, TENSORRT, FROZEN_GRAPH, PADDLE, COREML, FOREIGN)
"""Kinds whose files begin in no certain way: their suffix names them, once it is not a fault."""

_BROKEN_ZIP = (OSError, ValueError, NotImplementedError, struct.error, OverflowError, EOFError)
"""Errors of zipfile at a damaged archive, beside its own."""


@lru_cache(maxsize=4096)
def _read_kind(path: Path, stamp: tuple[int, int, int, int]) -> FileKind | None:  # noqa: PLR0911 (one line a rule)
    """Tell a plain file's kind. stamp: its size and the numbers that change with its content."""
    suffix = path.suffix.lower()
    is_named = may_be_model(path.name) and suffix not in TOLD_BY_CONTENT
    if not stamp[0]:
        return None if suffix in TOLD_BY_CONTENT else EMPTY
    try:
        head = head_of(path)
    except OSError:
        return None
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _of_zip(path)
    is_text = head[:1] != b"" and head[0] in _CHARACTERS
    kind = next((kind for begins, kind in _TEXTS if is_text and re.match(begins, head)), None)
    kind = kind or next((kind for place, magic, kind in _MAGIC if head.startswith(magic, place)), None)
    if kind is not None:
        return _of_catboost(path) if kind is CATBOOST else kind
    if suffix in SAFETENSORS.suffixes and re.match(_SAFETENSORS, head):
        return SAFETENSORS
    if head.startswith(_PICKLED) or suffix in PICKLE.suffixes:
        return PYTORCH_WEIGHTS if suffix in PYTORCH_WEIGHTS.suffixes else PICKLE
    if re.match(_COMPRESSED, head):  # a joblib.dump(..., compress=...) may be called model.pkl.gz
        return PICKLE if Path(path.stem).suffix.lower() in PICKLE.suffixes else COMPRESSED
    if suffix == ".json" and re.match(_CATBOOST_JSON, head):
        return CATBOOST_WORDS if re.match(_CATBOOST_JSON_WORDS, head) else CATBOOST
    if is_text and is_named and suffix not in IR.suffixes and re.match(_ERROR_TEXT, head):
        return ERROR_TEXT
    if path.name == "saved_model.pb":
        return SAVED_MODEL
    for kind in _BY_NAME:
        if suffix in kind.suffixes:
            return kind
    return NOT_AS_NAMED if is_named else None


def _of_catboost(path: Path) -> FileKind:
    """Tell by a .cbm's lists of features whether it takes numbers alone; one that is damaged counts as such.

    After "CBM1" and a length it is a flatbuffer, whose tables and lists lie anywhere in it.
    """
    try:
        with path.open("rb", buffering=0) as file:

            def number(at: int, size: int = 4, *, signed: bool = False) -> int:
                found = os.pread(file.fileno(), size, at)
                if len(found) < size:
                    raise EOFError
                return int.from_bytes(found, "little", signed=signed)

            def below(table: int, field: int) -> int:
                """The place that a field of a table leads to; 0 for a field that it leaves out."""
                fields = table - number(table, signed=True)
                own = 4 + 2 * field
                place = number(fields + own, 2) if own < number(fields, 2) else 0
                return table + place + number(table + place) if place else 0

            trees = below(8 + number(8), _CBM_TREES)
            lists = [below(trees, field) for field in _CBM_WORDS] if trees else []
            return CATBOOST_WORDS if any(number(place) for place in lists if place) else CATBOOST
    except (OSError, EOFError, OverflowError):
        return CATBOOST


def _of_zip(path: Path) -> FileKind:  # noqa: PLR0911 (one line a rule)
    import zipfile

    try:
        with _BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, *_BROKEN_ZIP):
        return CUT
    inner = [name.partition("/")[2] for name in names]
    if "schema.json" in names:
        return SKOPS
    if "config.json" in names and any(name.endswith(".h5") for name in names):
        return KERAS
    if "MAR-INF/MANIFEST.json" in names:
        return MAR
    if "archive_format" in inner and any(name.startswith("models/") for name in inner):
        return PYTORCH_PROGRAM
    if any(name.startswith("code/") for name in inner):
        return TORCHSCRIPT
    if "data.pkl" in inner:
        return PYTORCH_WEIGHTS
    return OTHER_ZIP


class _BoundedFile(io.FileIO):
    """A file of which no single read takes more than a zip's longest list of names."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = MAX_NAMES_BYTES + 1 if size is None or size < 0 else size
        if wanted > MAX_NAMES_BYTES + 1:
            raise ValueError(f"wanted a read of at most {MAX_NAMES_BYTES} bytes, got {size}")
        found = super().read(wanted) or b""
        if len(found) > MAX_NAMES_BYTES:
            raise ValueError(f"more than {MAX_NAMES_BYTES} bytes")
        return found
