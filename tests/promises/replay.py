"""Sends recorded messages by a door, and returns each reply without what may differ from run to run.

An error counts by its code and its fields, a counter by its name, a time not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from edge_runtime.config.settings import MetricsSettings
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.frigate.settings import FrigateSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, RawClient, frigate_url, grpc_url, http_url, online_daemon
from tests.fakes.broker import Broker
from tests.fakes.mqtt_peer import Peer
from tests.promises import messages

Known = list[Any] | None
"""The replies that were recorded, where a door may be silent: so that nothing waits for what will not come."""
VARYING = {"timing", "memory_bytes", "retry_after_ms", "message", "reason", "last_inference", "uptime_s", "mode"}
COUNTED = {"stats", "model_stats", "statistics", "counters", "settings"}
DEVICE = "promises"
IN_FLIGHT = 32
END = b"\0end"
QUIET_MS = 200
"""How long nothing comes after a message that seems not to be answered, while replies are recorded."""


@contextmanager
def daemon_here(folder: Path, broker: Broker) -> Iterator[Any]:
    """The daemon that the messages are meant for."""
    folder.mkdir(exist_ok=True)
    models = folder / "models"
    messages.write_models(models)
    with online_daemon(
        models,
        folder / "run",
        f"{broker.url}/{DEVICE}",
        # GET / was recorded as no path; with the page, on by itself here, it is one, of as many bytes as the page has.
        http=HttpSettings(endpoint=f"unix:{folder}/http.sock", page=False),
        grpc=GrpcSettings(endpoint=f"unix:{folder}/grpc.sock"),
        frigate=FrigateSettings(
            endpoint=f"ipc://{folder}/detector", models={"mapped.onnx": "finder"}, timeout_ms=60_000
        ),
        python_models=True,
        calibrate=False,
        metrics=MetricsSettings(port=0),
    ) as daemon:
        yield daemon


def plain(value: Any, name: str = "") -> Any:
    """The value without what may differ."""
    if isinstance(value, Mapping):
        if name in COUNTED:
            return sorted(map(str, value))
        return {str(key): plain(each, str(key)) for key, each in value.items() if key not in VARYING}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value


def text(data: bytes) -> str:
    """Bytes as text: short ones as they are, others by their hash."""
    return data.decode("latin-1") if len(data) <= 80 else f"{len(data)} bytes {hashlib.sha256(data).hexdigest()[:16]}"


def _error(value: Any) -> Any:
    """Open Inference Protocol: the error is a text beside its code."""
    return {**value, "error": "..."} if isinstance(value, dict) and isinstance(value.get("error"), str) else value


def _patience_ms(known: Known, index: int) -> int:
    if known is None:
        return QUIET_MS
    return int(ANSWER_S * 1e3) if known[index] else 0


# ---- one door each: message -> reply, alone -------------------------------------------------------------------------


def _zmq_reply(frames: list[bytes]) -> list[Any]:
    first, *rest = frames
    if not first:
        return ["", *_zmq_reply(rest)]  # a REQ's delimiter comes back
    head = json.loads(first) if first[:1] == b"{" else msgpack.unpackb(first)
    return [plain(head), *map(text, rest)]


def ask_zmq(daemon: Any, broker: Broker, recorded: list[list[str]], known: Known = None) -> Iterator[Any]:
    """Each message, and after it one that is answered at once; then no reply within QUIET_MS is a reply too."""
    with RawClient(daemon.endpoints[1]) as client:
        for index, message in enumerate(recorded):
            client.send(*(frame.encode("latin-1") for frame in message))
            client.send(msgpack.packb({"v": 1, "op": "live"}), END)
            replies, has_ended = [], False
            while not has_ended or (not replies and not client.is_silent(_patience_ms(known, index))):
                frames = client.receive()
                if frames[1:2] == [END]:
                    has_ended = True
                else:
                    replies.append(_zmq_reply(frames))
            yield replies


def ask_zmq_together(daemon: Any, broker: Broker, recorded: list[list[str]], known: Known = None) -> Iterator[Any]:
    """Many messages before the first answer is read. Replies come in any order, so each message has its own id."""
    with RawClient(daemon.endpoints[1]) as client:
        for start in range(0, len(recorded), IN_FLIGHT):
            batch = recorded[start : start + IN_FLIGHT]
            replies: dict[bytes, list[Any]] = {}
            for index, message in enumerate(batch):
                frames = [frame.encode("latin-1") for frame in message]
                replies[b"%d" % index] = []
                client.send(frames[0], b"%d" % index, *frames[2:])
            client.send(msgpack.packb({"v": 1, "op": "live"}), END)
            waiting = len(batch) + 1
            while waiting:
                frames = client.receive()
                waiting -= 1
                if frames[1] != END:
                    replies[frames[1]].append([*_zmq_reply(frames)[:1], *map(text, frames[2:])])
            yield from replies.values()


HEADERS = (
    "content-type",
    "inference-header-content-length",
    "allow",
    "connection",
    "www-authenticate",
    "content-encoding",
)


def ask_http(daemon: Any, broker: Broker, recorded: list[str], known: Known = None) -> Iterator[Any]:
    """Each on the connection of the one before, unless that ended."""
    url = http_url(daemon).replace("http+unix://", "unix:")
    connection = RawHttp(url)
    try:
        for message in recorded:
            data = message.encode("latin-1")
            connection.send(data)
            response = connection.response(data.split(b" ", 1)[0].decode())
            if response.status == 0 or response.headers.get("connection") == "close":
                connection.socket.close()
                connection = RawHttp(url)
            yield _http_reply(response)
    finally:
        connection.socket.close()


def _http_reply(response: Any) -> Any:
    headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
    length = headers.pop("inference-header-content-length", None)
    body: Any = response.body
    try:
        if length is not None:
            head, rest = body[: int(length)], body[int(length) :]
            return [response.status, headers, plain(_error(json.loads(head))), text(rest)]
        return [response.status, headers, plain(_error(json.loads(body)))]
    except ValueError:
        return [response.status, headers, text(body)]


SERVICE = "/inference.GRPCInferenceService"


def ask_grpc(daemon: Any, broker: Broker, recorded: list[list[str]], known: Known = None) -> Iterator[Any]:
    """Each as one call."""
    with grpc.insecure_channel(
        grpc_url(daemon).replace("grpc+unix://", "unix:"), [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        for method, message in recorded:
            call = channel.unary_unary(f"{SERVICE}/{method}")
            try:
                answer = call(message.encode("latin-1"), timeout=ANSWER_S)
            except grpc.RpcError as error:
                yield [error.code().name]
            else:
                kind = getattr(service_pb2, f"{method}Response")
                yield [
                    "OK",
                    plain(json_format.MessageToDict(kind.FromString(answer), preserving_proto_field_name=True)),
                ]


def ask_mqtt(daemon: Any, broker: Broker, recorded: list[list[str]], known: Known = None) -> Iterator[Any]:
    """Each as one publication with a response topic."""
    with Peer(broker.url) as peer:
        for topic, kind, payload in recorded:
            reply = peer.ask(
                f"edge/{DEVICE}/{topic}", payload.encode("latin-1"), **({"content_type": kind} if kind else {})
            )
            yield _mqtt_reply(reply)


def _mqtt_reply(reply: Any) -> Any:
    data = reply.payload
    body = json.loads(data) if data[:1] == b"{" else msgpack.unpackb(data)
    return [getattr(reply.properties, "ContentType", None), reply.qos, plain(body)]


def ask_frigate(daemon: Any, broker: Broker, recorded: list[list[str]], known: Known = None) -> Iterator[Any]:
    """Each as a detector sends it, on one connection."""
    with RawClient(frigate_url(daemon)) as client:
        for index, message in enumerate(recorded):
            client.send(b"", *(frame.encode("latin-1") for frame in message))
            yield [] if client.is_silent(_patience_ms(known, index)) else _frigate_reply(client.receive()[1:])


def _frigate_reply(frames: list[bytes]) -> Any:
    """A table of boxes by its first two rows."""
    return [_numbers(frame) if len(frame) == 480 else plain(_error(json.loads(frame))) for frame in frames]


def _numbers(table: bytes) -> list[str]:
    return [f"{value:.4g}" for value in np.frombuffer(table, np.float32)[:12]]
