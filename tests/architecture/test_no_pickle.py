"""Nothing of ours turns bytes into code: no pickle, marshal or shelve, no arrays with pickling on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, imports_of, own_modules, parse

UNPICKLERS = frozenset(
    ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle")
)
UNPICKLING_METHODS = frozenset(("recv_pyobj", "send_pyobj", "read_pickle", "to_pickle"))


def pickling(module: Module) -> Iterator[str]:
    for found in imports_of(module):
        if found.target.split(".")[0] in UNPICKLERS:
            yield f"{module.path}:{found.line} imports {found.target}"
    for node in module.nodes:
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is_false(node.value):
            yield f"{module.path}:{node.value.lineno} allows pickling"
        elif isinstance(node, ast.Attribute) and node.attr in UNPICKLING_METHODS:
            yield f"{module.path}:{node.lineno} uses {node.attr}"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("module", own_modules(), ids=lambda module: module.name)
def test_no_module_of_ours_can_unpickle(module: Module) -> None:
    assert list(pickling(module)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "def late():\n    import shelve",
        "import importlib\nimportlib.import_module('pickle')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "socket.recv_pyobj()",
    ],
)
def test_each_way_to_unpickle_is_found(source: str) -> None:
    assert len(list(pickling(parse("edge_runtime.x", source)))) == 1


def test_loading_arrays_without_pickling_is_allowed() -> None:
    assert list(pickling(parse("edge_runtime.x", "import numpy as np\nnp.load('x', allow_pickle=False)"))) == []
