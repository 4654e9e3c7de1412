"""The settings of `[http]`, described below each field as in config/settings.py."""

from __future__ import annotations

from edge_runtime.config.settings import DoorSettings


class HttpSettings(DoorSettings, frozen=True, forbid_unknown_fields=True):
    """The Open Inference Protocol over HTTP; see [HTTP and gRPC](http.md)."""

    strict_readiness: bool = False
    """Whether one model that failed to load makes the daemon not ready, as with Triton."""

    torchserve: bool = False
    """Whether TorchServe's paths are answered too (`--torchserve`): `/predictions/NAME`, `/ping`, `/models`; see
    [From TorchServe](from-torchserve.md)."""

    torchserve_hosts: tuple[str, ...] = ()
    """Servers, `"host"` or `"host:port"`, whose archives `POST /models?url=https://host/NAME.mar` takes into the models
    folder, where control is allowed. When empty: no archive is fetched."""
