"""Backends by name: lazily, with a reason where one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.registry import backend, declaration_of, known_backends, make_backend, probe_all
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.extras import install_advice
from edge_runtime.plugins import code_backends, named
from tests.models import python_models


def run_python(program: str, **environment: str) -> str:
    """Run a program in a fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment or None,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_registry_imports_no_library() -> None:
    program = """
import sys
from edge_runtime.backends.registry import known_backends, backend
from edge_runtime.errors import BackendUnavailable
for name in known_backends():
    try:
        backend(name)
    except BackendUnavailable as error:  # what no development environment holds
        assert name in ("tensorrt", "pytorch", "catboost"), error
libraries = (
    "onnxruntime", "openvino", "ai_edge_litert", "tensorrt", "tensorrt_rtx", "cuda", "torch", "onnx", "catboost",
)
print([name for name in libraries if name in sys.modules])
"""
    assert run_python(program) == "[]"


def test_openvino_is_imported_without_its_reporting_tools() -> None:
    program = """
import sys, threading
from edge_runtime.backends.registry import backend
probe = backend("openvino").probe()
assert probe.is_available, probe.reason
print(sorted(name for name in sys.modules if "telemetry" in name or "ovc" in name), threading.active_count())
"""
    assert run_python(program) == "[] 1"


def test_a_package_left_out_of_an_import_is_as_if_not_installed_and_is_there_again_afterwards() -> None:
    program = """
import importlib.util, sys, wave
from edge_runtime.backends.library_import import left_out
before = sys.meta_path[:]
with left_out("wave", "colorsys"):
    import wave  # it was imported already
    try:
        import colorsys
    except ModuleNotFoundError:
        print(importlib.util.find_spec("colorsys"), "colorsys" in sys.modules)
    sys.meta_path.append("a library's own finder")
import colorsys
print(sys.meta_path == [*before, "a library's own finder"])
"""
    assert run_python(program).split() == ["None", "False", "True"]


def test_imports_side_by_side_that_leave_packages_out_leave_none_out_afterwards() -> None:
    program = """
import importlib.util
from edge_runtime.backends.library_import import left_out
found = lambda: [importlib.util.find_spec(name) is not None for name in ("wave", "colorsys")]
one, other = left_out("wave"), left_out("colorsys")
one.__enter__()
other.__enter__()
one.__exit__(None, None, None)  # as of a thread that began first and ends first
print(*found())
other.__exit__(None, None, None)
print(*found())
"""
    assert run_python(program).split() == ["True", "False", "True", "True"]


def test_onnx_runtime_is_imported_without_its_telemetry(tmp_path: Path) -> None:
    """Which is a thread that reports to its maker's servers, and files in the home folder."""
    program = """
import os
from edge_runtime.backends.registry import backend
probe = backend("onnxruntime").probe()
assert probe.is_available, probe.reason
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""
    assert run_python(program, HOME=str(tmp_path)) == "1"
    assert list(tmp_path.iterdir()) == []


MISSING = {"onnxruntime": "onnxruntime", "openvino": "openvino", "litert": "ai_edge_litert", "tensorrt": "tensorrt"}


def test_a_missing_library_is_a_reason_with_what_to_install(tmp_path: Path) -> None:
    """A fresh interpreter whose path holds the package and numpy, and no backend."""
    program = """
import importlib.abc, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("onnxruntime", "openvino", "ai_edge_litert", "tensorrt", "tensorrt_rtx", "torch", "catboost"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from edge_runtime.backends.registry import probe_all
for probe in probe_all():
    print(probe.name, probe.is_available, probe.reason)
"""
    lines = run_python(program).splitlines()
    for line, (name, module) in zip(lines, MISSING.items(), strict=False):
        assert line == f"{name} False {module} is not installed; {install_advice(name)}"
    assert lines[4] == (
        "pytorch False torch is not installed; install it with: pip install torch --index-url "
        "https://download.pytorch.org/whl/cpu"
    )
    assert lines[5] == f"catboost False catboost is not installed; {install_advice('catboost')}"
    assert lines[6].startswith("python True")


def test_an_unknown_backend_is_unavailable_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        BackendUnavailable, match="no backend 'abacus'; known: onnxruntime, openvino, litert, tensorrt, pytorch"
    ):
        backend("abacus")


@pytest.mark.parametrize("name", known_backends())
def test_a_backend_is_made_by_its_declarations_factory(name: str) -> None:
    declaration = declaration_of(name)
    assert declaration.name == name
    assert make_backend(declaration).declaration is declaration


@pytest.mark.parametrize("name", known_backends())
def test_every_part_that_a_declaration_names_is_there(name: str) -> None:
    declaration = declaration_of(name)
    for text in (declaration.factory, declaration.builder, declaration.rule, declaration.prepare):
        assert not text or named(text) is not None
    made, is_plain = make_backend(declaration), declaration.builder == ""
    assert callable(getattr(made, "load_opened", None)) is bool(declaration.shares)
    assert callable(getattr(made, "load_functions", None)) is declaration.loads_functions
    assert callable(getattr(made, "prepare", None)) is not is_plain


def test_the_backends_of_code_are_those_that_every_profile_has() -> None:
    assert tuple(name for name in known_backends() if declaration_of(name).is_code) == code_backends()


def test_every_known_backend_is_probed() -> None:
    assert tuple(probe.name for probe in probe_all()) == known_backends()


BROKEN = Declaration(name="broken", factory="", artifacts=(), libraries=("broken_library",), extra="broken")


def test_a_broken_library_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise OSError('libfoo.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"cannot be imported: libfoo.so.1"):
        import_library("broken_library", BROKEN)
    probe = probe_library("broken", lambda: (str(import_library("broken_library", BROKEN)), ()))
    assert not probe.is_available
    assert "libfoo.so.1" in probe.reason


def test_a_library_whose_own_dependency_is_missing_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_library.py").write_text("import a_dependency_of_it")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"is installed but cannot be imported: .*a_dependency_of_it"):
        import_library("half_library", BROKEN)


def test_python_models_are_refused_unless_allowed(tmp_path: Path) -> None:
    artifact = python_models.mlp(tmp_path)
    with pytest.raises(LoadFailed, match="python_models = true"):
        backend("python").load(artifact, LoadOptions())
