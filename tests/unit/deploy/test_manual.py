"""The manual page says what the command line says."""

from __future__ import annotations

import re

import pytest

from deploy.debian.manual import manual
from edge_runtime.cli.main import parser_of, verb_names

EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def page() -> str:
    return manual("1.2.3", EPOCH)


def test_the_page_names_its_version_and_the_day_of_the_source(page: str) -> None:
    assert '.TH EDGE\\-RUNTIME 1 "2023-11-14" "edge\\-runtime 1.2.3" "User Commands"' in page


@pytest.mark.parametrize("verb", verb_names())
def test_every_verb_action_and_option_is_on_the_page(page: str, verb: str) -> None:
    for parser in parser_of(verb).all_parsers():
        assert f'.SS "{parser.prog}'.replace("-", "\\-") in page
        for option in parser.options():
            assert re.search(rf"^\.B .*{re.escape(option.replace('-', chr(92) + '-'))}\b", page, re.MULTILINE), option


def test_options_of_the_same_name_that_mean_different_things_are_both_explained(page: str) -> None:
    assert "control endpoint (default: <path>.control beside the first ipc; without one," in page
    assert "control endpoint (default: <path>.control beside an ipc one)" in page


def test_options_of_every_verb_are_explained_once(page: str) -> None:
    assert page.count(".B \\-\\-json") == 1
    assert page.count(".B \\-\\-connect E") == 1


def test_no_line_begins_as_a_request_to_roff_that_is_none(page: str) -> None:
    known = {".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".I", ".sp", ".nf", ".fi", ".nh", ".ad"}
    assert {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))} <= known
