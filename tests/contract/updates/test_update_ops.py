"""The ops of updates on a real daemon's endpoints, with an updater that does what the test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest

from edge_runtime import AsyncClient, Client
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, Forbidden, Unsupported, UpdateError
from edge_runtime.operations import OPERATIONS, Scope
from tests.contract.running_daemon import ANSWER_S, RawClient, error_code, op, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.fakes.updates import ENTRY, STATUS, FakeUpdates, checked, offered

UPDATE_OPS = sorted(name for name, row in OPERATIONS.items() if row.is_update)
CONTROL_OPS = [name for name in UPDATE_OPS if OPERATIONS[name].scope is Scope.CONTROL]


@pytest.fixture(scope="module")
def updates() -> FakeUpdates:
    return FakeUpdates()


@pytest.fixture(scope="module")
def daemon(updates: FakeUpdates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("updates")
    (folder / "models").mkdir()
    with running_daemon(folder / "models", folder / "run", updates=updates) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    control, infer = daemon.endpoints
    with Client(infer, control=control) as client:
        yield client


def answer_one(updates: FakeUpdates, result: Any) -> Callable[[], tuple[str, ...]]:
    """Answers the next order from another thread; what is returned waits for it and tells what was ordered."""
    found: list[tuple[str, ...]] = []

    def answer() -> None:
        order = updates.orders.get(timeout=ANSWER_S)
        found.append(order.words)
        order.done(result)

    thread = threading.Thread(target=answer)
    thread.start()

    def words() -> tuple[str, ...]:
        thread.join()
        return found[0]

    return words


def refused(endpoint: str, name: str, **fields: Any) -> dict[str, Any]:
    with RawClient(endpoint) as raw:
        frames = raw.ask(op(name, **fields), b"7")
    error_code(frames)
    assert frames[1] == b"7"
    error: dict[str, Any] = msgpack.unpackb(frames[0])["error"]
    return error


def test_every_endpoint_reports_what_runs_and_what_happened(daemon: Daemon, updates: FakeUpdates) -> None:
    for endpoint in daemon.endpoints:
        with RawClient(endpoint) as raw:
            assert raw.result("update_status") == STATUS
            assert raw.result("update_history") == [ENTRY]
            assert raw.result("update_history", parameters={"count": 3}) == [ENTRY]
            assert raw.ask_json(op="update_status", id=1) == {"id": 1, "result": STATUS}
            assert raw.result("stats")["update"] == STATUS
    assert updates.counts == [50, 3, 50, 3]


@pytest.mark.parametrize("name", CONTROL_OPS)
def test_an_operation_that_changes_something_is_forbidden_elsewhere(
    name: str, daemon: Daemon, updates: FakeUpdates
) -> None:
    error = refused(daemon.endpoints[1], name, model="digits", parameters={"folder": "/media/stick"})
    assert error["code"] == "forbidden"
    assert updates.orders.empty()


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        ("update_status", {"parameters": {"cuont": 1}}, "update_status does not know 'cuont'; wanted none"),
        ("update_history", {"parameters": {"n": 1}}, "wanted count"),
        ("update_history", {"parameters": {"count": "many"}}, "count: got str, wanted int"),
        ("update_history", {"parameters": {"count": True}}, "count: got bool"),
        ("update_history", {"parameters": {"count": 0}}, "count: got 0, wanted 1 to 1000"),
        ("update_history", {"parameters": {"count": 1 << 62}}, "wanted 1 to 1000"),
        ("update_check", {"parameters": {"folder": "/x"}}, "update_check does not know 'folder'"),
        ("update_apply", {"parameters": {"url": "http://evil"}}, "update_apply does not know 'url'"),
        ("update_import", {}, "folder: got '', wanted the whole path"),
        ("update_import", {"parameters": {"folder": 7}}, "folder: got int, wanted str"),
        ("update_import", {"parameters": {"folder": "stick"}}, "folder: got 'stick', wanted the whole path"),
        ("update_import", {"parameters": {"folder": "/a\0b"}}, "wanted the whole path"),
        ("update_rollback", {}, "update_rollback wants a model"),
        ("update_rollback", {"model": "digits", "parameters": {"to": 1}}, "does not know 'to'; wanted none"),
    ],
)
def test_wrong_parameters_are_refused_with_what_was_wanted(
    name: str, fields: dict[str, Any], complaint: str, daemon: Daemon, updates: FakeUpdates
) -> None:
    error = refused(daemon.endpoints[0], name, **fields)
    assert error["code"] == DecodeFailed.code
    assert complaint in error["message"]
    assert updates.orders.empty()


def test_a_long_parameter_gives_a_short_complaint(daemon: Daemon) -> None:
    error = refused(daemon.endpoints[0], "update_import", parameters={"folder": "x" * 50_000})
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.update_check(), ("check",)),
        (lambda client: client.update_apply(), ("apply",)),
        (lambda client: client.update_import("/media/stick"), ("import", "/media/stick")),
        (lambda client: client.update_import(Path("stick")), ("import", f"{Path.cwd()}/stick")),
        (lambda client: client.update_rollback("digits"), ("roll back", "digits")),
    ],
    ids=["check", "apply", "import", "import beside", "rollback"],
)
def test_an_order_reaches_the_updater_and_its_result_the_client(
    call: Callable[[Any], Any], words: tuple[str, ...], daemon: Daemon, client: Client, updates: FakeUpdates
) -> None:
    result = checked(offered("installed"))
    ordered = answer_one(updates, result)
    assert call(client) == result
    assert ordered() == words

    async def ask() -> Any:
        control, infer = daemon.endpoints
        async with AsyncClient(infer, control=control) as asynchronous:
            return await call(asynchronous)

    ordered = answer_one(updates, result)
    assert asyncio.run(ask()) == result
    assert ordered() == words


def test_each_client_reads_status_and_history(daemon: Daemon, client: Client, updates: FakeUpdates) -> None:
    async def ask() -> Any:
        async with AsyncClient(daemon.endpoints[1]) as asynchronous:
            return await asynchronous.update_status(), await asynchronous.update_history(7)

    updates.counts.clear()
    assert (client.update_status(), client.update_history()) == (STATUS, [ENTRY])
    assert asyncio.run(ask()) == (STATUS, [ENTRY])
    assert updates.counts == [50, 7]


def test_a_refusal_of_the_updater_is_the_clients_error(client: Client, updates: FakeUpdates) -> None:
    ordered = answer_one(updates, UpdateError("no release of 'nobody' is active here"))
    with pytest.raises(EdgeRuntimeError, match="no release of 'nobody'") as caught:
        client.update_rollback("nobody")
    assert caught.value.code == "update_failed"
    assert ordered() == ("roll back", "nobody")


def test_while_an_order_runs_everything_else_is_answered(client: Client, updates: FakeUpdates) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.update_apply)
        order = updates.orders.get(timeout=ANSWER_S)
        try:
            assert client.update_status() == STATUS
            assert client.models() == []
            assert not waiting.done()
        finally:
            order.done(checked())
        assert waiting.result(ANSWER_S) == checked()


def test_a_client_that_has_left_does_not_disturb_its_order(client: Client, updates: FakeUpdates) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.update_apply)
        order = updates.orders.get(timeout=ANSWER_S)
        client.close()
        with pytest.raises(ConnectionError):
            waiting.result(ANSWER_S)
    order.done(checked())


def test_a_daemon_without_updates_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as raw:
        assert raw.result("stats")["update"] is None
        for name in UPDATE_OPS:
            error = refused(daemon.endpoints[0], name)
            assert error["code"] == Unsupported.code
            assert "add [update]" in error["message"]


@needs_mosquitto
def test_over_mqtt_a_device_reports_but_takes_no_orders(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    updates = FakeUpdates()
    with Broker(tmp_path) as broker:
        mqtt = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05)
        with (
            running_daemon(tmp_path / "models", tmp_path / "run", mqtt=mqtt, updates=updates),
            MqttClient(f"{broker.url}/dev1") as client,
        ):
            client.wait_ready(ANSWER_S)
            assert client.update_status() == STATUS
            assert client.update_history(5) == [ENTRY]
            with Peer(broker.url) as peer:
                for name in CONTROL_OPS:
                    order = {"op": name, "model": "digits", "parameters": {"folder": "/media/stick"}}
                    reply = json.loads(peer.ask("edge/dev1/infer", json.dumps(order)).payload)
                    assert reply["error"]["code"] == Forbidden.code
    assert updates.counts == [5]
    assert updates.orders.empty()
