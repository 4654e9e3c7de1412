"""Connections that bring nothing: each door has a bound of them, and the daemon never runs out of descriptors."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

X = floats(1, 16).tobytes()
DESCRIPTORS = 320
"""Less than a user's usual 1 024, so that fewer connections will do."""
IDLE = DESCRIPTORS + 100
TOLD = {
    "zmq": "connections_closed_full",
    "memory": "memory_refused",
    "http": "http_connections_closed_idle",
}
"""The counter that tells of closed connections, by door."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "hosted", onnx_models.mlp, toml='isolation = "always"\n')
    config = f"""[http]
endpoint = "127.0.0.1:0"
[grpc]
endpoint = "127.0.0.1:0"
[frigate]
endpoint = "ipc://{folder}/frigate.sock"
models = {{ "mlp" = "mlp" }}
"""
    with DaemonProcess(folder, "--zmq", "tcp://127.0.0.1:*", config=config, descriptors=DESCRIPTORS) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture(autouse=True)
def many_files():
    """Let this process hold the idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def place_of(daemon, door: str) -> tuple[socket.AddressFamily, socket.SocketKind, object]:
    """Family, kind and address of a door's socket."""
    path = daemon.endpoint.removeprefix("ipc://")
    paths = {"ipc": path, "control": f"{path}.control", "memory": f"{path}.memory"}
    paths["frigate"] = f"{Path(path).parent}/frigate.sock"
    if door in paths:
        return socket.AF_UNIX, socket.SOCK_SEQPACKET if door == "memory" else socket.SOCK_STREAM, paths[door]
    addresses = {"http": daemon.address, "grpc": daemon.address, "tcp": lambda _: daemon.address("ready").split()[-1]}
    host, _, port = addresses[door](door).rpartition("/")[2].rpartition(":")
    return socket.AF_INET, socket.SOCK_STREAM, (host, int(port))


def hold(stack: contextlib.ExitStack, place, meanwhile) -> None:
    """Open idle connections until the stack ends; one that is not taken at once waits, or is tried no more."""
    family, kind, address = place
    for index in range(IDLE):
        each = stack.enter_context(socket.socket(family, kind))
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            each.connect(address)
        if not index % 10:
            meanwhile()


@pytest.mark.parametrize("door", ["ipc", "tcp", "control", "frigate", "memory", "http", "grpc"])
def test_idle_connections_to_one_door_end_nothing_and_leave_descriptors(daemon, door):
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(RawClient(daemon.endpoint))

        def answers():
            assert good.ask(header(), b"", X)[1] == b""
            assert psutil.Process(daemon.process.pid).num_fds() < DESCRIPTORS

        answers()
        hold(stack, place_of(daemon, door), answers)
        answers()
        # Others still come: to this door, or at least to the control endpoint, and files and hosts still open.
        with RawClient(daemon.endpoint) as late, RawClient(f"{daemon.endpoint}.control") as control:
            assert late.ask(header("hosted"), b"late", X)[1] == b"late"
            assert control.result("models")
            told = TOLD.get(door, TOLD["zmq"])
            end_s = time.monotonic() + ANSWER_S
            while door != "grpc" and not control.result("stats")["metrics"]["counters"].get(told):
                assert time.monotonic() < end_s, f"{told} was not counted"
        with RawHttp(daemon.address("http")) as web:
            assert web.ask("GET", "/v2/health/ready").status == 200


def test_closed_connections_are_logged(daemon):
    assert "closed silent connections: there are as many as there may be" in daemon.messages()
    assert not [each for each in daemon.messages() if "descriptor" in each or "Too many open files" in each]


def test_clients_that_are_silent_after_one_message_give_way_to_new_ones(daemon):
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(RawClient(daemon.endpoint))
        for index in range(2 * DESCRIPTORS // 4):
            each = stack.enter_context(RawClient(daemon.endpoint))
            each.send(header(), b"once", X)
            assert busy.ask(header(), b"%d" % index, X)[1] == b"%d" % index
        with RawClient(daemon.endpoint) as late:
            end_s = time.monotonic() + ANSWER_S
            while time.monotonic() < end_s:  # it connects by itself until it is let in
                late.send(header(), b"late", X)
                busy.ask(header(), b"busy", X)
                if not late.is_silent(100):
                    break
            else:
                raise AssertionError("no place was made for a new client")


def test_a_child_process_may_open_as_many_files_as_programs_expect(tmp_path):
    put_model(tmp_path / "models", "hosted", onnx_models.mlp, toml='isolation = "always"\n')
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        process = psutil.Process(daemon.process.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
        children = process.children(recursive=True)
        assert children
        assert {each.rlimit(psutil.RLIMIT_NOFILE)[0] for each in children} == {min(1024, hard)}


def test_a_daemon_that_may_open_too_few_files_says_so(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with DaemonProcess(tmp_path, descriptors=64) as daemon:
        assert daemon.process.wait(60) == 2
        [told] = daemon.messages()
    assert "may open 64 files" in told
    assert "ulimit -n" in told
