"""tests/unit and tests/contract mirror the packages: a module's tests lie in folders of its package's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGE, ROOT, Module, imports_of, own_modules

UNIT = "tests.unit"

ELSEWHERE = {"cross": "cross", "demo": "demo", "deploy": "deploy", "fakes": "tests"}
"""Folders of tests/unit whose subject is not a package of the product, and where that lies."""

WITHOUT_IMPORT = {
    "tests.unit.test_documents",  # the handbook
    "tests.unit.wire.test_open_inference_proto",  # `open_inference.proto` in the package
    "tests.unit.test_public_names",  # the package itself
    "tests.unit.client.test_client_process",  # clients in scripts that it starts
}
"""Tests that import nothing of what they test."""

TESTS = [each for each in own_modules() if each.name.startswith(f"{UNIT}.") and ".test_" in each.name]


def misplaced(test: Module) -> str:
    """Why a unit test lies in the wrong folder; empty where it does not.

    A test in no folder is one of a module that is in no package, and named for it.
    """
    *folders, name = test.name.removeprefix(f"{UNIT}.").split(".")
    subject = ".".join([PACKAGE, *folders]) if folders else f"{PACKAGE}.{name.removeprefix('test_')}"
    subject = ELSEWHERE.get(folders[0], subject) if folders else subject
    wanted = {each.target for each in imports_of(test)}
    if any(each == subject or each.startswith(f"{subject}.") for each in wanted):
        return ""
    return f"imports nothing of {subject}: put it beside the tests of what it imports"


def test_each_folder_of_unit_tests_is_that_of_a_package() -> None:
    folders = {each.name for each in (ROOT / "tests" / "unit").iterdir() if (each / "__init__.py").is_file()}
    packages = {each.name for each in (ROOT / PACKAGE).iterdir() if (each / "__init__.py").is_file()}
    assert folders - packages == set(ELSEWHERE)


def test_each_folder_of_contract_tests_is_that_of_a_package_and_no_test_lies_beside_them() -> None:
    contract = ROOT / "tests" / "contract"
    folders = {each.parent.relative_to(contract) for each in contract.rglob("test_*.py")}
    packages = {each.parent.relative_to(ROOT / PACKAGE) for each in (ROOT / PACKAGE).rglob("__init__.py")}
    assert {each.as_posix() for each in folders - packages | folders & {Path()}} == {"converters"}


def test_each_folder_of_contract_tests_has_one_for_the_other_interpreters() -> None:
    contract = ROOT / "tests" / "contract"
    folders = {each.parent for each in contract.rglob("test_*.py")}
    marked = {each.parent for each in contract.rglob("test_*.py") if "mark.smoke" in each.read_text(encoding="utf-8")}
    assert {each.relative_to(contract).as_posix() for each in folders - marked} == set()


@pytest.mark.parametrize(
    "test", [each for each in TESTS if each.name not in WITHOUT_IMPORT], ids=lambda each: each.name
)
def test_a_unit_test_lies_in_the_folder_of_what_it_tests(test: Module) -> None:
    assert misplaced(test) == ""


def test_a_unit_test_of_another_package_is_found() -> None:
    source = "from edge_runtime.wire import codec\n"
    assert misplaced(Module("tests.unit.client.test_x", ROOT / "x.py", source))
    assert not misplaced(Module("tests.unit.wire.test_x", ROOT / "x.py", source))
