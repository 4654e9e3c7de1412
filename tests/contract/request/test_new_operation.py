"""A row and a handler are a whole operation: doors, clients, command line, completion and documents have it."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

from edge_runtime import AsyncClient, Client, MqttClient, OipClient, operations
from edge_runtime.cli.completion import script_for
from edge_runtime.cli.main import main
from edge_runtime.client.blocking_client import BlockingClient, ControllingClient
from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.operations import MODEL, OPERATIONS, Operation, Parameter, Scope
from edge_runtime.request.operation_handlers import OperationCall, OperationHandlers
from tests.architecture import operation_texts
from tests.contract.open_doors import open_doors
from tests.contract.running_daemon import RawClient, error_code, op, put_model
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

ROWS = Parameter("rows", int, "how many rows", is_required=True)
COUNT = Parameter("count", int, "how often", default=2, most=9)
PIN = Operation("pin", Scope.CONTROL, "Pin a model.", (MODEL, ROWS, COUNT), command="models pin")
WEIGH = Operation("weigh", Scope.INFER, "Weigh a model.", (MODEL, ROWS, COUNT), command="models weigh")
ADDED = (PIN, WEIGH)

PAGE = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW_OF_PAGE, HANDLER_OF_PAGE = re.findall(r"```python\n(.*?)```", PAGE.partition("## Add an operation")[2], re.DOTALL)
QUEUE = eval(textwrap.dedent(ROW_OF_PAGE), vars(operations))


def answer(self, call, model, rows, count):
    call.reply({"model": model, "rows": rows, "count": count})


@pytest.fixture(scope="module")
def added():
    """Both operations: their rows, their handlers, and what operation_texts would write into the clients."""
    with pytest.MonkeyPatch.context() as patch:
        for row in ADDED:
            patch.setitem(OPERATIONS, row.name, row)
            patch.setattr(OperationHandlers, row.name, answer, raising=False)
        patch.setitem(OPERATIONS, QUEUE.name, QUEUE)
        page = {"OperationCall": OperationCall}
        exec(textwrap.dedent(HANDLER_OF_PAGE), page)
        patch.setattr(OperationHandlers, QUEUE.name, page[QUEUE.name], raising=False)
        for owner, scope, path in (
            (BlockingClient, Scope.INFER, operation_texts.BLOCKING),
            (ControllingClient, Scope.CONTROL, operation_texts.BLOCKING),
            (AsyncClient, Scope.INFER, operation_texts.CLIENTS[1]),
            (AsyncClient, Scope.CONTROL, operation_texts.CLIENTS[1]),
        ):
            names = {"cast": lambda _, value: value, "Any": object}
            exec(f"class Made:\n{operation_texts.methods(scope, path)}", names)
            for row in (each for each in (*ADDED, QUEUE) if each.scope is scope):
                patch.setattr(owner, row.name, getattr(names["Made"], row.name), raising=False)
        yield


@pytest.fixture(scope="module")
def doors(added, broker, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "new") as doors:
        yield doors


@needs_mosquitto
@pytest.mark.parametrize("row", ADDED, ids=lambda row: row.name)
def test_zmq_answers_it_and_checks_its_scope_and_parameters(doors, row):
    control, infer = doors.daemon.endpoints
    with RawClient(control) as raw:
        result = {"model": "mlp", "rows": 7, "count": 2}
        assert raw.result(row.name, model="mlp", parameters={"rows": 7}) == result
        assert raw.ask_json(op=row.name, id=1, model="mlp", parameters={"rows": 7}) == {"id": 1, "result": result}
        for wrong in ({"rows": 7, "count": 10}, {"rows": "7"}, {"rows": None}, {}):
            assert error_code(raw.ask(op(row.name, model="mlp", parameters=wrong), b"1")) == "decode_failed", wrong
    with RawClient(infer) as raw:
        refused = raw.ask(op(row.name, model="mlp", parameters={"rows": 7, "count": 10}), b"1")
        assert error_code(refused) == ("forbidden" if row.scope is Scope.CONTROL else "decode_failed")


@pytest.mark.smoke
@needs_mosquitto
def test_every_client_has_it(doors):
    control, infer = doors.daemon.endpoints
    told = {"model": "mlp", "rows": 7, "count": 3}

    async def ask():
        async with AsyncClient(infer, control=control) as client:
            return [await client.pin("mlp", 7, 3), await client.weigh("mlp", 7, 3)]

    assert asyncio.run(ask()) == [told, told]
    with Client(infer, control=control) as client:
        assert [client.pin("mlp", 7, 3), client.weigh("mlp", 7, 3)] == [told, told]
    with MqttClient(doors.mqtt) as client:
        assert client.weigh("mlp", 7, 3) == told
        with pytest.raises(DecodeFailed, match="count: got 10"):
            client.weigh("mlp", 7, 10)
        assert not hasattr(client, "pin")  # it changes something
    for url in (doors.http, doors.grpc):
        with OipClient(url) as client:
            for method in (client.pin, client.weigh):
                with pytest.raises(Unsupported, match=f"has no {method.__name__}"):
                    method("mlp", 7, 3)


@needs_mosquitto
@pytest.mark.parametrize("row", ADDED, ids=lambda row: row.name)
def test_the_command_line_has_it(doors, row, monkeypatch):
    control, infer = doors.daemon.endpoints
    ways = [["--connect", infer, "--control", control]]
    ways += [["--connect", doors.mqtt]] if row.scope is Scope.INFER else []
    for way in ways:
        for words, shown in (
            (["--count", "4", "--json"], lambda text: json.loads(text) == {"model": "mlp", "rows": 7, "count": 4}),
            ([], lambda text: text.split() == ["model", "mlp", "rows", "7", "count", "2"]),
        ):
            monkeypatch.setattr(sys, "stdout", out := io.StringIO())
            assert main(["models", row.name, "mlp", "7", *way, *words]) == 0
            assert shown(out.getvalue())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_and_documents_have_it(added, shell):
    script = script_for(shell)
    assert "--count" in script or "-l count" in script
    for row in ADDED:
        assert row.name in script
        assert (
            f"| `{row.name}` | {row.scope.value} | `model`, `rows`, `count`? | `edge-runtime models {row.name}` | "
            f"{row.summary} |" in operation_texts.table()
        )


@needs_mosquitto
def test_the_operation_that_the_architecture_page_adds_is_one(doors, capsys):
    assert main(["models", QUEUE.name, "mlp", "--json", "--connect", doors.daemon.endpoints[1]]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 0, "bytes": 0}
