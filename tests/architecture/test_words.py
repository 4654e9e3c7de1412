"""Names say what they name, in the glossary's words; a class name is used once; every public name has a docstring."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGE, ROOT, Module, own_modules, package_modules, parse

DRAWERS = frozenset(
    ("manager", "managers", "helper", "helpers", "util", "utils", "utility", "common", "misc", "info", "tools", "stuff")
)
"""Words that say "things live here"."""

DOCUMENTS = (
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("cross", "demo", "device_profiles")),
)  # fmt: skip

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
NOT_USED = frozenset(
    word.strip()
    for words in re.findall(r"^\| ([a-z, ]+) \|", GLOSSARY.partition("| not used |")[2], re.MULTILINE)
    for word in words.split(",")
)

MEANT_OTHERWISE = {
    "exchange": r"backends\.python\.backend|triton\.python_backend",  # of messages with a child process
    "info": r"pytorch_archives|mqtt\.connection|triton\.interface",  # ZipInfo, MQTTMessageInfo, Triton's log level
    "manager": r"openvino_from_onnx",  # OpenVINO's pass manager
    "util": r"torch",  # TorchServe's and PyTorch's modules
    "outcome": r"updates\.(rollout|trial)",  # the word that a result has for how it ended
    "settle": r"models\.(watch|served_folder)",  # files come to rest
}
"""Words that mean another thing in the modules whose names the pattern finds."""

ONE_MEANING = {
    "session": r"onnxruntime|ort_from_onnx|mqtt|config\.settings",  # ONNX Runtime's; MQTT's own `session expiry`
    "engine": r"tensorrt|engine|build_(store|cache)|promotions|backends\.registry|hosts\.|daemon\."
    r"|updates\.|conversion$",
    "bench": r"cli\.bench",
    # TUF's. Besides: what conversions write (`--to`), ONNX's regressors; TensorRT's, TorchServe's, HTTP's, Ray's word.
    "target": r"publish\.|updates\.|converters|conversions$|onnx\.rule|tensorrt|torchserve"
    r"|http\.head|ray_serve\.autoscaler",
}
"""Words that name one thing only, and the modules that have to do with it."""


def drawer_names(module: Module) -> Iterator[str]:
    for word in module.name.split("."):
        if DRAWERS.intersection(word.split("_")):
            yield f"module {module.name}"
            break
    for node in module.nodes:
        if isinstance(node, ast.ClassDef) and DRAWERS.intersection(_words(node.name)):
            yield f"{module.path}:{node.lineno} class {node.name}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch(
            r"process|_*do_[a-z].*", node.name
        ):
            yield f"{module.path}:{node.lineno} function {node.name}"


def product_modules() -> tuple[Module, ...]:
    """The package and the converters."""
    return tuple(each for each in own_modules() if each.name.split(".")[0] in (PACKAGE, f"{PACKAGE}_converters"))


def given_names(module: Module) -> Iterator[tuple[str, int]]:
    """Every name that a file gives: its own, and of classes, functions, parameters, variables and attributes."""
    yield module.name.rpartition(".")[2], 0
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def unused_words(module: Module) -> Iterator[str]:
    """Names with a word that the glossary says is not used, or that means something else, singular or plural."""
    for name, line in given_names(module):
        for word in {found for each in _words(name) for found in (each, each.removesuffix("s"))}:
            places = MEANT_OTHERWISE.get(word, "$^") if word in NOT_USED else ONE_MEANING.get(word, "")
            if not re.search(places, module.name):
                yield f"{module.path}:{line} {name}: {word}"


PARTICIPLES = frozenset(("asked", "found", "given", "kept", "said", "seen", "told"))
"""Not the name of a class, function, parameter or field, which is a noun or a verb; a variable may have it."""


def participles(module: Module) -> Iterator[str]:
    """Public names that say what happened to a thing, and not what it is."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names = [node.name.lower().lstrip("_"), *(each.id for each in fields if isinstance(each, ast.Name))]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(("_", "test_")):
            names = [node.name, *(each.arg for each in (*node.args.args, *node.args.kwonlyargs))]
        else:
            continue
        yield from (f"{module.path}:{node.lineno} {name}" for name in PARTICIPLES.intersection(names))


ORDINARY = frozenset(("common", "info", "manager", "means"))
"""Words that names must not have and sentences may: context and service managers, a level of the log, the verb."""

HARD_TO_READ = re.compile(
    r"\b(?:whoever|of whatever|so many of (?:them|it)|(?:is|are|was|were|be) (?:had|told of)|told of a|by as many as)\b"
    r"|(?<!here )\b(?:is|are|was|were|be) no (?!longer|more|less|later|earlier|other|one)[\w.]"
)
"""Turns that STYLE's English replaces by the name of the thing; "is no X", which is "is not an X"."""


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """Every line that a person reads in a file: of docstrings, comments, and the texts of logs, errors and help."""
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield from enumerate(token.string.splitlines(), token.start[0])


def unused_words_said(module: Module) -> Iterator[str]:
    """Sentences with a word that the glossary says is not used."""
    said = NOT_USED - ORDINARY - {word for word, places in MEANT_OTHERWISE.items() if re.search(places, module.name)}
    pattern = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(said))})s?(?![\w./-]*\w)", re.IGNORECASE)
    for line, text in prose(module):
        if (found := pattern.search(text)) and not text.startswith("# type: ignore"):
            yield f"{module.path}:{line} {found[0]}: {text.strip()}"


def hard_sentences(module: Module) -> Iterator[str]:
    """Sentences with a turn that hides what it names."""
    for line, text in prose(module):
        if found := HARD_TO_READ.search(text):
            yield f"{module.path}:{line} {found[0]}: {text.strip()}"


SLOW_DOCSTRING = re.compile(r"^What (?!may wait|a mapped step|a caller may send)|\b(?:nobody|somebody|so many)\b")
"""Turns that hide a thing's name from a reader of docstrings. The rest of "What ..." are promised words of settings."""


def slow_docstrings(module: Module) -> Iterator[str]:
    """Docstrings of the file and its definitions that begin with a clause, or speak of nobody."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if slow := SLOW_DOCSTRING.search(text):
                yield f"{module.path}:{getattr(node, 'lineno', 1)} {slow[0]}: {text.splitlines()[0]}"


def clauses_for_subjects(module: Module) -> Iterator[str]:
    """Tests whose names begin with a clause in place of the thing that they are about."""
    for node in module.nodes:
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if re.match("test_(?:what|whatever|who|whoever)_", name):
            yield f"{module.path}: {name}"


def undocumented(module: Module) -> Iterator[str]:
    if ast.get_docstring(module.tree) is None:
        yield f"{module.name}: the file has no docstring"
    yield from _undocumented_in(module.tree, module.name)


def _undocumented_in(scope: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    for node in _definitions(scope):
        if node.name.startswith(("_", "test_")) or _is_variant(node):
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


def test_a_class_name_is_used_once_in_the_product() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in product_modules():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_glossary_lists_words_that_are_not_used() -> None:
    assert {"lot", "inquiry", "incumbent", "newcomer", "lobby", "wish"} <= NOT_USED


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_no_name_has_a_word_that_is_not_used(module: Module) -> None:
    assert list(unused_words(module)) == []


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_no_public_name_is_a_participle(module: Module) -> None:
    assert list(participles(module)) == []


@pytest.mark.parametrize(
    "source",
    ["class Asked: ...", "class _Seen: ...", "def found(): ...", "def a(*, told): ...", "class A:\n    given: int"],
)
def test_each_kind_of_participle_is_found(source: str) -> None:
    assert len(list(participles(parse("edge_runtime.x", source)))) == 1


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_no_sentence_has_a_word_that_is_not_used_or_hides_what_it_names(module: Module) -> None:
    assert [*unused_words_said(module), *hard_sentences(module)] == []


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_no_docstring_begins_with_a_clause_or_speaks_of_nobody(module: Module) -> None:
    assert list(slow_docstrings(module)) == []


@pytest.mark.parametrize("text", ["What one backend can run.", "Drop what nobody reads.", "Load so many of them."])
def test_each_kind_of_slow_docstring_is_found(text: str) -> None:
    assert len(list(slow_docstrings(parse("edge_runtime.x", f'def a():\n    """{text}"""')))) == 1


def test_each_test_is_named_by_its_subject() -> None:
    assert [clause for module in own_modules() for clause in clauses_for_subjects(module)] == []


@pytest.mark.parametrize("words", ["what_is_sent", "whatever_is_sent", "who_sends", "whoever_sends"])
def test_each_kind_of_clause_for_a_subject_is_found(words: str) -> None:
    assert len(list(clauses_for_subjects(parse("tests.x", f"def test_{words}_is_answered(): ...")))) == 1


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_has_a_word_that_is_not_used_or_hides_what_it_names(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").partition("## Words that are not used")[0].splitlines()
    text = "\n".join(f"# {re.sub('`.*?`', '', line)}" for line in lines)
    found = parse(page.stem, text, page)
    assert [*unused_words_said(found), *hard_sentences(found)] == []


@pytest.mark.parametrize(
    "source",
    [
        '"""The newcomer serves."""',
        "a = 1  # an inquiry",
        'log.info("a lot of requests")',
        'raise ValueError(f"{name} is whoever asks")',
        '"""It is told of each end."""',
        '"""A file that is no model."""',
    ],
)
def test_each_kind_of_sentence_with_such_a_word_is_found(source: str) -> None:
    found = parse("edge_runtime.x", source)
    assert len([*unused_words_said(found), *hard_sentences(found)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class Inquiry: ...",
        "def wish(): ...",
        "def a(newcomers): ...",
        "a.lobby = 1",
        "session = 1",
        "class ABench: ...",
    ],
)
def test_each_kind_of_name_with_such_a_word_is_found(source: str) -> None:
    assert len(list(unused_words(parse("edge_runtime.x", source)))) == 1


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
