"""Which names are models, versions and artifacts; no hostile name ever becomes a path outside the models folder."""

from __future__ import annotations

import random
import re
import string
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ModelNotFound
from edge_runtime.models.names import (
    MAX_VERSION,
    VARIANTS,
    artifact_candidates,
    check_model_name,
    is_ignored,
    is_model_name,
    parse_version,
    variant_name,
    variant_of,
)
from tests.fakes.audit import files_touched

HOSTILE_NAMES = 5_000

SEEDS = (
    "", ".", "..", "...", "../", "..\\", "/", "//", "/etc/passwd", "../../etc/passwd", "..%2f..%2fetc%2fpasswd",
    "%2e%2e/", "%00", "\0", "digits\0", "digits\0.onnx", "digits\n", "digits\r\n", "\ndigits", "digits ", " digits",
    "digits/", "digits/1", "digits/../other", "digits\\1", "C:\\models", "file:///etc/passwd", "~root", "$HOME", "`id`",
    "digits;id", "digits|id", "-rf", "_digits", ".digits", "\ufb01gits", "dig\u0131ts", "d\u0456gits",
    "\uff0e\uff0e\uff0f", "digits\u200b", "\u202edigits", "digits\u2028",
    "\u0661", "\u2177", "\U0001d7d8", "a" * 65, "a" * 100_000, "digits?", "digits*", "{digits}", "digits\ud800",
    "a:b", "a@b", "a#b", "a+b", "a,b", "a=b", "a&b", "a'b", 'a"b', "con\t", "\x7f", "\x1b[2J", "\u00e9", "e\u0301",
)  # fmt: skip


def hostile_names() -> list[str]:
    """The same 5 000 names each time: the seeds, and mixtures of them that a path could be made of."""
    chance = random.Random(20_240_229)
    pieces = [seed for seed in SEEDS if seed and len(seed) < 40]
    names = list(dict.fromkeys(SEEDS))
    seen = set(names)
    while len(names) < HOSTILE_NAMES:
        parts = [chance.choice(pieces) for _ in range(chance.randint(1, 4))]
        name = chance.choice(("", "/", "..", "\0", "\n")).join(parts)
        name = chance.choice((name, urllib.parse.quote(name, safe="", errors="replace") + "%", name.upper(), name * 9))
        # What is a name by the rule is not hostile, however it was made.
        if name not in seen and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
            seen.add(name)
            names.append(name)
    return names


def test_five_thousand_hostile_names_are_refused_before_any_path_is_made() -> None:
    names = hostile_names()
    assert len(set(names)) == HOSTILE_NAMES
    with files_touched() as touched:
        for name in names:
            with pytest.raises(ModelNotFound) as caught:
                check_model_name(name)
            assert caught.value.code == "model_not_found"
            assert len(caught.value.message) < 1_000, "an error must not carry a hostile name whole"
            assert parse_version(name) is None
    assert touched == []


@given(st.text(max_size=80))
def test_a_name_that_passes_stays_directly_inside_the_root(name: str) -> None:
    root = Path("/models")
    try:
        passed = check_model_name(name)
    except ModelNotFound:
        return
    assert (root / passed).parent == root
    assert (root / passed).name == passed == name


@given(st.from_regex(re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII), fullmatch=True))
def test_every_name_of_the_rule_is_taken(name: str) -> None:
    assert check_model_name(name) == name
    assert is_model_name(name)


@pytest.mark.parametrize("name", ["a", "0", "digits", "mobilenet-v2", "Model_1.2", "a" * 64, "a..b", "con", "1"])
def test_ordinary_names_are_taken(name: str) -> None:
    assert check_model_name(name) == name


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("10", 10),
        ("20240229", 20_240_229),
        (str(MAX_VERSION), MAX_VERSION),
        (str(MAX_VERSION + 1), None),
        ("9" * 19, None),
        ("9" * 5_000, None),
        ("0", None),
        ("01", None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        ("1 ", None),
        ("1\n", None),
        (" 1", None),
        ("1_000", None),
        ("v1", None),
        ("", None),
        ("\u0661", None),
        ("\u00b2", None),
        ("0x1", None),
    ],
)
def test_a_version_is_a_positive_integer_in_plain_digits(text: str, number: int | None) -> None:
    assert parse_version(text) == number


@given(st.integers(1, MAX_VERSION))
def test_every_version_number_is_read_back(number: int) -> None:
    assert parse_version(str(number)) == number


@given(st.text(alphabet=string.printable, max_size=25))
def test_a_parsed_version_is_written_exactly_so(text: str) -> None:
    number = parse_version(text)
    assert number is None or str(number) == text


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        (".git", True),
        ("model.onnx.part", True),
        ("model.tmp", True),
        ("model.onnx", False),
        ("part", False),
        ("a.part.onnx", False),
    ],
)
def test_hidden_and_unfinished_names_are_ignored(name: str, ignored: bool) -> None:
    assert is_ignored(name) is ignored


@pytest.mark.parametrize(
    ("names", "wanted", "found"),
    [
        (["model.onnx"], "model.onnx", ("model.onnx",)),
        (["model.onnx", "b.onnx"], "model.onnx", ("model.onnx",)),
        (["digits.onnx"], "model.onnx", ("digits.onnx",)),
        (["b.onnx", "a.onnx"], "model.onnx", ("a.onnx", "b.onnx")),
        (["model.xml"], "model.onnx", ()),
        (["net.xml", "net.bin"], "model.xml", ("net.xml",)),
        (["net.xml"], "model.xml", ()),
        (["model.xml"], "model.xml", ("model.xml",)),
        (["net.xml", "net.bin", "notes.xml"], "model.xml", ("net.xml",)),
        (["other.py"], "model.py", ()),
        (["model.py"], "model.py", ("model.py",)),
        (["x.plan"], "model.plan", ("x.plan",)),
        ([".onnx"], "model.onnx", ()),
        (["model.ONNX"], "model.onnx", ()),
        ([], "model.onnx", ()),
        (["net.int8.onnx"], "model.onnx", ()),
        (["net.int8.onnx", "net.onnx"], "model.onnx", ("net.onnx",)),
        (["net.int8.onnx", "net.onnx"], "model.int8.onnx", ("net.int8.onnx",)),
        (["net.int8.xml", "net.int8.bin"], "model.int8.xml", ("net.int8.xml",)),
        (["net.int8.xml", "net.bin"], "model.int8.xml", ()),
        (["int8.onnx"], "model.onnx", ("int8.onnx",)),
        ([".int8.onnx"], "model.int8.onnx", ()),
    ],
)
def test_one_file_of_the_right_kind_stands_for_the_artifact(
    names: list[str], wanted: str, found: tuple[str, ...]
) -> None:
    assert artifact_candidates(names, wanted) == found


@given(st.sampled_from(["model.onnx", "model.xml", "net.v2.onnx", "int8.onnx"]), st.sampled_from(["", *VARIANTS]))
def test_a_variants_name_says_its_precision(name: str, precision: str) -> None:
    assert variant_of(variant_name(name, precision)) == precision
