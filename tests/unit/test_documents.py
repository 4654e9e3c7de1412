"""README and docs say what the program does: each setting, error code, make target and file that they name is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import msgspec
import pytest

from bench import page as numbers
from edge_runtime.config.reference import renewed
from edge_runtime.errors import WIRE_ERRORS, BackendUnavailable, LoadFailed
from edge_runtime.shipped import SHIPPED
from tests.architecture.source_tree import Module, own_modules, package_modules
from tests.architecture.test_imports import CORE, FENCES, RINGS

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
CONFIGURATION = ROOT / "docs" / "configuration.md"
README_LINES = 220

pytestmark = pytest.mark.long  # it is about the documents, whatever the Python


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str) -> dict[str, str]:
    """First and second column of a page's table of `names`, as written."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `"):
            assert cells[1] not in found, f"{cells[1]} is said twice"
            found[cells[1].strip("`")] = cells[2]
    return found


def test_every_number_of_the_handbook_is_one_that_the_benchmark_kept() -> None:
    names = re.findall(r"^`bench/results/(.+?\.json)`", page("numbers"), re.MULTILINE)
    assert numbers.page([ROOT / "bench" / "results" / name for name in names]) == page("numbers")

    _, _, text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Numbers")
    told = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(told) > 10
    assert set(told) <= set(page("numbers").splitlines())


def test_the_installation_page_names_every_extra() -> None:
    section = page("install").partition("| extras | for |")[2].partition("\n\n")[0]
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = msgspec.toml.decode(file.read())["project"]["optional-dependencies"]
    assert set(re.findall(r"`([a-z-]+)`", section)) == set(extras)


def test_the_size_of_an_installation_is_said_alike_wherever_it_is_said() -> None:
    said = {
        "README.md": r"ONNX Runtime alone(?: it takes|: size \|) (\d+) MB",
        "docs/numbers.md": r"ONNX Runtime alone: size \| (\d+) MB",
        "CHANGELOG.md": r"(\d+) MB installed with ONNX Runtime\.",
    }
    found = {
        (name, "".join(each))
        for name, pattern in said.items()
        for each in re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"))
    }
    assert {name for name, _ in found} == set(said)
    assert len({size for _, size in found}) == 1, found


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_configuration_page_is_what_its_generator_prints() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    assert renewed(text) == text, "do: python -m edge_runtime.config.reference docs/configuration.md"


def test_the_errors_page_says_every_error_code_that_can_reach_a_client() -> None:
    at_load_only = {BackendUnavailable.code, LoadFailed.code}
    assert set(rows(page("errors"))) == set(WIRE_ERRORS) - at_load_only


def test_the_errors_page_says_rightly_which_errors_are_worth_another_try() -> None:
    told = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", page("errors"), re.MULTILINE)
    assert told
    for code, tail in told:
        assert WIRE_ERRORS[code].retryable is (tail == "yes"), code


def test_every_make_target_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for each in PAGES:
        text = each.read_text(encoding="utf-8")
        commands = " ".join([*re.findall(r"```sh\n(.*?)```", text, re.DOTALL), *re.findall(r"`(make [^`]*)`", text)])
        named = set(re.findall(r"\bmake ([a-z-]+)", commands))
        assert named or each.name != "README.md"
        assert named <= targets, each


def test_every_file_that_a_page_names_is_there() -> None:
    folders = "edge_runtime|converters|demo|deploy|docs|tests|bench|cross|device_profiles|requirements|\\.ci"
    for each in PAGES:
        for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", each.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{each}: {name}"


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    for each in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", each.read_text(encoding="utf-8")):
            file = (each.parent / target).resolve() if target else each
            assert file.exists(), f"{each}: {target}"
            if anchor:
                assert anchor in headings(file), f"{each}: {target}#{anchor}"


def headings(file: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# ---- docs/architecture.md -------------------------------------------------------------------------------------------

SECTIONS = (
    "The picture", "Levels", "One request", "One update", "Threads", "Who owns what", "Wire", "Clients", "Trust",
    "Sandbox", "Add an operation",
)  # fmt: skip
"""Comments in the code refer to these."""

NOT_OURS = frozenset(
    (
        *FENCES, "model.py", "config.pbtxt", "hatch_build.py", "import", "TritonPythonModel", "generate_stream", "ts",
    )
)  # fmt: skip
"""Libraries, files of the user's, one of the build, a verb, and names of Triton and TorchServe."""


def test_the_architecture_page_has_the_sections_that_the_code_refers_to() -> None:
    assert tuple(re.findall(r"^## (.*)$", page("architecture"), re.MULTILINE)) == SECTIONS


def test_the_architecture_page_gives_each_part_of_the_core_its_level_and_names_each_ring() -> None:
    told = {
        name: int(level)
        for level, names in re.findall(r"^\| (\d) \| ([^|:]*)", page("architecture"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == CORE
    section = page("architecture").partition("\n| ring |")[2].partition("\n\n")[0]
    rings = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| ([^|]*)", section, re.MULTILINE))))
    assert {ring.replace(".", "/") for ring in RINGS if not ring.startswith("backends.")} <= rings


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([^`\n]+)`", page("architecture")))))
def test_the_architecture_page_names_only_what_is_there(name: str) -> None:
    if "/" in name:
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "edge_runtime", ROOT / "converters"))
    elif re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", name) and not name.endswith((".toml", ".json", ".onnx")):
        assert name.removesuffix("()") in product_names() | NOT_OURS | set(WIRE_ERRORS) | set(SHIPPED)


def placed_names(text: str) -> list[tuple[str, str]]:
    """Each class, method or function that the text gives directly before its file: "`A` in `folder/file.py`"."""
    found = re.findall(r"`(_?[A-Z][\w.]*|\w+\(\))`\s+in\s+`([\w/]+\.py)`", text)
    return [(name.removesuffix("()"), file) for name, file in found]


@pytest.mark.parametrize(("name", "file"), sorted(set(placed_names(page("architecture")))))
def test_the_architecture_page_names_each_thing_in_its_file(name: str, file: str) -> None:
    (module,) = (each for each in own_modules() if str(each.path).endswith(f"/edge_runtime/{file}"))
    assert name in names_of(module)


def test_names_with_their_file_are_found() -> None:
    text = "`A.b` in `x/y.py`, `zmq` in `v.py`, and `d()` in\n`x/z.py`; `f()` elsewhere"
    assert placed_names(text) == [("A.b", "x/y.py"), ("d", "x/z.py")]
    assert len(placed_names(page("architecture"))) > 80


def test_the_architecture_page_lists_each_thread_of_the_daemon() -> None:
    section = page("architecture").partition("\n## Threads\n")[2].partition("\n## ")[0]
    told = {re.sub("<.*>", "", name) for name in re.findall(r"^\| `(edge-.*?)` \|", section, re.MULTILINE)}
    started = {
        name
        for module in package_modules()
        if not module.name.endswith((".link", ".channel", "client"))  # a client's are its caller's
        for name in re.findall(r"\"(edge-(?!runtime)[a-z-]+)(?:\{.*?\})?\"", module.source)
    }
    assert told == started


def names_of(module: Module) -> frozenset[str]:
    """Every class, function and constant of a module, methods and fields also as `Class.name`."""
    found: set[str] = set()
    for scope in ast.walk(module.tree):
        if isinstance(scope, ast.Module | ast.ClassDef):
            prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
            for name in map(_defined, scope.body):
                found.update((name, prefix + name))
    return frozenset(found)


@functools.cache
def product_names() -> frozenset[str]:
    """Every module, class, function and constant of the product, methods and fields also as `Class.name`."""
    found: set[str] = set()
    for module in own_modules():
        if module.name.split(".")[0] in ("edge_runtime", "edge_runtime_converters"):
            parts = module.name.split(".")
            found.update(".".join(parts[i:]) for i in range(len(parts)))
            found.update(parts, (module.path.name,))
            found.update(names_of(module))
    return frozenset(found)


def _defined(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


# ---- docs/glossary.md -----------------------------------------------------------------------------------------------


def test_the_glossary_says_each_term_once_and_in_order() -> None:
    words, _, _ = page("glossary").partition("\n## ")
    terms = [row.split("|")[1].strip() for row in words.splitlines() if row.startswith("| ")][1:]
    assert len(terms) == len(set(terms))
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize(("name", "file"), sorted(set(placed_names(page("glossary")))))
def test_the_glossary_names_each_class_in_its_file(name: str, file: str) -> None:
    test_the_architecture_page_names_each_thing_in_its_file(name, file)


def test_the_glossary_names_classes_by_its_own_words() -> None:
    words, _, rest = page("glossary").partition("\n## Classes\n")
    terms = {term for row in re.findall(r"^\| (.+?) \|", words, re.MULTILINE) for term in row.split(", ")}
    named = {
        term
        for row in re.findall(r"^\| (.+?) \|", rest.partition("\n## ")[0], re.MULTILINE)
        for term in row.split(", ")
    }
    assert named - {"word"} <= terms


def test_pytest_is_given_each_folder_of_tests_and_none_holds_another() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^testpaths = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    folders = {str(file.relative_to(ROOT).parent) for file in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(re.findall(r'"(.+?)"', listed)) == sorted({"/".join(folder.split("/")[:2]) for folder in folders})
