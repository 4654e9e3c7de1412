"""PyTorch's archives made safe to load: the copy of a .pt2 or a TorchScript .pt only computes. Imports no torch.

Owns: the rules, and the clean copy of a zip archive: PyTorch reads zips with miniz, Python with zipfile, and an archive
that means one thing to each would pass a check by one and be loaded by the other, so only checked members are copied.

PyTorch 2.13 executes these parts of a .pt2 (torch/export/pt2_archive/_package.py, torch/_export/serde/serialize.py,
torch/utils/_pytree.py): pickles (sample inputs, weights and constants marked so, custom objects), expressions of sizes
(sympy evaluates them as Python), guards (compiled as Python), operators by dotted name (any attribute of torch), names
of values (torch.fx writes them into Python source and runs it), tree contexts that import modules, and AOTInductor
libraries.

Of a .pt, `torch.jit.load` compiles the code to PyTorch's own operators and runs `__setstate__`; no Python runs, and its
unpickler (C++) makes only tensors, containers and the archive's own classes. But two operators read and write files
(found by the argument `filename` in all schemas of PyTorch 2.13), and custom classes and operators are whatever a
loaded library registered.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed

MAX_BYTES = 8_000_000_000
_BLOCK = 1 << 20


class Fate(Enum):
    """The fate of a member that is not copied."""

    LEFT_OUT = "left out"


Check = Callable[[str, Callable[[], bytes]], bytes | Fate | None]
"""Member name below the archive's top folder, and how to read it whole -> its bytes instead, None to copy it as it is.
Raises ConversionFailed: this member is refused.
"""


# ---- programs, .pt2 --------------------------------------------------------------------------------------------------

_PLAIN = frozenset(("archive_format", "archive_version", "byteorder", ".data/version"))
_DROPPED = re.compile(r"\.data/serialization_id|extra/.*")
_EMPTIED = re.compile(r"data/sample_inputs/[\w.-]+\.pt")
"""Pickles that a program does without; an empty one is read as none (deserialize_torch_artifact)."""
_WEIGHTS = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
_CONFIG = re.compile(r"data/(weights|constants)/[\w.-]+_config\.json")
_PROGRAM = re.compile(r"models/[\w.-]+\.json")
_PATH_NAME = re.compile(r"(weight|tensor)_\d+")
_MAX_JSON_BYTES = 256 << 20

_OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims)\.(?!from_file\b|save\b|_print\b|warn\b)\w+\.\w+"
    r"|torch\.ops\.higher_order\.(cond|wrap_with_set_grad_enabled)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|getitem|and_|or_|not_|xor)"
    r"|math\.(ceil|floor|sqrt|trunc|pow|log2?|exp)"
    r"|torch\.(sym_(int|float|max|min|not|ite|sum)|_sym_sqrt)"
)
"""Arithmetic. Left out on purpose: what touches files, found by the argument `filename` in all schemas of 2.13."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORD = re.compile(r"[\w.:+-]*", re.ASCII)
"""All other strings: names of weights, devices, versions. No brackets, quotes or operators."""
_FREE = frozenset(("as_string", "expr_str", "in_spec", "out_spec"))
"""Strings with rules of their own, and arguments, which torch.fx quotes."""

_TREES = frozenset(("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"))
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_FUNCTIONS = frozenset(
    ("Symbol", "Integer", "Max", "Min", "Eq", "Ne", "Ge", "Gt", "Le", "Lt", "And", "Or", "Not", "Mod", "PythonMod",
     "FloorDiv", "CleanDiv", "CeilDiv", "ModularIndexing", "Where", "IntTrueDiv", "FloatTrueDiv", "PowByNatural",
     "FloatPow", "ToFloat", "TruncToInt", "TruncToFloat", "CeilToInt", "FloorToInt", "RoundToInt", "Identity",
     "floor", "ceiling", "Add", "Mul", "Pow")
)  # fmt: skip
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant,
    ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_MAX_EXPRESSION = 500


def write_safe_program(source: Path, target: Path) -> None:
    """Write a copy of a .pt2 that holds numbers and arithmetic only. Raises ConversionFailed: it holds more."""

    def check(name: str, read: Callable[[], bytes]) -> bytes | None:
        if _EMPTIED.fullmatch(name):
            return b""
        if name in _PLAIN or _WEIGHTS.fullmatch(name):
            return None
        if _DROPPED.fullmatch(name):
            return b""
        if _CONFIG.fullmatch(name):
            return _config(_parsed(name, read), name)
        if _PROGRAM.fullmatch(name):
            return _program(_parsed(name, read))
        raise _refused(f"holds {name[:80]!r}, which is none of a program's own files")

    try:
        copy_checked(source, target, check)
    except ConversionFailed as error:
        raise ConversionFailed(f"{source}: {error.message.removeprefix(f'{source}: ')}") from error


def _parsed(name: str, read: Callable[[], bytes]) -> Any:
    try:
        content = read()
        if len(content) > _MAX_JSON_BYTES:
            raise _refused(f"{name} is {len(content)} bytes; wanted at most {_MAX_JSON_BYTES}")
        return json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConversionFailed(f"{name} is not JSON ({type(error).__name__}); the file is damaged") from error


def _config(config: Any, name: str) -> bytes:
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise ConversionFailed(f"{name} lists no weights; the file is damaged")
    for entry in entries.values():
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise _refused(f"{name} has a weight that is a pickle")
        if not _PATH_NAME.fullmatch(str(entry.get("path_name"))):
            raise _refused(f"{name} has {str(entry.get('path_name'))[:80]!r}, an object that is not a tensor")
    _check_values(config)
    return json.dumps(config).encode()


def _program(program: Any) -> bytes:
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise ConversionFailed(
            "the program has no graph; the file is damaged, or of PyTorch before 2.9: export it again"
        )
    program["guards_code"] = []
    module = program["graph_module"]
    module["metadata"] = {}
    module["treespec_namedtuple_fields"] = {}
    module["module_call_graph"] = [
        entry for entry in module.get("module_call_graph", []) if isinstance(entry, dict) and entry.get("fqn") == ""
    ]
    _check_values(program)
    return json.dumps(program).encode()


def _check_values(root: Any) -> None:
    """Walk all of a JSON document, iteratively, so that nesting cannot exhaust the stack."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            _check_map(value)
            _check_words(value)
            waiting += [inner for key, inner in value.items() if key not in _FREE or not isinstance(inner, str)]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not _WORD.fullmatch(value):
            raise _refused(f"has the name {value[:80]!r}")


def _check_words(value: Mapping[str, Any]) -> None:
    """Keys are names too, and a name of a value becomes Python source."""
    for key in value:
        if not _WORD.fullmatch(key):
            raise _refused(f"has the name {key[:80]!r}")
    name = value.get("name")
    if name is not None and not (isinstance(name, str) and (_IDENTIFIER.fullmatch(name) or name == "")):
        raise _refused(f"has a value called {str(name)[:80]!r}")


def _check_map(value: Mapping[str, Any]) -> None:
    for node in value.get("nodes") or () if isinstance(value.get("nodes"), list) else ():
        if not isinstance(node, dict) or not _OPERATORS.fullmatch(str(node.get("target"))):
            target = str(node.get("target") if isinstance(node, dict) else node)[:80]
            raise _refused(f"runs {target!r}, which is none of PyTorch's arithmetic")
        node["metadata"] = {}
    if value.get("as_operator") is not None and not _OPERATORS.fullmatch(str(value["as_operator"])):
        raise _refused(f"passes on {str(value['as_operator'])[:80]!r}, which is none of PyTorch's arithmetic")
    if value.get("as_custom_obj") is not None or value.get("custom_obj_values"):
        raise _refused("holds an object of C++ or Python")
    if "expr_str" in value:
        _check_expression(value["expr_str"])
    if isinstance(value.get("range_constraints"), dict):
        for name in value["range_constraints"]:
            _check_expression(name)
    for key in ("in_spec", "out_spec"):
        if isinstance(value.get(key), str):
            _check_tree(value[key])


def _check_expression(text: Any) -> None:
    """A size such as `2*s0 + 1`, or `Symbol('s0', positive=True, integer=True)`: sympy evaluates it as Python."""
    if not isinstance(text, str) or len(text) > _MAX_EXPRESSION:
        raise _refused("has a size that is not an expression of sizes")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(f"has the size {text[:80]!r}, which is not an expression") from error
    if not all(map(_is_arithmetic, ast.walk(tree))):
        raise _refused(f"has the size {text[:80]!r}, which is more than arithmetic")


def _is_arithmetic(node: ast.AST) -> bool:
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or node.id in ("oo", "int_oo", "zoo") or bool(_SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float)) or bool(_SYMBOL.fullmatch(str(node.value)))
    if isinstance(node, ast.keyword):
        return node.arg in ("positive", "integer", "nonnegative", "evaluate")
    return True


def _check_tree(text: str) -> None:
    """How arguments nest. A context may name a module to import, so only the plainest are let through."""
    try:
        document = json.loads(text)
        for node in _tree_nodes(document[1]):
            context = json.loads(node["context"]) if isinstance(node["context"], str) else node["context"]
            if not (
                context is None
                or (isinstance(context, list) and all(isinstance(key, str) and _WORD.fullmatch(key) for key in context))
            ):
                raise _refused("nests its arguments in a way that imports Python")
            if node["type"] is not None and node["type"] not in _TREES:
                raise _refused(f"takes a {str(node['type'])[:80]!r}; wanted tensors in tuples, lists and dictionaries")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConversionFailed(
            f"how its arguments nest is unreadable ({type(error).__name__}); export it again"
        ) from error


def _tree_nodes(root: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node["children_spec"]


def _refused(what: str) -> ConversionFailed:
    return ConversionFailed(f"{what}; loading it could run code, so nothing of it was loaded. Export the model again")


# ---- TorchScript, .pt ------------------------------------------------------------------------------------------------

_DATA = re.compile(r"(data|constants|traced_inputs)(\.pkl|/\d+)|version|byteorder|\.data/(version|serialization_id)")
_CODE = re.compile(r"code/[\w./-]+\.py")
_SCRIPT_DROPPED = re.compile(r"code/[\w./-]+\.debug_pkl|extra/.*")
_FILES = re.compile(r"\.\s*(save|from_file)\b")
_SPLIT = re.compile(r"\.\s*[#\\]")
"""A comment or a continued line between a dot and a name, which would hide the name from the rules here."""
_GETATTR = re.compile(r"getattr\b(?!\(\s*[\w.]+,\s*\"(?!save\"|from_file\")[^\"\\]*\"\s*\))")
"""Other than as TorchScript prints it, `getattr(self, "0")`."""
_NAMESPACES = re.compile(r"\bops\s*\.\s*(\w+)")
_KNOWN_NAMESPACES = frozenset(("aten", "prim", "prims", "quantized"))
_CUSTOM_CLASS = re.compile(r"__torch__\s*\.\s*torch\s*\.\s*classes")
_MAX_CODE_BYTES = 64 << 20


def write_safe_archive(source: Path, target: Path) -> None:
    """Write a copy that only computes. Raises ConversionFailed saying what else is there."""

    def check(name: str, read: Callable[[], bytes]) -> bytes | Fate | None:
        if _DATA.fullmatch(name):
            return None
        if _CODE.fullmatch(name):
            return _code(name, read())
        if _SCRIPT_DROPPED.fullmatch(name):
            return Fate.LEFT_OUT  # an empty one would break PyTorch's error messages
        raise ConversionFailed(
            f"{source}: holds {name[:80]!r}, which is none of TorchScript's own files; save it again"
        )

    copy_checked(source, target, check)


def _code(name: str, content: bytes) -> bytes:
    if len(content) > _MAX_CODE_BYTES:
        raise ConversionFailed(f"{name} is {len(content)} bytes of code; wanted at most {_MAX_CODE_BYTES}")
    try:
        text = content.decode("ascii")  # as TorchScript's printer writes it; no look-alikes
    except UnicodeDecodeError as error:
        raise ConversionFailed(f"{name} is not TorchScript: not ASCII at byte {error.start}") from error
    found = _FILES.search(text)
    if found:
        raise _script_refused(name, f"calls {found.group(1)!r}, which is how TorchScript reads and writes files")
    if _SPLIT.search(text) or _GETATTR.search(text):
        raise _script_refused(name, "names what it calls in a way that TorchScript never prints")
    strange = sorted(set(_NAMESPACES.findall(text)) - _KNOWN_NAMESPACES)
    if strange:
        raise _script_refused(name, f"calls operators of {', '.join(strange)[:80]}, which are not PyTorch's own")
    if _CUSTOM_CLASS.search(text):
        raise _script_refused(name, "holds objects of a C++ class")
    return content


def _script_refused(name: str, what: str) -> ConversionFailed:
    return ConversionFailed(f"{name} {what}; nothing of it was loaded. Export the model again without, to .pt2")


# ---- the clean copy --------------------------------------------------------------------------------------------------


def copy_checked(source: Path, target: Path, check: Check) -> None:
    """Write `target` with the members of `source` that `check` lets through, uncompressed. Raises ConversionFailed."""
    try:
        with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as clean:
            for member in _members(archive, source):
                _copy(archive, clean, member, check)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, RuntimeError, KeyError) as error:
        raise ConversionFailed(f"{source}: a damaged archive ({error}); copy it again") from error
    except OSError as error:
        raise ConversionFailed(f"{source}: {error.strerror or error}") from error


def _members(archive: zipfile.ZipFile, source: Path) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len({name.lower() for name in names}) != len(names):
        raise ConversionFailed(f"{source}: two members of one name; no exporter writes that")
    if any(".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name for name in names):
        raise ConversionFailed(f"{source}: a member's name leads out of the archive; no exporter writes that")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise ConversionFailed(f"{source}: members are not below one folder, as PyTorch writes them")
    total = sum(member.file_size for member in members)
    if total > min(MAX_BYTES, 2 * source.stat().st_size + 65536):
        raise ConversionFailed(
            f"{source}: says it holds {total} bytes and is {source.stat().st_size}; PyTorch compresses nothing"
        )
    return members


def _copy(archive: zipfile.ZipFile, clean: zipfile.ZipFile, member: zipfile.ZipInfo, check: Check) -> None:
    name = member.filename.partition("/")[2]
    replaced = check(name, lambda: archive.read(member))
    if isinstance(replaced, Fate):
        return
    info = zipfile.ZipInfo(f"model/{name}")
    if replaced is not None:
        clean.writestr(info, replaced)
        return
    with archive.open(member) as reader, clean.open(info, "w", force_zip64=True) as writer:
        while block := reader.read(_BLOCK):
            writer.write(block)
