"""The runtime in process: the daemon's core behind plain calls, no socket, the same semantics and errors.

Owns: the core it assembled. Thread: every method may be called from any thread; tiny models run on the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import Core, assemble_core
from edge_runtime.errors import Cancelled, ConfigError, EdgeRuntimeError
from edge_runtime.messages import InferResult, Timing
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.serving.request_plan import RequestPlan, plan_request
from edge_runtime.serving.servable import Servable
from edge_runtime.tensors import Array, as_tensors, bits_to_values, datatype_name, values_to_bits
from edge_runtime.wire.codec import RequestHeader, TensorHeader

PLANS = 256
"""Checked headers that are kept; one for each combination of model, shapes and options in use."""

CLOSE_S = 10.0
"""`close` answers what was admitted for at most this long."""


class InferFuture(Future[InferResult]):
    """A pending answer. `cancel` takes the request back while it waits; once it runs, it is answered."""

    def __init__(self) -> None:
        super().__init__()
        self._servable: Servable | None = None
        self._request: Pending | None = None

    def cancel(self) -> bool:
        """Take the request back; False when it runs or is answered."""
        servable, request = self._servable, self._request
        return servable is not None and request is not None and servable.cancel(request)

    def admitted(self, servable: Servable, request: Pending) -> None:
        """The request is about to be submitted there; from now on it can be taken back."""
        self._servable, self._request = servable, request

    def settle(self, outcome: InferResult | EdgeRuntimeError) -> None:
        """End it, once."""
        if isinstance(outcome, Cancelled):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif isinstance(outcome, EdgeRuntimeError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


class _Call:
    """One call on its way in."""

    __slots__ = ("_given", "_runtime", "arrived_s", "future", "header", "nbytes", "used_plan")

    def __init__(
        self, runtime: Runtime, header: RequestHeader, given: list[Array], arrived_s: float, future: InferFuture
    ) -> None:
        self._runtime = runtime
        self._given = given
        self.header = header
        self.nbytes = sum(array.nbytes for array in given)
        self.arrived_s = arrived_s
        self.future = future
        self.used_plan: RequestPlan | None = None

    def plan(self) -> RequestPlan:
        return self._runtime.plan(self.header)

    def request(self, plan: RequestPlan) -> Pending:
        self.used_plan = plan
        request = Pending(
            [self._given[index] for index in plan.order], plan.rows, self.nbytes, plan.shape, plan.priority,
            self.arrived_s, plan.timeout_s, _settle, self,
        )  # fmt: skip
        self.future.admitted(plan.servable, request)
        return request

    def refuse(self, error: EdgeRuntimeError) -> None:
        self.future.settle(error)

    def resume(self, enter: Callable[[], None]) -> None:
        enter()


class Runtime:
    """Serve a folder of models inside this process.

    `Runtime("models/")` returns when every model is ready, failed or waits on demand; `models()` says which. Use it as
    a context manager, or call `close`. Raises ConfigError for a wrong configuration.
    """

    def __init__(
        self,
        models: str | Path = "models",
        *,
        config: Config | None = None,
        clock: Clock | None = None,
        core: Core | None = None,
    ) -> None:
        """core: what serves, where somebody has assembled it already; `close` ends it all the same."""
        if core is None:
            if not Path(models).is_dir():
                raise ConfigError(
                    f"models: there is no folder {str(models)!r}; wanted one that holds <name>/<version>/model.onnx"
                )
            core = assemble_core(_with_models(config or Config(watch=False), str(models)), clock)
        self._core = core
        self._lock = threading.Lock()
        self._plans: dict[object, RequestPlan] = {}
        self._generation = -1
        self._is_closed = False
        self._core.start()
        self._core.wait_settled()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
    ) -> InferResult:
        """Run one request and wait for its answer.

        inputs: arrays by name, whole shapes, axis 0 rows where the model batches. timeout_ms: deadline from now, else
        the model's default. priority: 1 (first) to 9, 0 the model's default. Raises RequestError, Refused, RunFailed.
        """
        return self.submit(
            model, inputs, version=version, outputs=outputs, timeout_ms=timeout_ms, priority=priority, timing=timing
        ).result()

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
    ) -> InferFuture:
        """Like `infer`, returning at once. A refusal is the future's exception, never raised here."""
        future = InferFuture()
        try:
            arrays = as_tensors(inputs)
            header = RequestHeader(
                model=model,
                version=version,
                inputs=tuple(TensorHeader(name, datatype_name(a.dtype), a.shape) for name, a in arrays.items()),
                outputs=None if outputs is None else tuple(outputs),
                timeout_ms=timeout_ms,
                priority=priority,
                timing=timing,
            )
            given = [values_to_bits(array) for array in arrays.values()]
            self._core.infer.submit(_Call(self, header, given, self._core.clock.monotonic_s(), future))
        except EdgeRuntimeError as error:
            future.set_exception(error)
        return future

    @property
    def core(self) -> Core:
        """The parts behind this, for who puts more before them than calls."""
        return self._core

    def models(self) -> list[dict[str, Any]]:
        """Every version known: name, version, state, reason, backend, device, precision, mode, memory_bytes."""
        return self._core.servables.listing()

    def load(self, model: str, version: int | None = None) -> None:
        """Load (again) from the folder and wait. Raises LoadFailed, ModelNotFound."""
        self._control(lambda done: self._core.loader.load(model, version, done))

    def unload(self, model: str, version: int | None = None) -> None:
        """Unload, answering what was admitted, and wait. Raises ModelNotFound."""
        self._control(lambda done: self._core.loader.unload(model, version, done))

    def close(self) -> None:
        """Answer what was admitted, refuse the rest, give the memory back. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._core.infer.close()
            self._core.close(CLOSE_S)

    def __enter__(self) -> Runtime:  # noqa: PYI034 (typing.Self is 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- private ----------------------------------------------------------------------------------------------------

    def plan(self, header: RequestHeader) -> RequestPlan:
        """A header checked against the live servable, kept for the next request like it. Thread: any."""
        parameters = (header.model, header.version, header.timeout_ms, header.priority, header.timing)
        key = (*parameters, header.outputs, header.inputs)
        servables = self._core.servables
        generation = servables.generation
        with self._lock:
            if self._generation != generation or len(self._plans) >= PLANS:
                self._generation, self._plans = generation, {}
            plan = self._plans.get(key)
        if plan is None:
            plan = plan_request(servables, header)
            with self._lock:
                if self._generation == generation:
                    self._plans[key] = plan
        return plan

    def _control(self, start: Any) -> None:
        done: Future[None] = Future()

        def finish(error: EdgeRuntimeError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        start(finish)
        done.result()


def _settle(request: Pending, outcome: Outcome) -> None:
    call: _Call = request.tag  # type: ignore[assignment]
    plan = call.used_plan
    assert plan is not None
    servable = plan.servable
    if not isinstance(outcome, Answer):
        servable.metrics.refused(outcome.code)
        call.future.settle(outcome)
        return
    specs = servable.spec.outputs
    timing = Timing(outcome.queue_s * 1e3, outcome.run_s * 1e3, outcome.batch_rows) if plan.wants_timing else None
    selected = {
        specs[index].name: bits_to_values(specs[index].datatype, outcome.outputs[index]) for index in plan.outputs
    }
    servable.metrics.answered(outcome.queue_s, outcome.run_s)
    call.future.settle(InferResult(servable.model, servable.number, selected, timing))


def _with_models(config: Config, models: str) -> Config:
    from msgspec.structs import replace

    return replace(config, models=models)
