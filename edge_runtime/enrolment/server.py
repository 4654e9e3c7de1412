"""The authority's server: HTTPS, three paths, one answer for each connection.

Owns: the status of each answer, and the bounds of a request. A body says who asks; nothing depends on the TLS of the
caller, so that any proxy may stand before it. Thread: `serve` the caller's; `stop` any.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from http import HTTPStatus
from typing import Any

import msgspec

from edge_runtime.bounded_server import BoundedCalls, BoundedServer, ServerBounds
from edge_runtime.enrolment.authority import Authority
from edge_runtime.enrolment.messages import CA_PATH, ENROL_PATH, MAX_BODY_BYTES, RENEW_PATH, Enrol, Renew
from edge_runtime.errors import ConfigError, EdgeRuntimeError, Forbidden

MAX_DRAINED_BYTES = 1 << 20
"""Read of a body that is too long, so that its sender hears why."""

BOUNDS = ServerBounds(request_bytes=MAX_DRAINED_BYTES + MAX_BODY_BYTES)
"""20 s for a request: a device over a poor link takes a few."""


class AuthorityServer(BoundedServer):
    """The server of one authority. `serve` until `stop`; `server_close` at the end."""

    def __init__(self, authority: Authority, address: str, port: int, *, bounds: ServerBounds = BOUNDS) -> None:
        """Listen. Raises ConfigError: the address is not available, or the server's certificate is not there."""
        self.authority = authority
        self.count = 0
        """Devices that were enrolled or renewed since the start."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        folder = authority.folder
        try:
            tls.load_cert_chain(folder.server, folder.server_key)
            super().__init__((address, port), _AuthorityCalls, bounds)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{address}:{port}: cannot be listened on: {error}; give --bind and --port") from error
        self._tls = tls

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def secured(self, request: socket.socket) -> socket.socket:
        """Put TLS over a connection."""
        return self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)

    def greet(self, peer: Any) -> None:
        """Shake hands."""
        peer.settimeout(self.bounds.request_s)
        peer.do_handshake()


class _AuthorityCalls(BoundedCalls):
    server: AuthorityServer

    def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
        self.begin_answer()
        if self.path == CA_PATH:
            self._answer(HTTPStatus.OK, self.server.authority.certificate, "application/x-pem-file")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not_found", f"wanted POST {ENROL_PATH} or {RENEW_PATH}")

    def do_POST(self) -> None:  # noqa: N802 (the name is http.server's)
        authority = self.server.authority
        calls: dict[str, tuple[Any, Any]] = {
            ENROL_PATH: (Enrol, authority.enrol),
            RENEW_PATH: (Renew, authority.renew),
        }
        length = self.headers.get("Content-Length", "")
        is_length = length.isascii() and length.isdigit() and len(length) < 10
        # What is not read would reset the connection before the answer is.
        body = self.rfile.read(min(int(length), MAX_DRAINED_BYTES)) if is_length else b""
        self.begin_answer()
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

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        self._answer(status, msgspec.json.encode({"error": message, "code": code}), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
