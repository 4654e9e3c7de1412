"""Modules, classes and functions are named for what they are; every public name of the package says what it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import Module, own_modules, package_modules, parse

DRAWERS = frozenset(
    ("manager", "managers", "helper", "helpers", "util", "utils", "utility", "common", "misc", "info", "tools", "stuff")
)
"""Words that say "things live here" (STYLE, "Not used")."""


def drawer_names(module: Module) -> Iterator[str]:
    for word in module.name.split("."):
        if DRAWERS.intersection(word.split("_")):
            yield f"module {module.name}"
            break
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and DRAWERS.intersection(_words(node.name)):
            yield f"{module.path}:{node.lineno} class {node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch(
            r"process|_*do_[a-z].*", node.name
        ):
            yield f"{module.path}:{node.lineno} function {node.name}"


def undocumented(module: Module) -> Iterator[str]:
    if ast.get_docstring(module.tree) is None:
        yield f"{module.name}: the file has no docstring"
    yield from _undocumented_in(module.tree, module.name)


def _undocumented_in(scope: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    for node in _definitions(scope):
        if node.name.startswith("_") or _is_variant(node):
            continue
        if ast.get_docstring(node) is None:
            yield f"{name}.{node.name} (line {node.lineno}) has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node, f"{name}.{node.name}")


def _definitions(scope: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions of a scope, those under `if` and `try` included, those inside functions not."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(node)


def _is_variant(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Overloads and property setters are described where the name is first said."""
    names = [decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
             for decorator in node.decorator_list]  # fmt: skip
    return bool({"overload", "setter", "deleter"}.intersection(names))


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


@pytest.mark.parametrize("module", own_modules(), ids=lambda module: module.name)
def test_no_name_is_a_drawer(module: Module) -> None:
    assert list(drawer_names(module)) == []


@pytest.mark.parametrize("module", package_modules(), ids=lambda module: module.name)
def test_every_public_name_has_a_docstring(module: Module) -> None:
    assert list(undocumented(module)) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("edge_runtime.utils", ""),
        ("edge_runtime.serving.model_helpers.x", ""),
        ("edge_runtime.x", "class ModelManager: ..."),
        ("edge_runtime.x", "class HTTPInfo: ..."),
        ("edge_runtime.x", "class A:\n    def process(self): ..."),
        ("edge_runtime.x", "def do_work(): ..."),
    ],
)
def test_each_kind_of_drawer_is_found(name: str, source: str) -> None:
    assert len(list(drawer_names(parse(name, source)))) == 1


def test_a_handler_named_by_the_standard_library_is_allowed() -> None:
    assert list(drawer_names(parse("edge_runtime.x", "class A:\n    def do_GET(self): ..."))) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("", ["edge_runtime.x: the file has no docstring"]),
        ('"""Doc."""\ndef public(): ...', ["edge_runtime.x.public (line 2) has no docstring"]),
        ('"""Doc."""\nif True:\n    def public(): ...', ["edge_runtime.x.public (line 3) has no docstring"]),
        ('"""Doc."""\ndef _private(): ...', []),
        (
            '"""Doc."""\nclass A:\n    """Doc."""\n    def b(self): ...',
            ["edge_runtime.x.A.b (line 4) has no docstring"],
        ),
    ],
)
def test_a_public_name_without_a_docstring_is_found(source: str, missing: list[str]) -> None:
    assert list(undocumented(parse("edge_runtime.x", source))) == missing
