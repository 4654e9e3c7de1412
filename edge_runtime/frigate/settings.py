"""The settings of `[frigate]`, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from edge_runtime.config.settings import Place, Positive, PositiveFloat


class FrigateSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The door for Frigate's ZeroMQ detectors; see [Frigate](frigate.md)."""

    endpoint: str | None = None
    """Where it listens: `"ipc:///tmp/cache/zmq_detector"`, as Frigate's plugin has it, or `"tcp://host:port"`. When
    absent: nowhere."""

    models: dict[str, Place] = field(default_factory=dict)
    """Served models by the name that Frigate asks for, its model file's: `{"yolo.onnx" = "yolo"}`."""

    accept_models: bool = False
    """Take the models that detectors send, and run each in a host. Nothing is taken while `update.require_signed`
    holds."""

    max_model_bytes: Positive = 256 << 20
    """Largest model that is taken; a connection that sends more is closed. Detectors use models of 5 to 150 MB."""

    keep_models: Annotated[int, Meta(ge=1, le=64)] = 4
    """Most models kept in the state folder; the one that was used longest ago and no detector is connected with
    leaves."""

    timeout_ms: PositiveFloat = 180.0
    """Deadline of a detection: below the plugin's `request_timeout_ms`, 200, after which it connects anew and sends its
    model again."""

    insecure: bool = False
    """Allow TCP beyond this machine: everyone who can connect may use the mapped models, and send some."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not (self.models or self.accept_models):
            raise ValueError("endpoint without a model to answer by; say accept_models = true, or models = {…}")
