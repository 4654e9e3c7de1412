"""Telemetry that a device sends to OpenTelemetry's collectors: traces of requests, metrics, and the log."""

from __future__ import annotations

from edge_runtime.daemon.parts import PartDeclaration

PART = PartDeclaration("tracing", "edge_runtime.otel.opening:open_tracing", extra="")
