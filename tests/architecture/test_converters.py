"""The converters stand beside the package: who imports whom, and each library only in the step that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import (
    OWN_FOLDERS,
    PACKAGE,
    ROOT,
    Module,
    imports_of,
    own_modules,
    package_modules,
    parse,
)
from tests.architecture.test_imports import CORE, part_of
from tests.architecture.test_words import undocumented

CONVERTERS = "edge_runtime_converters"
HIGHEST_LEVEL = CORE["client"]
"""What converters import of edge_runtime: backends to run artifacts, the sandbox, readers of input files."""

SCREEN = (
    ("edge_runtime_converters", "edge_runtime.cli.verbs.Verb"),
    ("command", "edge_runtime.cli.screen.Screen"),
    ("import_command", "edge_runtime.cli.screen.Screen"),
)
"""The imports from above: the verbs `convert` and `import` are declared and print as every verb."""

FENCES = {
    **dict.fromkeys(("keras", "h5py"), ("onnx_from_keras",)),
    "torch": ("onnx_from_pytorch", "onnx_from_torchscript"),
    "onnxscript": ("onnx_from_pytorch", "onnx_from_keras"),
    "skops": ("skops_files",),
    "sklearn": ("onnx_from_sklearn", "skops_files"),
    "skl2onnx": ("onnx_from_sklearn", "boosted_steps"),
    "xgboost": ("onnx_from_xgboost",),
    "lightgbm": ("onnx_from_lightgbm",),
    "catboost": ("onnx_from_catboost",),
    "nncf": ("openvino_from_onnx",),
    "openvino": ("openvino_from_onnx",),
    "ai_edge_litert": ("openvino_from_tflite",),
    "yaml": ("source_folder",),
    "onnx": ("onnx_source", "int8_from_onnx", "onnx_from_torchscript", "onnx_from_keras", "forest", "onnx_interface"),
    "onnxruntime": ("int8_from_onnx", "f16_from_onnx", "ort_from_onnx"),
}
"""Library -> the files that may import it."""


def converters() -> tuple[Module, ...]:
    return tuple(module for module in own_modules() if module.name.split(".")[0] == CONVERTERS)


def strays(module: Module) -> Iterator[str]:
    own = module.name.rpartition(".")[2]
    for found in imports_of(module):
        package = found.target.split(".")[0]
        if package == "converters":
            yield f"{module.name}:{found.line} imports {found.target}; its name is {CONVERTERS}"
        is_above = package == PACKAGE and CORE.get(part_of(found.target), 0) > HIGHEST_LEVEL
        if is_above and (own, found.target) not in SCREEN:
            yield f"{module.name}:{found.line} imports {found.target}, above level {HIGHEST_LEVEL}"
        if package in FENCES and own not in FENCES[package]:
            yield f"{module.name}:{found.line} imports {found.target}; allowed: {FENCES[package]}"


@pytest.mark.parametrize("module", converters(), ids=lambda module: module.name)
def test_a_converter_imports_only_its_own_library_and_lower_levels(module: Module) -> None:
    assert list(strays(module)) == []


@pytest.mark.parametrize("module", converters(), ids=lambda module: module.name)
def test_every_public_name_of_a_converter_has_a_docstring(module: Module) -> None:
    assert list(undocumented(module)) == []


def test_no_file_has_two_names() -> None:
    below = (path for folder in OWN_FOLDERS for path in (ROOT / folder).rglob("*"))
    assert [path for path in (*ROOT.iterdir(), *below) if path.is_symlink() and path.name != ".venv"] == []
    assert not list((ROOT / "converters").glob("*.py")), "a module beside the package would be importable by two names"


def test_the_package_imports_no_converter() -> None:
    found = [
        f"{module.name}:{each.line}"
        for module in package_modules()
        for each in imports_of(module)
        if each.target.split(".")[0] == CONVERTERS
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "from edge_runtime.daemon import run",
        "from edge_runtime.cli.main import main",
        "import torch",
        "def late():\n    import importlib\n    importlib.import_module('skops.io')",
        "from converters.wish import Wish",
    ],
)
def test_each_stray_import_is_found(source: str) -> None:
    assert len(list(strays(parse("edge_runtime_converters.comparison", source)))) == 1
