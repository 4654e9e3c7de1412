"""The project's own Python files, and what each imports. Shared by the tests beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "edge_runtime"

OWN_FOLDERS = (PACKAGE, "converters", "deploy", "tests", "bench", "cross", "demo")
"""Folders that hold our own Python."""

IMPORT_ROOTS = (ROOT, ROOT / "converters")
"""What an editable install puts on the path (pyproject.toml, dev-mode-dirs); the deepest one above a file names it."""


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name, its path and its text."""

    name: str
    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree, made when a test asks: many list the files only to name their cases."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its tree, for the many tests that look at each."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The dotted name that a relative import starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """One imported dotted name and its line. `from a.b import c` is `a.b.c`, since c may be a module."""

    target: str
    line: int


def parse(name: str, source: str, path: Path | None = None) -> Module:
    """A module from its text; tests use it for sources that break a rule on purpose."""
    return Module(name, path or Path(name.replace(".", "/") + ".py"), source)


@cache
def own_modules() -> tuple[Module, ...]:
    """Every Python file of the project."""
    return tuple(_modules())


def package_modules() -> tuple[Module, ...]:
    """Every Python file of `edge_runtime`."""
    return tuple(module for module in own_modules() if module.name.split(".")[0] == PACKAGE)


def imports_of(module: Module) -> Iterator[Import]:
    """Every import anywhere in a file: lazy ones, those for types only, and `import_module("...")` with a constant."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            yield from (Import(f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, node.lineno)


def _modules() -> Iterator[Module]:
    files = [*ROOT.glob("*.py"), *(file for folder in OWN_FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    for file in sorted(files):
        root = next(root for root in reversed(IMPORT_ROOTS) if file.is_relative_to(root))
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield parse(name, file.read_text(encoding="utf-8"), file)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    base = module.package.split(".")
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__", "find_spec", "import_library") and bool(node.args)
