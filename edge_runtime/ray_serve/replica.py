"""One replica: a `Runtime` behind the methods that Ray Serve calls.

Owns: the runtime from its start to `close`, and whether the replica is healthy. http.py answers Serve's proxy.
Thread: the event loop of the replica's user code; loads, unloads and `close` beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import ray
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from edge_runtime.config.loading import config_kind
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import BackendError, EdgeRuntimeError
from edge_runtime.messages import InferResult
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.self_check import SelfCheck
from edge_runtime.ray_serve.autoscaler import FORECAST, RUN
from edge_runtime.ray_serve.http import HttpIngress
from edge_runtime.ray_serve.instant import Instant
from edge_runtime.ray_serve.self_questions import SelfQuestions
from edge_runtime.ray_serve.telemetry import ServeMetrics
from edge_runtime.tensors import Array
from edge_runtime.typed_toml import build

log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Between two health checks, by Serve's default."""


class Replica:
    """The callable of a deployment. `deployment` makes a class of it for each folder."""

    def __init__(self, models: str, settings: Mapping[str, Any], *, loads_asked_for: bool) -> None:
        """settings: those of `Config`, as plain values.

        loads_asked_for: a model is loaded at its first request, as `serve.multiplexed` says. Raises BackendError.
        """
        config = build(config_kind(settings), settings, "config")
        if loads_asked_for:
            config = replace(config, model_control="explicit")
        self._loads_asked_for = loads_asked_for
        self._runtime = Runtime(models, config=_with_cores(config))
        core = self._runtime.core
        self._has_served: set[str] = set()
        try:
            self._check_models({each.model for each in core.table.statuses()})
        except BackendError:
            self._runtime.close()
            raise
        self._self_check = SelfCheck(core.table, core.clock, CHECK_S, SelfQuestions(core))
        self._metrics = ServeMetrics(core)
        self._metrics.start()

    async def infer(
        self, model: str, inputs: Mapping[str, Array], began: Instant, sender: str, options: dict[str, Any]
    ) -> InferResult:
        """Run one request of `caller.infer`. When Serve cancels it, it leaves the queue."""
        if self._loads_asked_for:
            await self._load(model)
        self._metrics.last_sender = sender
        timeout_ms = options["timeout_ms"]
        longest_s = math.inf if timeout_ms is None else max(timeout_ms / 1e3 - began.age_s(), 0.0)
        future = self._runtime.submit(model, inputs, longest_s=longest_s, sender=sender, **options)
        return future.result() if future.done() else await asyncio.wrap_future(future)

    async def __call__(self, request: Request) -> Response:
        """Answer a request of Serve's proxy in the Open Inference Protocol."""
        call = self._http.begin(request)
        if self._loads_asked_for and call.model is not None:
            with contextlib.suppress(EdgeRuntimeError):  # the answer says so
                await self._load(call.model)
        return await call.answer(await request.body())

    async def loaded(self, model: str) -> LoadedModel:
        """Load a model for `serve.multiplexed`, which keeps what this returns."""
        await asyncio.to_thread(self._runtime.load, model)
        return LoadedModel(self._runtime, model)

    async def status(self) -> dict[str, Any]:
        """Tell of this replica: its process, its cores, its models as of `Runtime.models`, and their metrics."""
        core = self._runtime.core
        return {
            "pid": os.getpid(),
            "cores": core.dispatcher.cores,
            "models": self._runtime.models(),
            "metrics": core.metrics.snapshot(),
        }

    def check_health(self) -> None:
        """Raise BackendError where a model that answered fails in all its versions, or hangs."""
        if not self._loads_asked_for:
            self._check_models(self._has_served)
        if not self._self_check.is_alive():
            raise BackendError("a model does not answer any more; only a new process helps")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler how long a request would take that came now, and what of it is its run."""
        forecast_s, run_s = self._metrics.slowest_s()
        return {FORECAST: forecast_s * 1e3, RUN: run_s * 1e3}

    async def __del__(self) -> None:
        """Answer what was admitted, and end hosts. Called by Serve once no request is under way."""
        if not hasattr(self, "_metrics"):
            return  # it never started
        self._metrics.stop()
        if "_http" in self.__dict__:
            self._http.close()
        await asyncio.to_thread(self._runtime.close)

    # ---- private ----------------------------------------------------------------------------------------------------

    @cached_property
    def _http(self) -> HttpIngress:
        return HttpIngress(self._runtime.core, asyncio.get_running_loop())

    async def _load(self, model: str) -> None:
        """Have a model loaded; a caller that leaves meanwhile ends no load, which others wait for too."""
        await asyncio.shield(asyncio.ensure_future(self.loaded(model)))

    def _check_models(self, names: set[str]) -> None:
        """Raise BackendError where one of these models failed and no other version of it answers."""
        table = self._runtime.core.table
        ready = {each.model for each in table.live()}
        self._has_served |= ready
        for each in table.statuses():
            if each.state is VersionState.FAILED and each.model in names - ready:
                raise BackendError(f"model {each.model} version {each.number}: {each.reason or 'failed'}")


class LoadedModel:
    """A model that `serve.multiplexed` has loaded; it ends as Serve wants: by `__del__`."""

    def __init__(self, runtime: Runtime, model: str) -> None:
        self._runtime: Runtime | None = runtime
        self._model = model

    def __del__(self) -> None:
        """Unload it, once: Python calls this again, perhaps after the model was loaded anew."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            with contextlib.suppress(EdgeRuntimeError, RuntimeError):
                runtime.unload(self._model)


def _with_cores(config: Config) -> Config:
    """The settings with as many cores as Ray gave this replica; as they are where they say or Ray does not."""
    assigned = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
    if config.limits.cores is not None or assigned < 1:
        return config
    return replace(config, limits=replace(config.limits, cores=assigned))
