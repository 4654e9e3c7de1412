"""A collector on 127.0.0.1: takes OTLP over HTTP as JSON, by the messages of opentelemetry-proto, or refuses it.

It parses strictly: a field that OTLP does not have fails the body, as collectors do.
"""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from typing_extensions import Self

WAIT_S = 60.0
"""Far above anything but a hang."""

REQUESTS = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class OtlpReceiver:
    """Keeps what came. status: of each answer. port: 0 for any. bodies: by path, as messages."""

    def __init__(self, port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.retry_after = 200, ""
        self.headers: list[dict[str, str]] = []
        self.bodies: list[tuple[str, Any]] = []
        self.refused = 0
        self.faults: list[str] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 0.2  # of a connection that is left alone, so that the receiver can end

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver._take(self.path, dict(self.headers), body)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "2")
                if receiver.retry_after:
                    self.send_header("Retry-After", receiver.retry_after)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        # One connection at a time, which is the daemon's: no thread is left behind.
        self._server = HTTPServer(("127.0.0.1", port), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="otlp-receiver")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        assert not self.faults, self.faults

    def answer(self, status: int, *, retry_after: str = "") -> None:
        """Answer with a status from now on; take bodies only with 200."""
        self.status, self.retry_after = status, retry_after

    def spans(self) -> list[Span]:
        """Every span that came."""
        return [
            Span(each)
            for path, body in list(self.bodies)
            if path == "/v1/traces"
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for each in scope.spans
        ]

    def metrics(self) -> dict[str, list[Any]]:
        """Metrics by name."""
        found: dict[str, list[Any]] = {}
        for path, body in list(self.bodies):
            if path == "/v1/metrics":
                for each in body.resource_metrics[0].scope_metrics[0].metrics:
                    found.setdefault(each.name, []).append(each)
        return found

    def logs(self) -> list[Any]:
        """Log records."""
        return [
            each
            for path, body in list(self.bodies)
            if path == "/v1/logs"
            for each in body.resource_logs[0].scope_logs[0].log_records
        ]

    def wait(self, holds: Callable[[], Any]) -> Any:
        """Wait until something holds of what came, and return that."""
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_S), (self.faults, [str(each) for each in self.spans()])
            return holds()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        with self._changed:
            self.headers.append(headers)
            if self.status != 200:
                self.refused += 1
            else:
                try:
                    fields = json.loads(gzip.decompress(body))
                    self.bodies.append((path, json_format.ParseDict(_with_ids(fields), REQUESTS[path]())))
                except Exception as error:  # noqa: BLE001 (told by the test's end)
                    self.faults.append(f"{path}: {type(error).__name__}: {error}")
            self._changed.notify_all()


class Span:
    """A span with its facts as Python has them."""

    def __init__(self, message: Any) -> None:
        self.message = message
        self.name: str = message.name
        self.kind: int = message.kind
        self.trace: str = message.trace_id.hex()
        self.own: str = message.span_id.hex()
        self.parent: str = message.parent_span_id.hex()
        self.begin_ns: int = message.start_time_unix_nano
        self.end_ns: int = message.end_time_unix_nano
        self.status: tuple[int, str] = (message.status.code, message.status.message)
        self.links = [(each.trace_id.hex(), each.span_id.hex()) for each in message.links]
        self.attributes = {each.key: _plain(each.value) for each in message.attributes}

    def __str__(self) -> str:
        return f"{self.name} {self.own} in {self.parent or '-'} of {self.trace}: {self.attributes}"


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _with_ids(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimals, where protobuf's own has base64."""
    if isinstance(value, list):
        return [_with_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(each)).decode()
        if key in {"traceId", "spanId", "parentSpanId"}
        else _with_ids(each)
        for key, each in value.items()
    }
