"""The daemon's HTTP door: puts transport and frontend together, binds its addresses, starts and ends them.

Imported only with `http.endpoint` or `http.control`, since it imports httptools. Thread: main.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from edge_runtime import plugins
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.access.addresses import DoorAddresses
from edge_runtime.doors.door import drain
from edge_runtime.doors.http.answer import BINARY
from edge_runtime.doors.http.frontend import HttpFrontend
from edge_runtime.doors.http.protocols import HasPage, HttpProtocol
from edge_runtime.doors.http.transport import HttpTransport
from edge_runtime.doors.open_inference.operations import OpenInference, open_inference

log = logging.getLogger(__name__)

OpenedProtocol = TypeVar("OpenedProtocol")


def open_door(context: DoorContext) -> HttpDoor:
    """Return the door of `[http]`."""
    return HttpDoor(context)


class HttpDoor:
    """The addresses of `[http]`. endpoints: those bound, as a client writes them."""

    def __init__(self, context: DoorContext) -> None:
        settings = self._settings = context.settings("http")
        access = context.access["http"]
        core = context.core
        self._context = context
        self._addresses = DoorAddresses(access)
        self.endpoints = self._addresses.endpoints
        self._frontend = context.new_frontend("http", encoding=BINARY)
        protocol = open_inference(context, settings)
        self._protocols = list(_open_protocols(context, settings, protocol))
        self._http_frontend = HttpFrontend(
            self._frontend,
            protocol,
            core.table,
            access,
            clock=core.clock,
            metrics=core.metrics,
            max_body_bytes=settings.max_body_bytes,
            inflated_bytes=max(core.config.limits.message_bytes, settings.max_body_bytes),
            protocols=self._protocols,
        )
        self._transport: HttpTransport | None = None

    def start(self) -> None:
        """Bind, and answer from now on. Raises ConfigError, AddressTaken."""
        settings, core, descriptors = self._settings, self._context.core, self._context.descriptors
        listeners = self._addresses.bind()
        self._transport = HttpTransport(
            listeners,
            self._http_frontend,
            core.metrics,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_s,
            max_connections=descriptors.share(settings.max_connections),
            may_connect=descriptors.may_connect,
            total_bytes=max(core.infer.unanswered.total_bytes, settings.max_body_bytes),
            loop=self._context.loop if not self._addresses.is_tls else None,
        )
        self._http_frontend.attach(self._transport)
        self._transport.serve()
        log.info("http", extra={"endpoints": " ".join(self.endpoints)})
        self._show_pages()

    def _show_pages(self) -> None:
        """Say where a browser finds what: a page for people comes first."""
        urls = [each for each in self.endpoints if each.startswith("http")]
        path = next((each.page_path for each in self._protocols if isinstance(each, HasPage)), None)
        if path is None or not urls:
            self._context.status.pages += [f"{each}/v2" for each in urls]
            return
        self._context.status.pages[:0] = [f"{each}{path}" for each in urls]
        log.info("page", extra={"url": f"{urls[0]}{path}"})

    def ready(self) -> None:
        """Nothing: it answers from the start on."""

    def reload(self) -> None:
        """Read the tokens and the certificate again; a broken file keeps the old ones."""
        transport = self._transport
        if transport is not None:
            self._addresses.reload(lambda tls: transport.call(partial(transport.use_tls, tls)))
            transport.call(transport.forget_heads)

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests for inference, and wait until its thread does. Health is answered on."""
        if self._transport is not None:
            drain(self._transport.call, self._frontend, limit_s)

    def close(self) -> None:
        """Send the responses that are there and close every connection. Idempotent."""
        for each in self._protocols:
            try:
                each.close()
            except Exception:  # one of the broad catches: the others and the addresses are closed
                log.exception("a protocol did not close")
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()
        self._http_frontend.close()
        self._addresses.release()

    def status(self) -> Mapping[str, Any]:
        """Nothing of its own."""
        return {}

    def protocol(self, kind: type[OpenedProtocol]) -> OpenedProtocol | None:
        """Return the open protocol of a class; None where it is off."""
        return next((each for each in self._protocols if isinstance(each, kind)), None)


def _open_protocols(context: DoorContext, settings: Any, protocol: OpenInference) -> Iterator[HttpProtocol]:
    """Open those that a setting switches on, and those of plug-ins in use: one of these that fails is a state."""
    for name in plugins.names("protocols"):
        is_plugin = plugins.is_plugin("protocols", name)
        if not (is_plugin or _is_on(context, getattr(settings, name))):
            continue
        try:
            made: HttpProtocol = plugins.named(plugins.declared("protocols", name).opens)(context, protocol)
            _ = made.paths, made.open_calls
        except Exception as error:
            if not is_plugin:
                raise
            plugins.fail("protocols", name, error)
        else:
            yield made


def _is_on(context: DoorContext, setting: bool | None) -> bool:
    """Whether a protocol is answered: where the setting says nothing, on a door that only this machine reaches."""
    return all(each.is_this_machine for each in context.access["http"].addresses) if setting is None else setting
