"""One daemon with every door open, and a way to ask the same of each: a model, arrays and options for arrays."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import error_from_wire
from edge_runtime.messages import InferResult
from edge_runtime.tensors import DATATYPES, Array, bf16_from_fp32, bf16_to_fp32, datatype_name
from tests.contract.running_daemon import ANSWER_S, RawClient, online_daemon
from tests.fakes.broker import Broker

Ask = Callable[..., InferResult]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket; connects again where the server closed it after an answer."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class OpenDoors:
    """A daemon and where each door is."""

    daemon: Daemon
    mqtt: str
    folder: Path

    @property
    def zmq(self) -> str:
        return self.daemon.endpoints[1]

    @property
    def http(self) -> str:
        return f"http+unix://{self.folder}/http.sock"

    @property
    def grpc(self) -> str:
        return f"grpc+unix://{self.folder}/grpc.sock"

    @contextmanager
    def asking(self, door: str) -> Iterator[Ask]:
        """Ask through one door: `ask(model, inputs, version=, outputs=, timeout_ms=, priority=)`."""
        with ASKED[door](self) as ask:
            yield ask


@contextmanager
def open_doors(models: Path, broker: Broker, folder: Path, device: str, **settings) -> Iterator[OpenDoors]:
    """Serve a folder of models through every door, once all of them answer."""
    folder.mkdir(exist_ok=True)
    url = f"{broker.url}/{device}"
    settings = {
        "http": HttpSettings(endpoint=f"unix:{folder}/http.sock"),
        "grpc": GrpcSettings(endpoint=f"unix:{folder}/grpc.sock"),
        **settings,
    }
    with online_daemon(models, folder, url, **settings) as daemon:
        yield OpenDoors(daemon, url, folder)


@contextmanager
def _by_client(client: Client | MqttClient | OipClient) -> Iterator[Ask]:
    with client:
        yield client.infer


@contextmanager
def _by_zmq_json(doors: OpenDoors) -> Iterator[Ask]:
    with RawClient(doors.zmq, zmq.REQ) as raw:

        def ask(model: str, inputs: Mapping[str, Array], **options) -> InferResult:
            fields = _json_fields(inputs, options)
            version = options.get("version")
            fields |= {"model": model, **({} if version is None else {"version": version})}
            (reply,) = raw.ask(json.dumps(fields).encode())
            return _json_result(json.loads(reply))

        yield ask


@contextmanager
def _by_http_json(doors: OpenDoors) -> Iterator[Ask]:
    connection = UnixConnection(f"{doors.folder}/http.sock")

    def ask(model: str, inputs: Mapping[str, Array], **options) -> InferResult:
        fields = _json_fields(inputs, options)
        if "outputs" in fields:
            fields["outputs"] = [{"name": name} for name in fields["outputs"]]
        version = options.get("version")
        path = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
        connection.request("POST", f"{path}/infer", json.dumps(fields))
        answer = connection.getresponse()
        return _json_result(json.loads(answer.read()))

    try:
        yield ask
    finally:
        connection.close()


ASKED: dict[str, Callable[[OpenDoors], object]] = {
    "zmq-frames": lambda doors: _by_client(Client(doors.zmq)),
    "zmq-json": _by_zmq_json,
    "mqtt": lambda doors: _by_client(MqttClient(doors.mqtt)),
    "http-json": _by_http_json,
    "http-binary": lambda doors: _by_client(OipClient(doors.http)),
    "grpc": lambda doors: _by_client(OipClient(doors.grpc)),
}


def _json_fields(inputs: Mapping[str, Array], options: Mapping[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {
        "inputs": [
            {
                "name": name,
                "datatype": datatype_name(array.dtype),
                "shape": array.shape,
                "data": _json_data(array),
            }
            for name, array in inputs.items()
        ]
    }
    if options.get("outputs") is not None:
        fields["outputs"] = options["outputs"]
    parameters = {name: options[name] for name in ("timeout_ms", "priority") if options.get(name) is not None}
    return {**fields, **({"parameters": parameters} if parameters else {})}


def _json_data(array: Array) -> list[object]:
    if array.dtype.kind == "O":
        return [each.decode() if isinstance(each, bytes) else each for each in array.reshape(-1)]
    if array.dtype.name == "bfloat16":
        return bf16_to_fp32(array.view(np.uint16)).reshape(-1).tolist()
    return array.reshape(-1).tolist()


def _json_result(reply: dict) -> InferResult:
    """The arrays of a JSON answer. Raises the error that it is."""
    if "error" in reply:
        told = reply["error"] if isinstance(reply["error"], dict) else {**reply, "message": reply["error"]}
        raise error_from_wire(told["code"], told["message"], told.get("retry_after_ms"))
    outputs = {}
    for each in reply["outputs"]:
        if each["datatype"] == "BYTES":
            array = np.array([text.encode() for text in each["data"]], dtype=object)
        elif each["datatype"] == "BF16":
            array = bf16_from_fp32(np.array(each["data"], np.float32))
        else:
            array = np.array(each["data"], dtype=DATATYPES[each["datatype"]].dtype)
        outputs[each["name"]] = array.reshape(each["shape"])
    return InferResult(reply["model_name"], int(reply["model_version"]), outputs)
