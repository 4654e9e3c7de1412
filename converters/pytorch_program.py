"""A .pt2 made safe to load: everything in it that `torch.export.load` would execute is taken out or refused.

Owns: the rules. What PyTorch 2.13 would execute of a file (torch/export/pt2_archive/_package.py,
torch/_export/serde/serialize.py, torch/utils/_pytree.py): pickles (sample inputs, weights and constants marked so,
custom objects), expressions of sizes (sympy evaluates them as Python), guards (compiled as Python), operators by dotted
name (any attribute of torch), names of values (torch.fx writes them into Python source and runs it), tree contexts that
import modules, and AOTInductor libraries. Imports no torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.zip_copy import copy_checked

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
"""What every other string is made of: names of weights, devices, versions. No brackets, quotes or operators."""
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
            raise _refused(f"{name} has {str(entry.get('path_name'))[:80]!r}, an object that is no tensor")
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
        raise _refused("has a size that is no expression of sizes")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(f"has the size {text[:80]!r}, which is no expression") from error
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
