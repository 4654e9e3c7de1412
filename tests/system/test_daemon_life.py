"""The daemon as a process: ready only when it can answer, told by signals, watched by systemd."""

from __future__ import annotations

import asyncio
import select
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgpack
import numpy as np
import pytest

from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.daemon_process import START_S, DaemonProcess
from tests.models import onnx_models
from tests.models.harmful_models import HARMFUL, looping

X = floats(1, 16).tobytes()


class SystemdSocket:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(START_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def wait_for(self, word: str) -> str:
        while True:
            text = self._socket.recv(4096).decode()
            if word in text:
                return text

    def drain(self) -> None:
        """Forget what was said so far."""
        while not self.is_silent(0.0):
            pass

    def is_silent(self, for_s: float) -> bool:
        """Whether nothing is said for so long."""
        if not select.select([self._socket], [], [], for_s)[0]:
            return True
        self._socket.recv(4096)
        return False


@pytest.fixture
def folder(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    put_model(tmp_path / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    return tmp_path


def test_systemd_learns_how_many_models_answer_as_they_come(folder):
    with SystemdSocket(folder) as systemd, DaemonProcess(folder, NOTIFY_SOCKET=systemd.path):
        systemd.wait_for("STATUS=2 of 2 model versions ready")
        put_model(folder / "models", "late", onnx_models.mlp)
        systemd.wait_for("STATUS=3 of 3 model versions ready")
        (folder / "models" / "broken" / "1").mkdir(parents=True)
        (folder / "models" / "broken" / "1" / "model.onnx").write_bytes(b"no model")
        systemd.wait_for("STATUS=3 of 4 model versions ready")


def test_systemd_gets_ready_watchdog_reload_and_stopping(folder):
    with SystemdSocket(folder) as systemd:
        environment = {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "500000"}
        with DaemonProcess(folder, **environment) as daemon:
            systemd.wait_for("READY=1")
            with RawClient(daemon.endpoint) as client:
                assert client.result("ready") is True
                assert client.ask(header(), b"1", X)[1] == b"1"
            systemd.wait_for("WATCHDOG=1")
            daemon.process.send_signal(signal.SIGHUP)
            systemd.wait_for("RELOADING=1")
            systemd.wait_for("READY=1")
            daemon.process.send_signal(signal.SIGTERM)
            systemd.wait_for("STOPPING=1")
            assert daemon.process.wait(START_S) == 0


def test_the_watchdog_is_fed_after_the_daemon_asked_its_own_models(folder):
    with SystemdSocket(folder) as systemd, DaemonProcess(
        folder, NOTIFY_SOCKET=systemd.path, WATCHDOG_USEC="200000"
    ) as daemon:  # fmt: skip
        systemd.wait_for("READY=1")
        with RawClient(daemon.endpoint) as client:
            models = {}
            while any(models.get(name, {}).get("runs", 0) < 2 for name in ("mlp", "queued")):
                systemd.wait_for("WATCHDOG=1")
                models = client.result("stats")["metrics"]["models"]
            assert [models[name]["requests"] for name in ("mlp", "queued")] == [0, 0]
        assert daemon.stop() == 0


def test_a_model_that_hangs_inside_starves_the_watchdog_though_the_daemon_still_talks(folder):
    # In a host, its run would be over its limit and be ended.
    toml = 'isolation = "never"\nmode = "workers"\ninstances = 1\n'
    put_model(folder / "models", "trap", onnx_models.trap, toml=toml)
    with SystemdSocket(folder) as systemd, DaemonProcess(
        folder, NOTIFY_SOCKET=systemd.path, WATCHDOG_USEC="300000"
    ) as daemon:  # fmt: skip
        systemd.wait_for("READY=1")
        with RawClient(daemon.endpoint) as client:
            client.ask(header("trap", (1, 2)), b"1", floats(1, 2).tobytes())
            client.send(header("trap", (1, 2)), b"2", (floats(1, 2) * 0 + 9).tobytes())
            wait_for(lambda: any("does not answer and never will" in message for message in daemon.messages()))
            assert client.result("live") is True
            systemd.drain()
            assert systemd.is_silent(1.0)


def test_sigterm_answers_what_was_admitted_and_exits_0(folder):
    with DaemonProcess(folder) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        client.ask(header("queued"), b"first", X)
        for index in range(200):
            client.send(header("queued"), b"%d" % index, X)
        client.receive()
        assert daemon.stop() == 0
        kinds = set()
        while not client.is_silent(200):
            fields = msgpack.unpackb(client.receive()[0])
            kinds.add(fields["error"]["code"] if "error" in fields else "answered")
        assert kinds <= {"answered", "draining"}
        assert daemon.log()[-1]["message"] == "stopped"
    assert not (folder / "i.sock").exists()


def ask_until(stopped: threading.Event, ask) -> Counter:
    """What becomes of one request after the other: "answer", or the name of an error."""
    found = Counter()
    while not stopped.is_set():
        try:
            ask()
        except (EdgeRuntimeError, ConnectionError) as error:
            # Nobody listens: told before it was sent, so nothing is lost.
            is_unsent = isinstance(error, ConnectionRefusedError) or "no daemon answers" in str(error)
            found["unsent" if is_unsent else type(error).__name__] += 1
        else:
            found["answer"] += 1
    return found


def ask_from_a_loop(endpoint: str, stopped: threading.Event) -> Counter:
    """As `ask_until`, by eight tasks of one AsyncClient that send again what a stopped daemon did not run."""

    async def ask_all() -> Counter:
        found = Counter()

        async def ask(client: AsyncClient, model: str) -> None:
            while not stopped.is_set():
                await client.infer(model, {"x": floats(1, 16)}, retry=True)
                found["answer"] += 1

        async with AsyncClient(endpoint) as client:
            await asyncio.gather(*(ask(client, model) for model in ("mlp", "queued") * 4))
        return found

    return asyncio.run(ask_all())


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_restart_under_load_leaves_no_request_without_exactly_one_answer_or_refusal(folder, transport):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}" if transport == "tcp" else f"ipc://{folder}/i.sock"
    arguments = ("--zmq", endpoint) if transport == "tcp" else ()
    stopped, inputs = threading.Event(), {"x": floats(1, 16)}
    with Client(endpoint) as plain, Client(endpoint) as retrying, Client(endpoint) as pipelined:
        asks = [
            partial(ask_until, stopped, partial(plain.infer, "mlp", inputs)),
            partial(ask_until, stopped, partial(plain.infer, "queued", inputs)),
            partial(ask_until, stopped, partial(retrying.infer, "queued", inputs, retry=True)),
            partial(ask_from_a_loop, endpoint, stopped),
        ]
        futures: list[Future] = []
        with ThreadPoolExecutor(len(asks)) as pool:
            try:
                with DaemonProcess(folder, *arguments) as daemon:
                    daemon.wait_ready()
                    plain.wait_ready(START_S)
                    asking = [pool.submit(each) for each in asks]
                    for _ in range(20):
                        futures += [pipelined.submit(model, inputs) for model in ("mlp", "queued") * 32]
                        futures[-64].result(ANSWER_S)
                    assert daemon.stop() == 0
                with DaemonProcess(folder, *arguments) as daemon:
                    daemon.wait_ready()
                    assert pipelined.infer("mlp", inputs).version == 1
                    stopped.set()
                    found = [each.result(START_S) for each in asking]
            finally:
                stopped.set()
    assert found[0].keys() | found[1].keys() <= {"answer", "Draining", "unsent"}
    assert found[2].keys() == found[3].keys() == {"answer"}
    kinds = Counter(type(future.exception(ANSWER_S)).__name__ for future in futures)
    assert kinds.keys() <= {"NoneType", "Draining"}
    assert kinds["NoneType"] > 10 * 64


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_restart_under_load_leaves_no_request_of_the_open_protocol_unanswered(folder, scheme):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stopped, inputs = threading.Event(), {"x": floats(1, 16)}
    with ExitStack() as clients, ThreadPoolExecutor(4) as pool:
        plain, other, retrying, own = (
            clients.enter_context(OipClient(f"{scheme}://127.0.0.1:{port}")) for _ in range(4)
        )
        asks = [
            partial(ask_until, stopped, partial(plain.infer, "mlp", inputs)),
            partial(ask_until, stopped, partial(other.infer, "queued", inputs)),
            partial(ask_until, stopped, partial(retrying.infer, "queued", inputs, retry=True)),
        ]
        try:
            with DaemonProcess(folder, f"--{scheme}", f"127.0.0.1:{port}") as daemon:
                daemon.wait_ready()
                own.wait_ready(START_S)
                asking = [pool.submit(each) for each in asks]
                for _ in range(200):
                    own.infer("queued", inputs, retry=True)
                assert daemon.stop() == 0
            with DaemonProcess(folder, f"--{scheme}", f"127.0.0.1:{port}") as daemon:
                daemon.wait_ready()
                for _ in range(200):
                    own.infer("queued", inputs, retry=True)
                stopped.set()
                found = [each.result(START_S) for each in asking]
        finally:
            stopped.set()
    assert found[0].keys() | found[1].keys() <= {"answer", "Draining", "unsent", "NotReady"}
    assert found[2].keys() == {"answer"}


def test_sigterm_ends_the_daemon_after_drain_s_though_a_run_never_ends(folder):
    put_model(folder / "models", "looping", looping, toml='mode = "workers"\n')
    (folder / "config.toml").write_text("drain_s = 1.0\ncalibrate = false\n")
    endless = HARMFUL["looping"].bad
    with DaemonProcess(folder, "--config", str(folder / "config.toml")) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        inputs = [{"name": name, "datatype": datatype, "shape": list(endless[name].shape)}
                  for name, datatype in (("x", "FP32"), ("times", "INT64"))]  # fmt: skip
        asked = msgpack.packb({"v": 1, "op": "infer", "model": "looping", "inputs": inputs, "timeout_ms": 300.0})
        client.send(asked, b"1", endless["x"].tobytes(), endless["times"].tobytes())
        assert msgpack.unpackb(client.receive()[0])["error"]["code"] == "deadline_exceeded"
        client.send(header("queued"), b"2", X)
        assert "error" not in msgpack.unpackb(client.receive()[0])

        assert daemon.stop() == 0


def test_sighup_takes_new_settings_and_a_broken_file_changes_nothing(folder):
    config = folder / "config.toml"
    config.write_text('drain_s = 5.0\n[log]\nlevel = "info"\n')
    with DaemonProcess(folder, "--config", str(config)) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        client.ask(header(), b"1", X)
        config.write_text("drain_s = 3.0\nstart_limit_s = 5.0\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "configuration reloaded" in daemon.messages())
        assert any("start_limit_s" in str(line.get("settings")) for line in daemon.log())
        config.write_text("drain_s = \n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "the configuration is as before" in daemon.messages())
        assert client.ask(header(), b"2", X)[1] == b"2"
        assert daemon.stop() == 0


def test_a_wrong_model_toml_is_logged_once_at_the_start_and_by_no_sighup(folder):
    wrong = put_model(folder / "models", "wrong", onnx_models.mlp, toml="thread = 1\n")
    with DaemonProcess(folder) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        client.ask(header(), b"1", X)
        for count in (1, 2):
            daemon.process.send_signal(signal.SIGHUP)
            wait_for(lambda count=count: daemon.messages().count("configuration reloaded") == count)
        (wrong.parent / "model.toml").write_text("threads = 1\n")
        wait_for(lambda: "model" in msgpack.unpackb(client.ask(header("wrong"), b"2", X)[0]))
        assert daemon.stop() == 0
        assert len([message for message in daemon.messages() if "unknown key 'thread'" in message]) == 1


def test_a_model_dropped_into_the_folder_is_served_without_a_restart(folder):
    with DaemonProcess(folder) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        client.ask(header(), b"1", X)
        put_model(folder / "models", "late", onnx_models.mlp)
        wait_for(lambda: "model" in msgpack.unpackb(client.ask(header("late"), b"2", X)[0]))
        assert daemon.stop() == 0


def test_a_broken_version_dropped_in_leaves_the_old_one_serving_over_a_restart_too(folder):
    with DaemonProcess(folder) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        client.ask(header(), b"1", X)
        broken = folder / "models" / "mlp" / "2"
        broken.mkdir()
        (broken / "model.onnx").write_bytes(b"rubbish")
        (folder / "models" / "no name").mkdir()
        wait_for(lambda: any("mlp version 2 is not loaded" in message for message in daemon.messages()))
        wait_for(lambda: any("no name" in message for message in daemon.messages()))
        assert msgpack.unpackb(client.ask(header(), b"2", X)[0])["version"] == 1
        assert daemon.stop() == 0
    with DaemonProcess(folder) as daemon, RawClient(daemon.endpoint) as client:
        daemon.wait_ready()
        assert msgpack.unpackb(client.ask(header(), b"3", X)[0])["version"] == 1
        assert daemon.stop() == 0


def test_killed_and_started_again_it_takes_its_endpoint_back(folder):
    with DaemonProcess(folder) as first, RawClient(first.endpoint) as client:
        first.wait_ready()
        client.ask(header(), b"1", X)
        first.process.kill()
        first.process.wait()
    with DaemonProcess(folder) as second, RawClient(second.endpoint) as client:
        second.wait_ready()
        assert client.ask(header(), b"2", X)[1] == b"2"
        assert second.stop() == 0


@needs_mosquitto
@pytest.mark.parametrize("qos", [0, 1])
def test_callers_over_mqtt_lose_nothing_and_get_no_error_when_it_is_killed_and_started_again(folder, tmp_path, qos):
    answers = SimpleQueue[int]()
    stop = threading.Event()
    with (
        Broker(tmp_path / "broker") as broker,
        MqttClient(f"{broker.url}/dev1", qos=qos) as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(number: int) -> None:
            x = floats(1, 16, seed=number)
            wanted = client.infer("queued", {"x": x})["y"]
            while not stop.is_set():
                np.testing.assert_allclose(client.infer("queued", {"x": x})["y"], wanted, rtol=1e-4, atol=1e-5)
                answers.put(number)

        callers = [pool.submit(ask, number) for number in range(8)]
        try:
            for _ in range(4):
                with DaemonProcess(folder, "--mqtt", f"{broker.url}/dev1"):  # killed at the end, under way as it is
                    had = Counter[int]()
                    while min(had[number] for number in range(8)) < 5:
                        had[answers.get(timeout=START_S)] += 1
                        assert not any(caller.done() for caller in callers)
        finally:
            stop.set()
            client.close()
        for caller in callers:
            with suppress(ConnectionError):  # of what was under way when the client was closed
                caller.result(START_S)


def test_a_wrong_setting_ends_with_status_2_and_one_sentence(folder):
    (folder / "config.toml").write_text("modles = 'x'\n")
    with DaemonProcess(folder, "--config", str(folder / "config.toml")) as daemon:
        assert daemon.process.wait(START_S) == 2
        text = (folder / "log").read_text()
    assert "modles" in text
    assert "models" in text
    assert "Traceback" not in text


def test_a_setting_that_only_a_start_shows_to_be_wrong_ends_with_status_2_as_well(folder):
    with DaemonProcess(folder, "--profile", "abacus") as daemon:
        assert daemon.process.wait(START_S) == 2
        text = (folder / "log").read_text()
    assert "abacus" in text
    assert "Traceback" not in text


def test_an_address_that_another_has_ends_with_status_1_so_that_it_is_tried_again(folder):
    with DaemonProcess(folder) as first, RawClient(first.endpoint) as client:
        first.wait_ready()
        client.ask(header(), b"1", X)
        with DaemonProcess(folder) as second:
            assert second.process.wait(START_S) == 1
        assert "another daemon serves" in (folder / "log").read_text()
        assert client.ask(header(), b"2", X)[1] == b"2"
        assert first.stop() == 0


def test_a_state_folder_that_another_has_ends_with_status_1_and_is_free_when_that_one_was_killed(folder):
    elsewhere = ("--control", f"{folder}/second.sock")
    with DaemonProcess(folder) as first, RawClient(first.endpoint) as client:
        first.wait_ready()
        client.ask(header(), b"1", X)
        with DaemonProcess(folder, *elsewhere) as second:
            assert second.process.wait(START_S) == 1
        assert "is another daemon's; give each a folder of its own (--state)" in (folder / "log").read_text()
        first.process.kill()
        first.process.wait()
    with DaemonProcess(folder, *elsewhere) as third, RawClient(third.endpoint) as client:
        third.wait_ready()
        client.ask(header(), b"2", X)
        assert third.stop() == 0


def wait_for(is_so) -> None:
    """Look until it is so; what is waited for takes about a second, the bound is a hang's."""
    end_s = time.monotonic() + ANSWER_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("tcp://0.0.0.0:0", "can be reached from other machines"),
        ("ipc://{folder}/a/b/i.sock", "is not there"),
        ("ipc://{folder}/models", "is not a socket"),
        ("udp://127.0.0.1:1", "wanted ipc:///path or tcp://address:port"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_before_models_are_loaded(folder, endpoint, told):
    with DaemonProcess(folder, "--zmq", endpoint.format(folder=folder)) as daemon:
        assert daemon.process.wait(START_S) == 2
        messages = daemon.messages()
    assert any(told in each for each in messages)
    assert "loaded" not in messages
