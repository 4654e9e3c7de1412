"""The page of a fleet: its files, its figures as JSON, a stream of changes, on the HTTP server of the daemon's door.

Owns: the paths, and who may ask for what. Reading wants the right `infer`, a wake the right `control`; off this machine
only with TLS and tokens. pages/ has the rules of browsers and the files that both pages share. Thread: the
transport's (`edge-http`), but for `FleetServer.start` and `close`, and for the thread that reads the repository.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from msgspec import Struct

from edge_runtime import __version__
from edge_runtime.clock import SystemClock
from edge_runtime.doors.access.addresses import DoorAddresses
from edge_runtime.doors.access.logins import Logins
from edge_runtime.doors.access.rules import DoorAccess, DoorAddress, door_access
from edge_runtime.doors.access.tokens import RIGHTS, Rights, digest_of
from edge_runtime.doors.http.answer import EventStream, HttpEndpoint, response, retry_headers, status_of
from edge_runtime.doors.http.connection import Frames, HttpConnection, HttpRequest
from edge_runtime.doors.http.head import BadMessage, HttpHead
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.http.transport import HttpTransport
from edge_runtime.doors.mqtt.topics import ID_RULE, is_id
from edge_runtime.errors import ConfigError, DecodeFailed, EdgeRuntimeError, Forbidden, NotReady, Unauthenticated
from edge_runtime.fleet.fleet import MAX_PAGE, PAGE, Fleet, SignedFleet
from edge_runtime.fleet.history import MEMORY, FleetHistory
from edge_runtime.fleet.listener import FleetListener
from edge_runtime.fleet.repository import FleetRepository
from edge_runtime.pages.files import PageFiles
from edge_runtime.pages.guard import HEADERS, MAX_CALL_BYTES, NOT_KEPT, check_call, check_place
from edge_runtime.wire import json_codec

if TYPE_CHECKING:
    import argparse

    from edge_runtime.cli.screen import Screen

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")

REPOSITORY_S = 60.0
"""Between two looks at the repository: a person who assigned a release sees it within a minute."""

STREAM_S = 1.0
"""Between two messages of changes; one in between is told with the next."""

OVERVIEW_S = 5.0
"""Between two messages without a change: a device that falls silent sends none."""

MOST_VIEWERS = 32
MOST_UNREAD_BYTES = 512 << 10
TOLD_IDS = 500
"""Changed devices that one message names; more, and the page reads its list anew."""

MAX_CONNECTIONS = 256
TOTAL_BYTES = 64 << 20
BODY_TIMEOUT_S = 10.0
RETRY_MS = 2000

OPEN = frozenset(("file", "session", "login", "logout"))
"""Calls that want no right: without them nobody could log in."""

OPTION_OF = {
    "http.endpoint": "--http",
    "http.cert_file": "--http-cert",
    "http.key_file": "--http-key",
    "http.tokens_file": "--tokens",
}


class FleetCall(Struct, frozen=True):
    """The meaning of a head. name: of the call, "" for an unknown path. value: from the path."""

    name: str
    value: str = ""
    method: str = "GET"


def serve_fleet(arguments: argparse.Namespace, screen: Screen, listener: FleetListener) -> int:
    """Serve until SIGTERM or Ctrl-C; 0. Raises ConfigError, AddressTaken. Thread: main."""
    access = fleet_access(arguments.http, arguments.http_cert, arguments.http_key, arguments.tokens)
    repository = None
    if arguments.repository:
        repository = FleetRepository(arguments.repository, arguments.root_file, arguments.ca_file)
    server = FleetServer(listener, access, FleetHistory(arguments.history or MEMORY), repository)
    is_told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: is_told.set())
    try:
        server.start()
        if screen.wants_json:
            screen.json({"endpoints": server.endpoints, "broker": server.listener.url})
        else:
            screen.line(f"The fleet of {server.listener.url} at {' '.join(server.endpoints)}; Ctrl-C ends it.")
        screen.flush()
        is_told.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
        signal.signal(signal.SIGTERM, before)
    return 0


def fleet_access(http: str, cert: str | None, key: str | None, tokens: str | None) -> DoorAccess:
    """Return who may reach the page. Raises ConfigError: off this machine it wants TLS and tokens."""
    settings = HttpSettings(
        endpoint=http, cert_file=cert, key_file=key, tokens_file=tokens, control=False, max_body_bytes=MAX_CALL_BYTES
    )
    try:
        access = door_access(settings, "http")
    except ConfigError as error:
        raise ConfigError(_in_options(error.message)) from None
    assert access is not None
    return access


class FleetServer:
    """One process beside the broker. listener: not started yet; it is closed with this."""

    def __init__(
        self,
        listener: FleetListener,
        access: DoorAccess,
        history: FleetHistory,
        repository: FleetRepository | None = None,
    ) -> None:
        self.listener = listener
        self._addresses = DoorAddresses(access)
        self.endpoints = self._addresses.endpoints
        self._history = history
        self._repository = repository
        self._is_over = threading.Event()
        self._receiver = FleetPage(self.listener, access, history, None if repository is None else repository.place)
        self._transport: HttpTransport | None = None
        self._reader = threading.Thread(target=self._read_repository, name="edge-fleet-repository", daemon=True)

    def start(self) -> None:
        """Bind, connect, and answer from now on. Raises ConfigError, AddressTaken."""
        self._transport = HttpTransport(
            self._addresses.bind(),
            self._receiver,
            self._receiver,
            max_body_bytes=MAX_CALL_BYTES,
            body_timeout_s=BODY_TIMEOUT_S,
            max_connections=MAX_CONNECTIONS,
            total_bytes=TOTAL_BYTES,
        )
        self._receiver.attach(self._transport)
        self._transport.serve()
        self.listener.start()
        if self._repository is not None:
            self._reader.start()

    def close(self) -> None:
        """End the streams, and close everything. Idempotent."""
        self._is_over.set()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.call(self._receiver.end_streams)
            transport.stop()
            self.listener.close()
        if self._reader.is_alive():
            self._reader.join()
        if self._repository is not None:
            self._repository.close()
        self._addresses.release()
        self._history.close()

    def _read_repository(self) -> None:
        """Thread: its own."""
        assert self._repository is not None
        while not self._is_over.is_set():
            try:
                self._receiver.signed, self._receiver.trouble = self._repository.read(), ""
            except EdgeRuntimeError as error:
                self._receiver.trouble = error.message
            except Exception as error:  # one of the broad catches: the page goes on without it
                log.exception("the repository cannot be read")
                self._receiver.trouble = f"{type(error).__name__}: {error}"
            self._is_over.wait(REPOSITORY_S)


class FleetPage:
    """The receiver of the HTTP transport, and its counters, which it drops.

    repository: its place; None without one. signed, trouble: what was read of it last, and why no more.
    """

    def __init__(
        self, listener: FleetListener, access: DoorAccess, history: FleetHistory, repository: str | None = None
    ) -> None:
        self.signed: SignedFleet | None = None
        self.trouble = ""
        self._listener = listener
        self._access = access
        self._history = history
        self._repository = repository
        self._logins = access.logins = Logins(SystemClock())
        self._shared, self._own = PageFiles(), PageFiles(STATIC)
        self._streams: list[tuple[EventStream, HttpRequest]] = []
        self._told = 0
        self._stream_due_s = self._overview_due_s = 0.0
        self._transport: HttpTransport
        self._endpoint: HttpEndpoint
        self._calls: Mapping[str, Callable[[HttpRequest, FleetCall], Any]] = {
            "session": lambda request, _: self._viewer(request),
            "overview": lambda _request, _call: self._overview(),
            "groups": lambda _request, _call: self._ask(lambda fleet: fleet.groups(time.time())),
            "devices": lambda request, _: self._devices(_query(request)),
            "device": lambda _, call: self._device(call.value),
            "releases": lambda _request, _call: self._releases(),
            "slow": lambda request, _: self._ask(lambda fleet: fleet.slow(group=_query(request).get("group", ""))),
            "history": lambda request, _: self._last(_query(request)),
            "wake": lambda request, _: self._wake(_fields(request)),
        }

    def attach(self, transport: HttpTransport) -> None:
        """Answer by this transport, whose receiver this is."""
        self._transport = transport
        self._endpoint = HttpEndpoint(transport, MAX_CALL_BYTES)

    def count(self, name: str, count: int = 1) -> None:
        """Count nothing."""

    # ---- the transport's receiver -----------------------------------------------------------------------------------

    def understand(self, head: HttpHead) -> None:
        """Read the path."""
        head.meaning = _call_of(unquote(head.path))

    def begin(self, request: HttpRequest) -> Frames | None:
        """Refuse by its head a request that may not be asked, before its body is read."""
        try:
            self._check(request)
        except EdgeRuntimeError as error:
            return _error(error)
        return None

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        """Answer each."""
        for request in requests:
            if not request.connection.is_open:
                continue
            try:
                self._check(request)  # `begin` is asked for those with a body alone
                frames = self._answer(request)
            except EdgeRuntimeError as error:
                frames = _error(error)
            except Exception as error:  # one of the broad catches: the next request is answered
                log.exception("a bug ended a request")
                frames = _error(DecodeFailed(f"a bug ended this request: {type(error).__name__}"), 500)
            if frames is not None:
                self._transport.answer(request, frames)

    def failure(self, error: EdgeRuntimeError) -> Frames:
        """Write the response to bytes that are not a request."""
        return _error(error)

    def gone(self, connection: HttpConnection) -> None:
        """End the stream of a connection that has ended."""
        self._streams = [each for each in self._streams if each[1].connection is not connection]

    def beat(self) -> None:
        """Keep what happened, and tell who looks of changes."""
        self._history.add(self._ask(Fleet.take_events))
        now_s = time.monotonic()
        if not self._streams or now_s < self._stream_due_s:
            return
        revision = self._ask(lambda fleet: fleet.revision)
        if revision == self._told and now_s < self._overview_due_s:
            return
        self._stream_due_s, self._overview_due_s = now_s + STREAM_S, now_s + OVERVIEW_S
        changed = self._ask(lambda fleet: fleet.changed_since(self._told, TOLD_IDS))
        self._told = revision
        text = _event("change", {"devices": changed, "overview": self._overview()})
        for stream, request in list(self._streams):
            if stream.unread_bytes > MOST_UNREAD_BYTES or not self._may_go_on(request):
                stream.drop()
            stream.send(text)
        self._streams = [each for each in self._streams if each[0].is_open]

    def end_streams(self) -> None:
        """End every stream: the process ends."""
        streams, self._streams = self._streams, []
        for stream, _ in streams:
            stream.end(_event("bye", {}))

    # ---- who may ---------------------------------------------------------------------------------------------------

    def _check(self, request: HttpRequest) -> None:
        head, place = _head(request), request.connection.place
        call: FleetCall = head.meaning
        if not call.name:
            raise BadMessage(f"there is nothing at {head.path[:80]!r}", 404)
        check_place(place, self._access, head.headers.get("host"))
        if head.method not in (call.method, "HEAD" if call.method == "GET" else call.method):
            raise BadMessage(f"{head.path[:80]}: got {head.method}, wanted {call.method}", 405)
        if call.name != "file":
            check_call(head, place)
        if call.name in OPEN:
            return
        rights = self._rights(request)
        if not rights.may_infer:
            raise Forbidden("reading wants a token with the right infer")
        if call.name == "wake" and not rights.may_control and self._access.has_tokens:
            raise Forbidden("a wake wants a token with the right control")

    def _rights(self, request: HttpRequest) -> Rights:
        head, place = _head(request), request.connection.place
        login = self._access.login(head.method, head.headers)
        return self._access.caller(place, head.headers.get("authorization"), login)

    def _may_go_on(self, request: HttpRequest) -> bool:
        try:
            return self._rights(request).may_infer
        except EdgeRuntimeError:
            return False

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, request: HttpRequest) -> Frames | None:
        call: FleetCall = _head(request).meaning
        if call.name == "file":
            return self._file(call.value, _head(request).headers)
        if call.name == "stream":
            self._stream(request)
            return None
        if call.name in ("login", "logout"):
            return self._log_in(request) if call.name == "login" else self._log_out(request)
        return _json(self._calls[call.name](request, call))

    def _ask(self, question: Callable[[Fleet], Any]) -> Any:
        return self._listener.ask(question)

    def _file(self, name: str, headers: Mapping[str, str]) -> Frames:
        own = name.removeprefix("fleet/")
        file = self._own.find(own) if own != name or name == "fleet.html" else self._shared.find(name)
        if file is None:
            raise BadMessage("there is no such file of the page", 404)
        more = f"{HEADERS}Cache-Control: no-cache\r\nVary: Accept-Encoding\r\nETag: {file.tag}\r\n"
        if file.tag in headers.get("if-none-match", ""):
            return response((), file.kind, 304, more)
        if file.shrinks and "gzip" in headers.get("accept-encoding", ""):
            return response((file.compressed(),), file.kind, more=f"{more}Content-Encoding: gzip\r\n")
        return response((file.body,), file.kind, more=more)

    def _overview(self) -> dict[str, Any]:
        return {
            **self._ask(lambda fleet: fleet.overview(time.time())),
            "broker_url": self._listener.url,
            "broker_reason": self._listener.reason,
            "is_loaded": self._listener.is_loaded.is_set(),
            "repository": self._repository,
            "repository_reason": self.trouble,
        }

    def _devices(self, query: Mapping[str, str]) -> dict[str, Any]:
        return self._ask(  # type: ignore[no-any-return]
            lambda fleet: fleet.devices(
                time.time(),
                search=query.get("search", "")[:200],
                group=query.get("group", ""),
                condition=query.get("condition", ""),
                offset=_number(query, "offset", 0),
                limit=min(_number(query, "limit", PAGE), MAX_PAGE),
            )
        )

    def _device(self, device_id: str) -> dict[str, Any]:
        found = self._ask(lambda fleet: fleet.device(device_id, time.time()))
        if found is None:
            raise BadMessage(f"the broker knows no device {device_id[:80]!r}", 404)
        return {**found, "history": self._history.last(50, device_id)}

    def _releases(self) -> dict[str, Any]:
        releases = self._ask(lambda fleet: fleet.releases(time.time(), self.signed))
        return {"repository": self._repository, "reason": self.trouble, "releases": releases}

    def _last(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        return self._history.last(_number(query, "count", 100), query.get("device", ""))

    def _wake(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        group = fields.get("group")
        if not isinstance(group, str) or not is_id(group):
            raise DecodeFailed(f"group: got {str(group)[:80]!r}, wanted {ID_RULE}")
        try:
            self._listener.wake(group)
        except ConnectionError as error:
            raise NotReady(str(error), retry_after_ms=1_000.0) from None
        return {"group": group}

    def _viewer(self, request: HttpRequest, cookies: str | None = None) -> dict[str, Any]:
        """Tell who looks, and what they may. cookies: those of now, where they are not the request's."""
        head, place = _head(request), request.connection.place
        login = self._logins.token_of(head.headers.get("cookie", "") if cookies is None else cookies)
        try:
            rights = self._access.caller(place, head.headers.get("authorization"), login)
        except EdgeRuntimeError:
            rights = None
        may = [] if rights is None else [each for each in RIGHTS if getattr(rights, f"may_{each}")]
        if rights is not None and not self._access.has_tokens:
            may.append("control")
        return {
            "needs_token": self._access.has_tokens and rights is None,
            "name": rights.name if rights is not None else None,
            "may": sorted(set(may)),
            "is_logged_in": login is not None and rights is not None,
            "version": __version__,
            "broker": self._listener.url,
        }

    def _log_in(self, request: HttpRequest) -> Frames:
        token = _fields(request).get("token")
        if not self._access.has_tokens:
            raise DecodeFailed("no token is needed here")
        digest = digest_of(token.strip()) if isinstance(token, str) else ""
        if not self._access.is_known(digest):
            raise Unauthenticated("this token is unknown here; `edge-runtime token list` names those known")
        cookie = self._logins.begin(digest, is_tls=request.connection.place.is_tls)
        return _json(self._viewer(request, cookie.partition(";")[0]), f"Set-Cookie: {cookie}\r\n")

    def _log_out(self, request: HttpRequest) -> Frames:
        place: DoorAddress = request.connection.place
        cookie = self._logins.end(_head(request).headers.get("cookie", ""), is_tls=place.is_tls)
        return _json(self._viewer(request, ""), f"Set-Cookie: {cookie}\r\n")

    def _stream(self, request: HttpRequest) -> None:
        if not _head(request).takes_chunks:
            raise BadMessage("a stream wants HTTP/1.1", 505)
        if len(self._streams) >= MOST_VIEWERS:
            raise NotReady(f"{MOST_VIEWERS} viewers look already", retry_after_ms=5_000.0)
        if not self._streams:
            self._told = self._ask(lambda fleet: fleet.revision)
        stream = EventStream(HEADERS)
        stream.open(self._endpoint, request)
        self._streams.append((stream, request))
        stream.send(b"retry: %d\n" % RETRY_MS + _event("change", {"devices": None, "overview": self._overview()}))


# ---- private --------------------------------------------------------------------------------------------------------

CALLS = ("overview", "groups", "devices", "releases", "slow", "history", "stream")

_PLAIN = {
    "/": FleetCall("file", "fleet.html"),
    "/page/session": FleetCall("session"),
    "/page/login": FleetCall("login", method="POST"),
    "/page/logout": FleetCall("logout", method="POST"),
    "/fleet/wake": FleetCall("wake", method="POST"),
    **{f"/fleet/{name}": FleetCall(name) for name in CALLS},
}


_BELOW = (("/fleet/device/", "device", ""), ("/fleet/page/", "file", "fleet/"), ("/page/", "file", ""))
"""Beginnings of paths, with their calls and the beginning of their values."""


def _call_of(path: str) -> FleetCall:
    """Return the call of a path."""
    if (found := _PLAIN.get(path)) is not None:
        return found
    for prefix, name, kept in _BELOW:
        if path.startswith(prefix) and len(path) > len(prefix):
            return FleetCall(name, kept + path[len(prefix) :])
    return FleetCall("")


def _head(request: HttpRequest) -> HttpHead:
    assert request.head is not None
    return request.head


def _query(request: HttpRequest) -> dict[str, str]:
    try:
        found = parse_qs(_head(request).query, max_num_fields=20, errors="strict")
    except ValueError as error:
        raise DecodeFailed(f"the query cannot be read: {error}") from None
    return {name: values[-1] for name, values in found.items()}


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise DecodeFailed(f"{name}: got {text[:40]!r}, wanted a number")
    return int(text)


def _fields(request: HttpRequest) -> dict[str, Any]:
    fields = json_codec.loads(bytes(request.body or b"{}"))
    if not isinstance(fields, dict):
        raise DecodeFailed("wanted a JSON object")
    return fields


def _json(value: Any, more: str = "") -> Frames:
    return response((json_codec.dumps(value),), more=f"{HEADERS}{NOT_KEPT}{more}")


def _error(error: EdgeRuntimeError, status: int | None = None) -> Frames:
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "retryable": error.retryable}
    if error.retry_after_ms is not None:
        fields["retry_after_ms"] = error.retry_after_ms
    status = status_of(error) if status is None else status
    more = f"{HEADERS}{NOT_KEPT}{retry_headers(error, status)}"
    return response((json_codec.dumps({"error": fields}),), status=status, more=more)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_codec.dumps(data))


def _in_options(message: str) -> str:
    for key, option in OPTION_OF.items():
        message = message.replace(key, option)
    return message.partition(", or accept the risk")[0]
