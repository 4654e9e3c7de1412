"""The settings of `[grpc]`."""

from __future__ import annotations

from edge_runtime.doors.access.settings import DoorSettings


class GrpcSettings(DoorSettings, frozen=True, forbid_unknown_fields=True):
    """The Open Inference Protocol over gRPC; see [HTTP and gRPC](http.md)."""
