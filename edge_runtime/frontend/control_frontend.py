"""Every op but infer: what the daemon says of itself, load and unload; those of updates are update_frontend.py's.

Owns: the shapes of these results (wire v1). Thread: `answer` is called on a transport's thread; load and unload reply
from the loader's thread when finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import EdgeRuntimeError, NotReady
from edge_runtime.frontend.update_frontend import Reply, UpdateFrontend, Updates
from edge_runtime.model_spec import TensorSpec
from edge_runtime.serving.loader import Loader
from edge_runtime.serving.lobby import Guest, Lobby
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Servables
from edge_runtime.wire.codec import RequestHeader


class ControlFrontend:
    """Answers ops by name."""

    CONTROL_OPS: ClassVar[frozenset[str]] = UpdateFrontend.CONTROL_OPS | {"load", "unload"}
    OPS: ClassVar[frozenset[str]] = CONTROL_OPS | UpdateFrontend.OPS | {"live", "ready", "models", "metadata", "stats"}

    def __init__(
        self,
        servables: Servables,
        loader: Loader,
        lobby: Lobby,
        *,
        stats: Callable[[], dict[str, Any]],
        is_ready: Callable[[], bool],
        updates: Updates | None = None,
    ) -> None:
        """updates: None where none are configured."""
        self._servables = servables
        self._loader = loader
        self._lobby = lobby
        self._stats = stats
        self._is_ready = is_ready
        self._updates = UpdateFrontend(updates)

    def answer(self, header: RequestHeader, reply: Reply, *, max_frame_bytes: int) -> None:
        """Call `reply` exactly once with the op's result or an EdgeRuntimeError; raises EdgeRuntimeError instead.

        max_frame_bytes: the largest tensor that can come in where this was asked, which `metadata` states.
        """
        match header.op:
            case "live":
                reply(True)
            case "ready":
                reply(self._ready(header))
            case "models":
                reply(self._servables.listing())
            case "metadata":
                self._answer_metadata(header, reply, max_frame_bytes)
            case "stats":
                reply(self._stats())
            case "load":
                self._loader.load(header.model, header.version, lambda error: self._finished(header, reply, error))
            case "unload":
                self._loader.unload(header.model, header.version, lambda error: self._finished(header, reply, error))
            case _:
                self._updates.answer(header, reply)

    def _ready(self, header: RequestHeader) -> bool:
        if not header.model:
            return self._is_ready()
        try:
            self._servables.resolve(header.model, header.version)
        except EdgeRuntimeError:
            return False
        return True

    def _finished(self, header: RequestHeader, reply: Reply, error: EdgeRuntimeError | None) -> None:
        if error is not None:
            reply(error)
            return
        reply([entry for entry in self._servables.listing() if entry["name"] == header.model])

    def _answer_metadata(self, header: RequestHeader, reply: Reply, max_frame_bytes: int) -> None:
        """At once, or after the load of a model on demand, which this asks for like a request would."""
        try:
            reply(self._metadata(self._servables.resolve(header.model, header.version), max_frame_bytes))
        except NotReady:
            if not self._servables.is_coming(header.model, header.version):
                raise
            self._lobby.wait(
                header.model,
                Guest(enter=lambda: self._retry_metadata(header, reply, max_frame_bytes), fail=reply),
                arrived_s=0.0,
                timeout_s=math.inf,
                nbytes=0,
                priority=DEFAULT_PRIORITY,
            )
            if not self._servables.ask_again(header.model, header.version):
                self._lobby.open(header.model, None)

    def _retry_metadata(self, header: RequestHeader, reply: Reply, max_frame_bytes: int) -> None:
        try:
            reply(self._metadata(self._servables.resolve(header.model, header.version), max_frame_bytes))
        except EdgeRuntimeError as error:
            reply(error)

    def _metadata(self, servable: Servable, max_frame_bytes: int) -> dict[str, Any]:
        """OIP model metadata with the two limits a client needs."""
        versions = [each.number for each in self._servables.live() if each.model == servable.model]
        return {
            "name": servable.model,
            "versions": [str(number) for number in sorted(versions)],
            "platform": servable.layouts.narrow.backend,
            "inputs": [_tensor(spec) for spec in servable.spec.inputs],
            "outputs": [_tensor(spec) for spec in servable.spec.outputs],
            "version": servable.number,
            "batches": servable.batches,
            "max_batch_rows": servable.max_rows,
            "max_frame_bytes": max_frame_bytes,
        }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
