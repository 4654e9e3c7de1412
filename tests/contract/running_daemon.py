"""A real daemon in this process on sockets in a temporary folder, and a client that speaks raw frames to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import zmq

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.telemetry.host import HostProbe
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)
from tests.fakes.updates import FakeUpdates
from tests.models import python_models

ANSWER_S = 60.0
"""How long a reply may take before the test fails: far above anything but a hang."""


@contextmanager
def running_daemon(
    models: Path, folder: Path, *, updates: FakeUpdates | None = None, host: HostProbe | None = None, **settings
) -> Iterator[Daemon]:
    """Start, yield, stop. `settings` are Config's; zmq endpoints default to one below `folder`.

    updates: what stands for the updater. host: reads this machine's sensors.
    """
    folder.mkdir(exist_ok=True)
    settings.setdefault("start_limit_s", 5 * ANSWER_S)  # it serves when all is loaded, however busy the machine is
    settings.setdefault("zmq", ZmqSettings(endpoints=(f"ipc://{folder}/infer.sock",)))
    config = configured(models=str(models), state=str(folder / "state"), **settings)
    core = assemble_core(config)
    if updates is not None:
        core.updates = updates
    daemon = assemble_daemon(config, core, host=host)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def http_url(daemon: Daemon) -> str:
    """The first address of its HTTP door."""
    return daemon.doors["http"].endpoints[0]


def grpc_url(daemon: Daemon) -> str:
    """The first address of its gRPC door."""
    return daemon.doors["grpc"].endpoints[0]


def frigate_url(daemon: Daemon) -> str:
    """The address of its door for detectors."""
    return daemon.doors["frigate"].endpoint


@contextmanager
def online_daemon(models: Path, folder: Path, url: str, **settings) -> Iterator[Daemon]:
    """A daemon that is asked over MQTT too, once it answers there: what connects later seems to be left by a test.

    url: of the broker, with the device's name.
    """
    from edge_runtime.doors.mqtt.client import MqttClient  # converters' tests run where there is no paho

    mqtt = settings.pop("mqtt", None) or MqttSettings(url=url, reconnect_min_s=0.05)
    with running_daemon(models, folder, mqtt=mqtt, **settings) as daemon:
        with MqttClient(url) as client:
            client.wait_ready(ANSWER_S)
        yield daemon


def put_model(models: Path, name: str, maker, version: int = 1, toml: str = "", **options) -> Path:
    """Make a model into `<models>/<name>/<version>/`, whole at once."""
    folder = models / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    maker(folder, **options)
    if toml:
        (models / name / "model.toml").write_text(toml)
    return folder


def put_held_model(models: Path, gate: Path | str, toml: str = "") -> None:
    """Put `held`, whose runs wait for the gate, one by one; x FP32 [rows, 1] -> y the same.

    gate: a file; `{value}` in it is the first value of x. The runs have no limit that a slow machine could meet.
    """
    body = f"while not os.path.exists(f{str(gate)!r}):\n    time.sleep(0.002)"
    toml = f"batch = false\n{toml}[limits]\nrun_limit_ms = 600_000\n"
    put_model(models, "held", python_models.on_first_value, body=body, toml=toml)


def header(model="mlp", shape=(1, 16), **fields) -> bytes:
    """A request header for a model with one FP32 input."""
    inputs = fields.pop("inputs", [{"name": "x", "datatype": "FP32", "shape": list(shape)}])
    return msgpack.packb({"v": 1, "op": "infer", "model": model, "inputs": inputs, **fields})


def op(name: str, **fields) -> bytes:
    """A header of another op."""
    return msgpack.packb({"v": 1, "op": name, **fields})


class RawClient:
    """A DEALER (or REQ) that sends frames as they are told. Use as a context manager."""

    def __init__(
        self, endpoint: str, kind: int = zmq.DEALER, identity: bytes | None = None, *, reads_all: bool = False
    ) -> None:
        """reads_all: libzmq reads every reply at once, and not only the first thousand until one is received."""
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.set(zmq.LINGER, 0)
        if identity is not None:
            self.socket.set(zmq.ROUTING_ID, identity)
        if reads_all:
            self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.context.destroy(linger=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> list[bytes]:
        assert self.socket.poll(ANSWER_S * 1e3), "no reply came"
        return self.socket.recv_multipart()

    def ask(self, *frames: bytes) -> list[bytes]:
        self.send(*frames)
        return self.receive()

    def ask_json(self, **fields):
        return json.loads(self.ask(json.dumps(fields).encode())[0])

    def result(self, name: str, **fields):
        reply = msgpack.unpackb(self.ask(op(name, **fields), b"")[0])
        assert "result" in reply, reply
        return reply["result"]

    def is_silent(self, milliseconds: int = 0) -> bool:
        return not self.socket.poll(milliseconds)


def error_code(frames: list[bytes]) -> str:
    """The code of an error reply; fails when it is none."""
    fields = msgpack.unpackb(frames[0])
    assert "error" in fields, fields
    assert set(fields["error"]) <= {"code", "message", "retryable", "retry_after_ms"}
    assert fields["error"]["message"]
    return fields["error"]["code"]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def replace_model(folder: Path, maker, **options) -> None:
    """Replace a version's files whole, as a careful copy would."""
    part = folder.with_name(folder.name + ".part")
    part.mkdir()
    maker(part, **options)
    shutil.rmtree(folder)
    part.rename(folder)
