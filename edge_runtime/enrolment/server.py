"""The authority's server: HTTPS, three paths, one thread for each connection, a bounded number of them.

Owns: connections, their bounds, and the status of each answer. A body says who asks; nothing depends on the TLS of the
caller, so that any proxy may stand before it. Thread: `serve` the caller's; `stop` any.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from edge_runtime.enrolment.authority import Authority
from edge_runtime.enrolment.messages import CA_PATH, ENROL_PATH, MAX_BODY_BYTES, RENEW_PATH, Enrol, Renew
from edge_runtime.errors import ConfigError, EdgeRuntimeError, Forbidden

MAX_CONNECTIONS = 128
"""At once; a further one waits for a place, at most IDLE_S."""

IDLE_S = 20.0
"""For the handshake, and for each wait of a request: a device over a poor link takes a few."""

MAX_DRAINED_BYTES = 1 << 20
"""Read of a body that is too long, so that its sender hears why."""

POLL_S = 0.1


class AuthorityServer(ThreadingHTTPServer):
    """The server of one authority. `serve_forever` until `stop`; `server_close` at the end."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, authority: Authority, address: str, port: int) -> None:
        """Listen. Raises ConfigError: the address is not available, or the server's certificate is not there."""
        self.authority = authority
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.count = 0
        """Devices that were enrolled or renewed since the start."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        folder = authority.folder
        try:
            tls.load_cert_chain(folder.server, folder.server_key)
            super().__init__((address, port), _AuthorityCalls)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{address}:{port}: cannot be listened on: {error}; give --bind and --port") from error
        self._tls = tls

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def serve(self) -> None:
        """Answer until `stop` or an interrupt."""
        with contextlib.suppress(KeyboardInterrupt):
            self.serve_forever(POLL_S)

    def stop(self) -> None:
        """Make `serve` return."""
        self.shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection where there is a place."""
        if not self._places.acquire(timeout=IDLE_S):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Shake hands on the connection's own thread, and answer."""
        try:
            request.settimeout(IDLE_S)
            with self._tls.wrap_socket(request, server_side=True) as secure:
                self.finish_request(secure, client_address)
        except OSError:
            with contextlib.suppress(OSError):
                request.close()
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that breaks off is not a fault."""


class _AuthorityCalls(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: AuthorityServer

    def do_GET(self) -> None:
        if self.path == CA_PATH:
            self._answer(HTTPStatus.OK, self.server.authority.certificate, "application/x-pem-file")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not_found", f"wanted POST {ENROL_PATH} or {RENEW_PATH}")

    def do_POST(self) -> None:
        authority = self.server.authority
        calls: dict[str, tuple[Any, Any]] = {
            ENROL_PATH: (Enrol, authority.enrol),
            RENEW_PATH: (Renew, authority.renew),
        }
        length = self.headers.get("Content-Length", "")
        is_length = length.isascii() and length.isdigit() and len(length) < 10
        # What is not read would reset the connection before the answer is.
        body = self.rfile.read(min(int(length), MAX_DRAINED_BYTES)) if is_length else b""
        if self.path not in calls:
            self._refuse(HTTPStatus.NOT_FOUND, "not_found", f"wanted POST {ENROL_PATH} or {RENEW_PATH}")
            return
        if not is_length or len(body) > MAX_BODY_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "config", f"wanted at most {MAX_BODY_BYTES} bytes")
            return
        kind, call = calls[self.path]
        try:
            answer = call(msgspec.json.decode(body, type=kind))
        except msgspec.DecodeError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, "decode_failed", f"the body is not what it should be: {error}")
        except Forbidden as error:
            self._refuse(HTTPStatus.FORBIDDEN, error.code, error.message)
        except ConfigError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, error.code, error.message)
        except EdgeRuntimeError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, error.code, error.message)
        else:
            self.server.count += 1
            self._answer(HTTPStatus.OK, msgspec.json.encode(answer), "application/json")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name is the base class's)
        """Log nothing: tokens are in bodies, and the file of devices says who came."""

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        self.close_connection = True
        self._answer(status, msgspec.json.encode({"error": message, "code": code}), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
