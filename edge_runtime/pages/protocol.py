"""The page's paths on the HTTP door: its files, the calls that it makes, its stream of events, and its login.

Owns: the calls, and who may make each. It knows nothing that a client could not ask: figures are results of the table
of operations. guard.py has the rules of browsers, files.py the files. Thread: the door's.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edge_runtime import __version__
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.access.logins import Logins
from edge_runtime.doors.access.rules import DoorAccess, DoorAddress
from edge_runtime.doors.access.tokens import RIGHTS, digest_of
from edge_runtime.doors.http.answer import EventStream, response, retry_headers, status_of
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.head import BadMessage, HttpHead
from edge_runtime.doors.http.protocols import CallRequests, paths
from edge_runtime.doors.open_inference.operations import Caller, OpenInference, check_rights
from edge_runtime.errors import (
    DecodeFailed,
    EdgeRuntimeError,
    Forbidden,
    ModelNotFound,
    QueueFull,
    Unauthenticated,
)
from edge_runtime.models.servable import Servable
from edge_runtime.operations import OPERATIONS
from edge_runtime.pages.events import KEPT, Events
from edge_runtime.pages.files import INDEX, PageFiles
from edge_runtime.pages.guard import HEADERS, NOT_KEPT, check_call, check_place
from edge_runtime.pages.history import History
from edge_runtime.pages.overview import Overview
from edge_runtime.pages.report import NAME, bundle, report_files
from edge_runtime.pages.stream import Viewer, Viewers
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.replies import Encoding
from edge_runtime.request.request import Request
from edge_runtime.wire import json_codec
from edge_runtime.wire.codec import short, typed

log = logging.getLogger(__name__)

FILE, CALL, VIEWER, LOGIN, LOGOUT = ("page_file", "page_call", "page_viewer", "page_login", "page_logout")
STREAM, REPORT, PICTURE = ("page_stream", "page_report", "page_picture")

OF_OTHERS = ("tensorflow_serving",)
"""Settings of protocols that answer `GET /` themselves; the page is at `/page/` alone then."""


def open_protocol(context: DoorContext, protocol: OpenInference) -> Page:
    """Return the protocol that shows this device."""
    settings = context.settings("http")
    has_root = not any(getattr(settings, name) for name in OF_OTHERS)
    return Page(context, protocol, context.access["http"], has_root=has_root)


@runtime_checkable
class HasPictures(Protocol):
    """A door that has the pictures of cameras."""

    def last_picture(self, topic: str) -> bytes | None:
        """The last JPEG of a topic; None: there is none. Thread: any."""
        ...


class Page:
    """The page of a device, as a protocol of the HTTP door."""

    open_calls = frozenset((FILE, VIEWER, LOGIN, LOGOUT))

    def __init__(self, context: DoorContext, protocol: OpenInference, access: DoorAccess, *, has_root: bool) -> None:
        self.paths = paths(
            *((("/(?P<file>)", {"GET": FILE}),) if has_root else ()),
            ("/page/call/(?P<operation>[a-z_]+)", {"POST": CALL}),
            ("/page/session", {"GET": VIEWER}),
            ("/page/login", {"POST": LOGIN}),
            ("/page/logout", {"POST": LOGOUT}),
            ("/page/stream", {"GET": STREAM}),
            ("/page/doctor", {"GET": REPORT}),
            ("/page/picture/(?P<topic>.+)", {"GET": PICTURE}),
            ("/page/(?P<file>.*)", {"GET": FILE}),
        )
        self.page_path = "/" if has_root else "/page/"
        self._context = context
        self._protocol = protocol
        self._access = access
        self._logins = access.logins = Logins(context.core.clock)
        self._files = PageFiles()
        core = context.core
        self.history = History(core.metrics, core.clock)
        self.events = Events()
        self.overview = Overview(context, self.history)
        self._viewers = Viewers(core.clock, self.overview.now, self.events.since)
        self._is_open = True
        self._started = round(time.time(), 3)
        self.events.start()
        context.loop.add_beat(self._beat)

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding that tells errors as text where a person reads them, else as JSON."""
        return PageEncoding(as_text="file" in call.values)

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Note the headers that an answer depends on, and have those checked that say who asks."""
        headers = head.headers
        for name in ("if-none-match", "accept-encoding", "cookie", "authorization"):
            call.values[name] = headers.get(name, "")
        call.ignores_body = call.name not in {CALL, LOGIN}
        if call.name == STREAM and not head.takes_chunks:
            raise BadMessage("a stream wants HTTP/1.1", 505)

        def check(address: DoorAddress) -> None:
            check_place(address, self._access, headers.get("host"))
            if call.name != FILE:
                check_call(head, address)

        call.check = check

    def claims(self, call: HttpCall) -> bool:
        """No: it has no path of inference."""
        del call
        return False

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """No: its bodies are small."""
        del body, head
        return False

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> Any:
        """Nothing: it has no inference of its own."""
        raise NotImplementedError

    def model_of(self, message: Any, call: HttpCall) -> tuple[str, int | None]:
        """As `read`."""
        raise NotImplementedError

    def requests_of(self, servable: Servable, message: Any, head: HttpHead, call: HttpCall) -> CallRequests:
        """As `read`."""
        raise NotImplementedError

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Answer a call. Raises EdgeRuntimeError."""
        address = caller.address
        assert address is not None
        if call.name == FILE:
            reply(self._file(call))
        elif call.name == CALL:
            self._operate(call.values["operation"], fields, caller, reply)
        elif call.name == LOGIN:
            self._login(call, fields, address, reply)
        elif call.name == PICTURE:
            reply(self._picture(call.values["topic"], caller))
        elif call.name == REPORT:
            check_rights("doctor", caller)
            more = f'{HEADERS}{NOT_KEPT}Content-Disposition: attachment; filename="{NAME}.tar.gz"\r\n'
            reply(response((bundle(self.report()),), "application/gzip", more=more))
        elif call.name == LOGOUT:
            cookie = self._logins.end(call.values["cookie"], is_tls=address.is_tls)
            self._access.on_change()
            reply(page_json(self._viewer(call, address, None), f"Set-Cookie: {cookie}\r\n"))
        elif call.name == VIEWER:
            reply(page_json(self._viewer(call, address, self._logins.token_of(call.values["cookie"]))))
        else:
            self._look(call, address, caller, reply)

    def samples_of(self, model: str | None) -> dict[str, Any]:
        """Return the result of `history`. Raises ModelNotFound. Thread: any."""
        is_known = model is not None and bool(self._context.core.table.statuses_of(model))
        return self.history.report(model, is_known=is_known)

    def tuned(self, model: str) -> dict[str, Any]:
        """Return the result of `tuning`. Raises ModelNotFound. Thread: any."""
        from edge_runtime.tuning.found import found_by_tune  # of the ring of `tune`, for who looks at this

        core = self._context.core
        if not core.table.statuses_of(model):
            raise ModelNotFound(f"there is no model {short(model)} here")

        folder = core.config.model.get(model) or core.config.models_folder
        return found_by_tune(None if folder is None else Path(folder) / ("" if model in core.config.model else model))

    def example(self, model: str) -> dict[str, Any]:
        """Return the result of `example`. Raises ModelNotFound, NotReady. Thread: any; it reads files."""
        from edge_runtime.pages.examples import example_of  # with what reads samples, for who tries a model

        return example_of(self._context.core, model)

    def report(self) -> dict[str, str]:
        """Return the files of a bug report. Thread: any."""
        core = self._context.core
        told: dict[str, Callable[[], Any]] = {
            "overview": self.overview.now,
            "history": self.history.report,
            "events": lambda: self.events.last(KEPT),
            "stats": self._context.status.stats,
            "models": core.table.inventory,
        }
        if core.updates is not None:
            told["updates"] = core.updates.status
        return report_files(self._context, told)

    def close(self) -> None:
        """End the streams, and let no browser be logged in any more. Idempotent."""
        self._is_open = False
        self._viewers.close()
        self.events.close()
        self._access.logins = None

    def _beat(self) -> None:
        """Take samples, and send what is due. Thread: the I/O loop's."""
        if not self._is_open:
            return
        try:
            self.history.beat()
            self._viewers.beat()
            if self._logins.drop_expired():
                self._access.on_change()
        except Exception:  # one of the broad catches: the loop goes on
            log.exception("a bug interrupted the page")

    # ---- private ----------------------------------------------------------------------------------------------------

    def _file(self, call: HttpCall) -> Frames:
        file = self._files.find(call.values["file"] or INDEX)
        if file is None:
            raise BadMessage("there is no such file of the page", 404)
        more = f"{HEADERS}Cache-Control: no-cache\r\nVary: Accept-Encoding\r\nETag: {file.tag}\r\n"
        if file.tag in call.values["if-none-match"]:
            return response((), file.kind, 304, more)
        if file.shrinks and "gzip" in call.values["accept-encoding"]:
            return response((file.compressed(),), file.kind, more=f"{more}Content-Encoding: gzip\r\n")
        return response((file.body,), file.kind, more=more)

    def _operate(self, name: str, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        if name not in OPERATIONS:
            raise DecodeFailed(f"there is no operation {short(name)}")
        values: dict[str, Any] = dict(fields)
        model, version = typed(values, "model", str, ""), typed(values, "version", int, None)
        header = {"name": model} | ({} if version is None else {"version": str(version)})
        parameters = {key: value for key, value in values.items() if key not in {"model", "version"}}
        self._protocol.operate(
            name, header, caller, reply, lambda result: page_json({"result": result}), parameters=parameters
        )

    def _picture(self, topic: str, caller: Caller) -> Frames:
        """The last picture of a rule's camera."""
        if not caller.may_view:
            raise Forbidden(
                "pictures of cameras need the right view; edge-runtime token add NAME --may infer,view makes a token"
            )
        doors = [each for each in self._context.doors.values() if isinstance(each, HasPictures)]
        picture = next((found for each in doors if (found := each.last_picture(topic)) is not None), None)
        if picture is None:
            raise BadMessage("there is no picture of this topic yet", 404)
        return response((picture,), "image/jpeg", more=f"{HEADERS}{NOT_KEPT}")

    def _look(self, call: HttpCall, address: DoorAddress, caller: Caller, reply: Done) -> None:
        """Open a stream of events."""
        check_rights("overview", caller)
        if self._viewers.is_full:
            raise QueueFull("as many look at this page as may; close another one")
        stream = EventStream(f"{HEADERS}X-Accel-Buffering: no\r\n")
        cookie, authorization = call.values["cookie"], call.values["authorization"] or None

        def is_allowed() -> bool:
            try:
                self._access.caller(address, authorization, self._logins.token_of(cookie))
            except EdgeRuntimeError:
                return False
            return True

        reply(stream)
        hello = {"version": __version__, "started": self._started}
        self._viewers.add(Viewer(stream, is_allowed), hello, self.events.last_id)

    def _login(self, call: HttpCall, fields: Mapping[str, Any], address: DoorAddress, reply: Done) -> None:
        token = digest_of(typed(fields, "token", str, "").strip())
        if not self._access.has_tokens:
            raise DecodeFailed("no token is needed here")
        if not self._access.is_known(token):
            raise Unauthenticated("this token is unknown here; `edge-runtime token list` names those known")
        cookie = self._logins.begin(token, is_tls=address.is_tls)
        reply(page_json(self._viewer(call, address, token), f"Set-Cookie: {cookie}\r\n"))

    def _viewer(self, call: HttpCall, address: DoorAddress, login: str | None) -> dict[str, Any]:
        """Tell who looks, and what they may."""
        try:
            rights = self._access.caller(address, call.values["authorization"] or None, login)
        except EdgeRuntimeError:
            rights = None
        may = [] if rights is None else [each for each in RIGHTS if getattr(rights, f"may_{each}")]
        return {
            "needs_token": self._access.has_tokens and rights is None,
            "name": rights.name if rights is not None else None,
            "may": may,
            "is_logged_in": login is not None and rights is not None,
            "version": __version__,
            "device": socket.gethostname(),
            "docs": None,
            "offers": self._context.operations.offered,
        }


def page_json(value: Any, more: str = "") -> Frames:
    """Write an answer of the page as JSON. more: further headers, each with its line's end."""
    return response((json_codec.dumps(value),), more=f"{HEADERS}{NOT_KEPT}{more}")


class PageEncoding:
    """Writes errors; what answers a call is a response already."""

    def __init__(self, *, as_text: bool) -> None:
        self._as_text = as_text

    def answer(self, request: Request, request_id: Any) -> Frames:
        """Nothing that runs has this encoding."""
        raise NotImplementedError

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        status = status_of(error)
        more = f"{HEADERS}{NOT_KEPT}{retry_headers(error, status)}"
        if self._as_text:
            return response((f"{error.message}\n".encode(),), "text/plain; charset=utf-8", status, more)
        fields = {"code": error.code, "message": error.message, "retryable": error.retryable}
        if error.retry_after_ms is not None:
            fields["retry_after_ms"] = error.retry_after_ms
        return response((json_codec.dumps({"error": fields}),), status=status, more=more)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """A response, as it is."""
        frames: Frames = result
        return frames
