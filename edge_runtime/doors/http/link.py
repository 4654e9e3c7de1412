"""Carries calls of the Open Inference Protocol over HTTP/1.1: kept connections, one call at a time on each.

Owns: the connections, heads and bodies of messages, tensors in binary both ways. The standard library reads and writes
HTTP. Thread: any; each call has a connection to itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPMessage
from typing import Any, NamedTuple
from urllib.parse import quote

from edge_runtime.client import forks
from edge_runtime.client.in_flight import NotBack, closed, closed_before_answer, no_reply
from edge_runtime.doors.open_inference.client_call import (
    OipCall,
    OipQuestion,
    OipReplies,
    OipReply,
    OipTensor,
    server_error,
)
from edge_runtime.doors.open_inference.oip import ANSWER
from edge_runtime.doors.open_inference.url import OipAccess, OipAddress
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.telemetry.tracing import TRACEPARENT
from edge_runtime.wire.json_codec import array_to_json, dumps

HEAD_LENGTH = "Inference-Header-Content-Length"
JOIN_BELOW = 64 << 10
"""Tensors up to here go in one piece with the head: a copy costs less than a second packet."""

_STATUS_CODES = {
    400: "tensor_mismatch", 401: "unauthenticated", 403: "forbidden", 404: "model_not_found", 408: "deadline_exceeded",
    413: "tensor_mismatch", 429: "queue_full", 499: "cancelled", 500: "run_failed", 501: "unsupported",
    503: "not_ready", 504: "deadline_exceeded",
}  # fmt: skip
"""Codes of answers that name none, as those of other products."""


class _Message(NamedTuple):
    method: str
    path: str
    body: Sequence[Any] = ()
    headers: Mapping[str, str] = {}


class HttpLink:
    """Connections to one server; made when they are needed, kept for the next call."""

    def __init__(self, access: OipAccess) -> None:
        self._address = access.address
        self._tls = _tls(access) if access.address.is_tls else None
        self._headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        self._lock = threading.RLock()  # a signal's handler may call in the middle of a call
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._is_closed = False
        self._has_answered = False
        self._forks = forks.count

    def infer(self, request: OipCall, wait_s: float) -> OipReply:
        """Run a model."""
        return _answer(*self._send(_infer_message(request), wait_s))

    def stream(self, request: OipCall, wait_s: float, *, is_whole: bool) -> OipReplies:
        """Run a model by `generate_stream`, whose events have outputs by name alone."""
        end_s = time.monotonic() + wait_s if is_whole else math.inf
        connection, response = self._sent(_generate_message(request), wait_s)
        return _Events(self, connection, response, request, wait_s, end_s)

    def ask(self, question: OipQuestion, wait_s: float) -> Any:
        """Return the fields of an operation's answer."""
        _, found = self._send(_message_of(question), wait_s)
        return _parsed(found) if found else {}

    def close(self) -> None:
        """End every call with ConnectionError. Idempotent."""
        if self._forks != forks.count:
            self._is_closed = True  # the connections are the parent's
            return
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = tuple(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.interrupt()

    def check_process(self) -> None:
        """Raise RuntimeError in the child of a fork, where a connection was made before."""
        if self._forks != forks.count:
            if self._idle or self._busy or not self._lock.acquire(blocking=False):
                raise forks.crossed()
            self._lock.release()
            self._forks = forks.count

    # ---- private ----------------------------------------------------------------------------------------------------

    def _send(self, message: _Message, wait_s: float) -> tuple[HTTPMessage, bytearray]:
        """Send a request; the answer's headers and body. Raises the error that it is."""
        connection, response = self._sent(message, wait_s)
        with self.reading(connection, wait_s):
            found = connection.rest(response)
        self.give_back(connection)
        return response.headers, found

    @contextmanager
    def reading(self, connection: _Connection, wait_s: float) -> Iterator[None]:
        """Read an answer that has begun. Raises TimeoutError, ConnectionError."""
        try:
            yield
        except TimeoutError:
            self.drop(connection)
            raise no_reply(self._address.url, wait_s) from None
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # The last two where another thread closed it, as http.client has it.
            self.drop(connection)
            raise closed_before_answer() if self._is_closed else _lost(self._address, error) from None
        except BaseException:
            self.drop(connection)
            raise

    def _sent(self, message: _Message, wait_s: float) -> tuple[_Connection, http.client.HTTPResponse]:
        """Send a request; its connection, and its answer up to the head. Raises the error that it is."""
        while True:
            connection, is_kept = self._take()
            try:
                response = connection.ask(message, self._headers, wait_s)
                failed = connection.rest(response) if response.status >= HTTPStatus.MULTIPLE_CHOICES else None
            except TimeoutError:
                self.drop(connection)
                raise no_reply(self._address.url, wait_s) from None
            except (OSError, http.client.HTTPException) as error:
                self.drop(connection)
                if self._is_closed:
                    raise closed_before_answer() from None
                if is_kept and connection.heard_nothing:
                    continue  # a server may close an idle connection at any time; nothing of this call was answered
                lost = _lost(self._address, error)
                if self._has_answered and isinstance(lost, ConnectionRefusedError):
                    lost = NotBack(str(lost))
                raise lost from None
            except BaseException:
                self.drop(connection)
                raise
            self._has_answered = True
            if failed is not None:
                self.give_back(connection)
                raise _error(response.status, response.headers, bytes(failed))
            return connection, response

    def _take(self) -> tuple[_Connection, bool]:
        self.check_process()
        with self._lock:
            if self._is_closed:
                raise closed()
            kept = self._idle.pop() if self._idle else None
            connection = kept or _Connection(self._address, self._tls)
            self._busy.add(connection)
        return connection, kept is not None

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            self._busy.discard(connection)
            if not self._is_closed and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: _Connection) -> None:
        """Close a connection in use."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()


class _Connection(http.client.HTTPConnection):
    """One connection, over TCP, TLS or a Unix socket."""

    heard_nothing = True
    """Whether the present call has had no byte of an answer."""

    def __init__(self, address: OipAddress, tls: ssl.SSLContext | None) -> None:
        super().__init__(address.host or "localhost", address.port or None)
        self._address, self._tls = address, tls

    is_interrupted = False

    def connect(self) -> None:
        self._connect()
        if self.is_interrupted:
            raise ConnectionAbortedError

    def _connect(self) -> None:
        if self._address.path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._address.path)
            return
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._address.host)

    def ask(self, message: _Message, headers: Mapping[str, str], wait_s: float) -> http.client.HTTPResponse:
        """Send one request and read its answer's head. wait_s: until its first byte, and between two pieces."""
        self.heard_nothing = True
        self.timeout = wait_s
        if self.sock is not None:
            self.sock.settimeout(wait_s)
        self.putrequest(message.method, message.path, skip_accept_encoding=True)
        for name, value in (*headers.items(), *message.headers.items()):
            self.putheader(name, value)
        if message.method == "POST":
            self.putheader("Content-Length", str(sum(map(len, message.body))))
        first, *rest = message.body or [b""]
        self.endheaders(first or None)
        for part in rest:
            self.send(part)
        response = self.getresponse()
        self.heard_nothing = False
        return response

    @staticmethod
    def rest(response: http.client.HTTPResponse) -> bytearray:
        """Read an answer's body."""
        found = bytearray(response.length) if response.length is not None else bytearray(response.read())
        if response.length is not None:
            _read_into(response, found)
        return found

    def interrupt(self) -> None:
        """End a call on another thread, at the latest when it has connected."""
        self.is_interrupted = True
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended


class _Events:
    """The answer of `generate_stream`, event by event; OipReplies.

    The last event and the end of the answer come together, so a look at what has come tells whether it is the last.
    """

    def __init__(  # noqa: PLR0917 (of one call)
        self,
        link: HttpLink,
        connection: _Connection,
        response: http.client.HTTPResponse,
        request: OipCall,
        wait_s: float,
        end_s: float,
    ) -> None:
        """wait_s: for each event; end_s: of all, monotonic."""
        self._link = link
        self._connection = connection
        self._response = response
        self._request = request
        self._wait_s = wait_s
        self._end_s = end_s
        self._lock = threading.Lock()
        self._is_over = False

    def next(self) -> OipReply | None:
        """Read the next event. Raises the error that it is."""
        left_s = min(self._wait_s, self._end_s - time.monotonic())
        with self._link.reading(self._connection, self._wait_s):
            if left_s <= 0:
                raise TimeoutError
            if self._connection.sock is not None:  # else the answer came whole
                self._connection.sock.settimeout(left_s)
            line = self._response.readline()
            while line and not line.startswith(b"data:"):
                line = self._response.readline()
            if line:
                self._response.readline()
        if not line:
            self._end()
            return None
        fields = _parsed(line[5:])
        if not isinstance(fields, dict) or "error" in fields:
            self._end()
            raise _error(HTTPStatus.INTERNAL_SERVER_ERROR, self._response.headers, line[5:])
        return self._reply(fields, final=self._is_last())

    def close(self) -> None:
        """Close its connection where the answer has not ended. Idempotent."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._connection.interrupt()
        self._link.drop(self._connection)

    def _end(self) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._response.read()
            self._link.give_back(self._connection)

    def _is_last(self) -> bool:
        """Whether the end has come with the event, as far as it is here."""
        response: Any = self._response
        if response.isclosed() or (response.chunked is False and not response.length):
            self._end()
            return True
        sock = self._connection.sock
        if not response.chunked or sock is None:
            return False
        ahead = b""
        sock.settimeout(0.0)
        with contextlib.suppress(OSError):
            ahead = response.fp.peek(5)
        sock.settimeout(self._wait_s)
        if ahead[:5] != b"\r\n0\r\n":
            return False
        self._end()
        return True

    def _reply(self, fields: Mapping[str, Any], *, final: bool) -> OipReply:
        """Raises DecodeFailed."""
        wanted = self._request.outputs
        outputs = [
            _output_of(spec, fields[spec["name"]])
            for spec in self._request.outputs_as
            if spec["name"] in fields and (wanted is None or spec["name"] in wanted)
        ]
        version = str(fields.get("model_version", ""))
        return OipReply(str(fields.get("model_name", self._request.model)), version, outputs, {}, final=final)


def _output_of(spec: Mapping[str, Any], value: Any) -> OipTensor:
    """An output that came as its elements, one of them as itself: of the shape in metadata, where that fits."""
    data = value if isinstance(value, list) else [value]
    shape = [int(each) for each in spec["shape"]]
    free = [axis for axis, length in enumerate(shape) if length < 0]
    others = math.prod(length for length in shape if length >= 0)
    if len(free) == 1 and others and not len(data) % others:
        shape[free[0]] = len(data) // others
    if math.prod(shape) != len(data) or any(length < 0 for length in shape):
        shape = [len(data)]
    return OipTensor(str(spec["name"]), str(spec["datatype"]), tuple(shape), data)


def _read_into(response: http.client.HTTPResponse, found: bytearray) -> None:
    at, view = 0, memoryview(found)
    while at < len(found):
        count = response.readinto(view[at:])
        if not count:
            raise http.client.IncompleteRead(bytes(view[:at]), len(found) - at)
        at += count


def _tls(access: OipAccess) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=access.ca_file)
    if access.cert_file is not None:
        context.load_cert_chain(access.cert_file, access.key_file)
    return context


def _infer_message(request: OipCall) -> _Message:
    inputs, parts = [], []
    for name, kind, shape, data in request.inputs:
        part = memoryview(data).cast("B")
        inputs.append({"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(part)}})
        parts.append(part)
    fields: dict[str, Any] = {"inputs": inputs, "parameters": {**request.parameters, "binary_data_output": True}}
    if request.outputs is not None:
        fields["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in request.outputs]
    head = json.dumps(fields, separators=(",", ":")).encode()
    body: list[Any] = [head, *parts]
    if sum(map(len, parts)) <= JOIN_BELOW:
        body = [b"".join(body)]
    headers = {HEAD_LENGTH: str(len(head)), "Content-Type": "application/octet-stream", **_trace_header(request)}
    return _Message("POST", f"{_model_path(request.model, request.version)}/infer", body, headers)


def _trace_header(request: OipCall) -> dict[str, str]:
    return {} if request.traceparent is None else {TRACEPARENT: request.traceparent}


def _generate_message(request: OipCall) -> _Message:
    """The request as `generate_stream` has it: each input's elements, by its name."""
    given = {
        name: array_to_json(kind, OipTensor(name, kind, shape, data).array())
        for name, kind, shape, data in request.inputs
    }
    body = dumps({**given, "parameters": dict(request.parameters)})
    path = f"{_model_path(request.model, request.version)}/generate_stream"
    return _Message("POST", path, [body], {"Content-Type": "application/json", **_trace_header(request)})


def _answer(headers: HTTPMessage, body: bytearray) -> OipReply:
    """Raises DecodeFailed for bytes that are not an answer."""
    try:
        length = int(headers.get(HEAD_LENGTH, len(body)))
        fields, at, outputs = _parsed(body[:length]), length, []
        view = memoryview(body)
        for tensor in fields["outputs"]:
            nbytes = (tensor.get("parameters") or {}).get("binary_data_size")
            if nbytes is None:
                data: Any = tensor["data"]
            else:
                data, at = view[at : at + nbytes], at + nbytes
            outputs.append(OipTensor(tensor["name"], tensor["datatype"], tuple(tensor["shape"]), data))
        version, parameters = str(fields.get("model_version", "")), fields.get("parameters") or {}
        return OipReply(fields["model_name"], version, outputs, parameters, fields.get(ANSWER))
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeFailed(f"the server's answer is not the Open Inference Protocol's: {error!r}") from None


def _parsed(body: bytes | bytearray) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise DecodeFailed(f"the server's answer is not JSON: {error}") from None


def _error(status: int, headers: HTTPMessage, body: bytes) -> EdgeRuntimeError:
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {"error": body.decode("utf-8", "replace")[:500] or f"HTTP {status}"}
    after_ms = headers.get("retry-after-ms", "")
    return server_error(
        str(fields.get("code") or ""),
        str(fields.get("error") or f"HTTP {status}"),
        _STATUS_CODES.get(status, "internal"),
        float(after_ms) if after_ms.isascii() and after_ms.replace(".", "", 1).isdigit() else None,
    )


def _lost(address: OipAddress, error: Exception) -> Exception:
    if isinstance(error, ssl.SSLError):
        return ConnectionError(f"{address.url}: TLS: {getattr(error, 'verify_message', '') or error.reason or error}")
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return ConnectionRefusedError(f"nothing listens at {address.url}; is the daemon started with --http?")
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return ConnectionError(f"{address.url}: {text}")


def _model_path(model: str, version: object = None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{version}"


def _message_of(question: OipQuestion) -> _Message:
    model, version = question.values.get("model") or "", question.values.get("version")
    repository = f"/v2/repository/models/{quote(model, safe='')}"
    method, path = {
        "server_live": ("GET", "/v2/health/live"),
        "server_ready": ("GET", "/v2/health/ready"),
        "model_ready": ("GET", f"{_model_path(model, version)}/ready"),
        "server_metadata": ("GET", "/v2"),
        "model_metadata": ("GET", _model_path(model, version)),
        "model_config": ("GET", f"{_model_path(model, version)}/config"),
        "model_statistics": ("GET", f"{_model_path(model, version)}/stats" if model else "/v2/models/stats"),
        "repository_index": ("POST", "/v2/repository/index"),
        "repository_load": ("POST", f"{repository}/load"),
        "repository_unload": ("POST", f"{repository}/unload"),
    }[question.name]
    if method == "GET":
        return _Message(method, path)
    return _Message(method, path, [b"{}"], {"Content-Type": "application/json"})
