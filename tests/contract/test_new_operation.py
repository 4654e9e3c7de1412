"""A row and a handler are a whole operation: doors, clients, command line, completion and documents have it."""

from __future__ import annotations

import io
import json
import sys

import pytest

from edge_runtime import Client
from edge_runtime.cli.completion import script_for
from edge_runtime.cli.main import main
from edge_runtime.frontend.operations import OperationHandlers
from edge_runtime.wire.operations import MODEL, OPERATIONS, Operation, Parameter, Scope
from tests.architecture import operation_texts
from tests.contract.running_daemon import RawClient, error_code, op, put_model, running_daemon
from tests.models import onnx_models

ROW = Operation(
    "pin",
    Scope.CONTROL,
    "Pin a model.",
    (
        MODEL,
        Parameter("rows", int, "how many rows", is_required=True),
        Parameter("count", int, "how often", default=2, most=9),
    ),
    command="models pin",
)


def pin(self, call, model, rows, count):
    call.reply({"model": model, "rows": rows, "count": count})


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    monkeypatch.setitem(OPERATIONS, ROW.name, ROW)
    monkeypatch.setattr(OperationHandlers, ROW.name, pin, raising=False)
    scope = {"cast": lambda _, value: value, "Any": object}
    exec("class Made:\n" + operation_texts.methods("Client"), scope)  # the text that would be written
    monkeypatch.setattr(Client, ROW.name, scope["Made"].pin, raising=False)
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon:
        yield daemon


def test_every_door_answers_it_and_checks_its_scope_and_parameters(daemon):
    control, infer = daemon.endpoints
    with RawClient(control) as raw:
        result = {"model": "mlp", "rows": 7, "count": 2}
        assert raw.result("pin", model="mlp", parameters={"rows": 7}) == result
        assert raw.ask_json(op="pin", id=1, model="mlp", parameters={"rows": 7}) == {"id": 1, "result": result}
        for wrong in ({"rows": 7, "count": 10}, {"rows": "7"}, {"rows": None}, {}):
            assert error_code(raw.ask(op("pin", model="mlp", parameters=wrong), b"1")) == "decode_failed", wrong
    with RawClient(infer) as raw:
        assert error_code(raw.ask(op("pin", model="mlp"), b"1")) == "forbidden"


def test_clients_and_the_command_line_have_it(daemon, monkeypatch):
    control, infer = daemon.endpoints
    with Client(infer, control=control) as client:
        assert client.pin("mlp", 7, 3) == {"model": "mlp", "rows": 7, "count": 3}
    for words, shown in (
        (["--count", "4", "--json"], lambda text: json.loads(text) == {"model": "mlp", "rows": 7, "count": 4}),
        ([], lambda text: text.split() == ["model", "mlp", "rows", "7", "count", "2"]),
    ):
        monkeypatch.setattr(sys, "stdout", out := io.StringIO())
        assert main(["models", "pin", "mlp", "7", "--connect", infer, "--control", control, *words]) == 0
        assert shown(out.getvalue())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_and_documents_have_it(shell, monkeypatch):
    monkeypatch.setitem(OPERATIONS, ROW.name, ROW)
    script = script_for(shell)
    assert "pin" in script
    assert "--count" in script or "-l count" in script
    assert (
        "| `pin` | control | `model`, `rows`, `count`? | `edge-runtime models pin` | Pin a model. |"
        in operation_texts.table()
    )
