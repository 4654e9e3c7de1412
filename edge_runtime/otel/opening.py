"""From `[tracing]` to what sends a device's telemetry: its parts, wired to the core that serves.

Constructs; starts nothing. Imported only with `[tracing]`. Called by daemon/assemble.py.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
from typing import Any

from edge_runtime import __version__
from edge_runtime.addresses import read_proxy
from edge_runtime.config.settings import Config, TracingSettings
from edge_runtime.daemon.core import Core
from edge_runtime.otel.collector import Collector
from edge_runtime.otel.exporter import Exporter
from edge_runtime.otel.log_records import LogRecords
from edge_runtime.otel.store import BodyStore
from edge_runtime.otel.tracer import RequestTracer
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.logs import end_listening, listen_to_log


def open_tracing(core: Core) -> DeviceTelemetry:
    """Return what sends the telemetry of a core, whose requests are traced from now on. Raises ConfigError."""
    settings = core.config.tracing
    assert settings is not None
    return DeviceTelemetry(core, settings)


class DeviceTelemetry:
    """The telemetry of one daemon, from `start` to `close`."""

    def __init__(self, core: Core, settings: TracingSettings) -> None:
        collector = Collector(settings, read_proxy(core.config.proxy, core.config.no_proxy))
        level = None if settings.logs == "off" else logging.getLevelName(settings.logs.upper())
        self._logs = LogRecords(level, core.clock) if level is not None else None
        self._exporter = Exporter(
            collector,
            BodyStore(None if core.state is None else core.state / "telemetry", settings.store_bytes),
            _resource(core.config, settings, core.profile.name),
            metrics=core.metrics,
            busiest=core.busiest,
            host=HostProbe(),
            logs=self._logs,
            metrics_s=settings.metrics_s,
            clock=core.clock,
        )
        core.infer.tracer = RequestTracer(
            settings.rate, self._exporter, core.clock.monotonic_s, lambda name: bool(core.table.statuses_of(name))
        )

    def start(self) -> None:
        """Begin to send."""
        if self._logs is not None:
            listen_to_log(self._logs)
        self._exporter.start()

    def close(self) -> None:
        """Send what is left, or keep it, and stop. Idempotent."""
        if self._logs is not None:
            end_listening(self._logs)
        self._exporter.close()


def _resource(config: Config, settings: TracingSettings, profile: str) -> dict[str, Any]:
    """Describe this device, for everything that it sends (OpenTelemetry's conventions for resources)."""
    hostname = socket.gethostname()
    update, mqtt = config.update, config.table("mqtt")
    named = (settings.device_id, update.device_id if update is not None else None, getattr(mqtt, "device_id", None))
    return {
        "service.name": "edge-runtime",
        "service.version": __version__,
        "service.instance.id": next((each for each in named if each), hostname),
        "host.name": hostname,
        "host.arch": platform.machine(),
        "os.type": sys.platform,
        "edge_runtime.profile": profile,
        "edge_runtime.group": update.group if update is not None else None,
    }
