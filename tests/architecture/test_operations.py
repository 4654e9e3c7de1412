"""The table of operations is the only place beside a handler: clients, command line and documents follow it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from edge_runtime import plugins
from edge_runtime.cli.main import parser_of, verb_names
from edge_runtime.operations import OPERATIONS
from edge_runtime.request.operation_handlers import OperationHandlers
from tests.architecture import operation_texts


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_row_has_a_handler_that_takes_its_parameters(name: str) -> None:
    wanted = [each.name for each in OPERATIONS[name].parameters]
    if name in plugins.names("operations"):
        declaration = plugins.declared("operations", name)
        asked = "door" if declaration.door else "table"
        assert list(inspect.signature(plugins.named(declaration.answer)).parameters) == [asked, *wanted]
    else:
        handler = inspect.signature(getattr(OperationHandlers, name))
        assert list(handler.parameters) == ["self", "call", *wanted]


def test_each_handler_has_a_row() -> None:
    handlers = {name for name, _ in inspect.getmembers(OperationHandlers, inspect.isfunction) if name[0] != "_"}
    assert handlers - {"answer"} == set(OPERATIONS) - set(plugins.names("operations"))


@pytest.mark.parametrize("path", [*operation_texts.CLIENTS, operation_texts.PAGE])
def test_each_text_made_from_the_table_is_up_to_date(path: str) -> None:
    is_current = Path(operation_texts.ROOT, path).read_text() == operation_texts.texts()[path]
    assert is_current, "run `python -m tests.architecture.operation_texts`"


@pytest.mark.parametrize("name", [name for name, row in OPERATIONS.items() if row.command])
def test_each_command_of_the_table_is_an_action_of_the_command_line(name: str) -> None:
    verb, _, action = OPERATIONS[name].command.partition(" ")
    assert verb in verb_names(), f"{verb} is not a verb with actions; see 'Add an operation' in docs/architecture.md"
    assert not action or f"edge-runtime {verb} {action}" in [parser.prog for parser in parser_of(verb).all_parsers()]
