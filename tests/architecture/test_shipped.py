"""The table of what is shipped is made from the declarations in the source, and each of its rows leads to one."""

from __future__ import annotations

import pytest

from edge_runtime import plugins
from edge_runtime.shipped import SHIPPED
from tests.architecture import shipped_table
from tests.architecture.source_tree import parse

ROWS = [(kind, name) for kind in SHIPPED for name in plugins.names(kind)]


def test_the_table_holds_what_the_source_declares() -> None:
    assert shipped_table.PAGE.read_text() == shipped_table.text(), "run `python -m tests.architecture.shipped_table`"


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_each_row_leads_to_a_declaration_of_its_name(kind: str, name: str) -> None:
    assert plugins.declared(kind, name).name == name


def test_a_declaration_is_found_by_the_class_that_makes_it() -> None:
    source = 'HELLO = Verb("hello", "says so", "greetings.hello")\nBYE = Verb(name="bye", summary="", module="")'
    found = shipped_table.declarations([parse("edge_runtime.greetings", source), parse("tests.other", source)])
    assert found["verbs"] == {"bye": "edge_runtime.greetings:BYE", "hello": "edge_runtime.greetings:HELLO"}
