"""The runtime in process: the daemon's core behind plain calls, without a socket, with the same rules and errors.

Owns: the core that it assembled. Thread: any; tiny models run on the caller's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edge_runtime.client import forks
from edge_runtime.client.pictures import with_pictures, with_raw
from edge_runtime.clock import Clock
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.core import Core
from edge_runtime.errors import Cancelled, ConfigError, EdgeRuntimeError
from edge_runtime.messages import InferResult, RequestHeader, TensorHeader, Timing
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import Request
from edge_runtime.tensors import Array, as_tensors, bits_to_values, datatype_name, values_to_bits

if TYPE_CHECKING:
    from edge_runtime.client.pictures import Picture

PLANS = 256
"""Bound of the kept plans: one for each combination of model, shapes and options in use."""

SENDER = "in process"
"""The sender of calls in this process: one, however many threads."""

CLOSE_S = 10.0
"""How long `close` answers admitted requests at most."""


class InferFuture(Future[InferResult]):
    """A pending answer. `cancel` takes the request back while it waits; a running request is answered.

    It is its request's reply, which `answer` or `refuse` ends.
    """

    user_id = ""
    writes_text = False

    def __init__(self) -> None:
        super().__init__()
        self.request: Request | None = None

    def cancel(self) -> bool:
        """Take the request back; False when it runs or is answered."""
        plan: RequestPlan | None = self.request.plan if self.request is not None else None
        return plan is not None and self.request is not None and plan.servable.cancel(self.request)

    def answer(self, request: Request) -> None:
        """Set the result from the request's outputs."""
        plan: RequestPlan = request.plan
        servable = plan.servable
        specs = servable.spec.outputs
        timing = Timing(request.queue_s * 1e3, request.run_s * 1e3, request.batch_rows) if plan.wants_timing else None
        selected = {
            specs[index].name: bits_to_values(specs[index].datatype, request.outputs[index]) for index in plan.outputs
        }
        answers = plan.answers(list(selected.values())) or ()
        self.set_result(InferResult(servable.model, servable.number, selected, timing, answers=tuple(answers)))

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Set the error."""
        if isinstance(error, Cancelled):
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_exception(error)


class Runtime:
    """Serve a folder of models inside this process.

    `Runtime("models/")` returns when every model is ready, failed or waits on demand; `models()` says which. Use it as
    a context manager, or call `close`. In the child of a fork every call raises RuntimeError. Raises ConfigError for a
    wrong configuration.
    """

    def __init__(
        self,
        models: str | Path = "models",
        *,
        config: Config | None = None,
        clock: Clock | None = None,
        core: Core | None = None,
    ) -> None:
        """core: parts that the caller assembled; `close` ends them all the same."""
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
        self._forks = forks.count
        self._core.start()
        self._core.wait_settled()
        self._core.loader.load_suspects()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
    ) -> InferResult:
        """Run one request and wait for its answer.

        inputs: arrays by name, whole shapes, axis 0 rows where the model batches. picture, pictures, raw: as
        `Client.infer`. timeout_ms: deadline from now, else the model's default. priority: 1 (first) to 9, 0 the model's
        default. Raises RequestError, Refused, RunFailed; OSError for a picture that cannot be read.
        """
        return self.submit(
            model,
            inputs,
            picture=picture,
            pictures=pictures,
            raw=raw,
            version=version,
            outputs=outputs,
            timeout_ms=timeout_ms,
            priority=priority,
            timing=timing,
        ).result()

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        longest_s: float = math.inf,
        sender: Hashable = SENDER,
    ) -> InferFuture:
        """Like `infer`, returning at once. A refusal is the future's exception, never raised here.

        longest_s: what is left of timeout_ms, where the request began before. sender: of several that share the queue,
        each in its turn.
        """
        self._check_process()
        future = InferFuture()
        try:
            arrays = as_tensors(with_pictures(inputs, picture, pictures))
            header = RequestHeader(
                model=model,
                version=version,
                inputs=tuple(TensorHeader(name, datatype_name(a.dtype), a.shape) for name, a in arrays.items()),
                outputs=None if outputs is None else tuple(outputs),
                timeout_ms=timeout_ms,
                priority=priority,
                timing=timing,
                parameters=with_raw(None, raw) or {},
            )
            given = [values_to_bits(array) for array in arrays.values()]
        except (EdgeRuntimeError, OSError) as error:
            future.set_exception(error)
            return future
        core = self._core
        nbytes = sum(array.nbytes for array in given)
        future.request = Request(header, given, nbytes, future, sender, core.clock.monotonic_s(), core.metrics)
        future.request.longest_s = longest_s
        key = (model, version, timeout_ms, priority, timing, raw, header.outputs, header.inputs)
        generation = core.table.generation
        kept = self._kept_plan(key, generation)
        plan = core.infer.submit(future.request, kept)
        if plan is not None and plan is not kept:
            self._keep_plan(key, plan, generation)
        return future

    @property
    def core(self) -> Core:
        """The parts behind this, for a caller that adds doors."""
        return self._core

    def models(self) -> list[dict[str, Any]]:
        """List every version: name, version, state, reason, backend, device, precision, mode, memory_bytes, host.

        What lies in the models folder and is not a version has version None, state "not_served", and its path.
        """
        return self._core.table.inventory()

    def load(self, model: str, version: int | None = None) -> None:
        """Load (again) from the folder and wait. Raises LoadFailed, ModelNotFound."""
        self._check_process()
        ended = Future[EdgeRuntimeError | None]()
        self._core.loader.load(model, version, ended.set_result)
        _raise_error(ended)

    def unload(self, model: str, version: int | None = None) -> None:
        """Unload, answering admitted requests first, and wait. Raises ModelNotFound."""
        self._check_process()
        ended = Future[EdgeRuntimeError | None]()
        self._core.loader.unload(model, version, ended.set_result)
        _raise_error(ended)

    def close(self) -> None:
        """Answer admitted requests, refuse the rest, free the memory. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._forks != forks.count:
                return  # the threads are the parent's
            self._core.infer.close()
            self._core.close(CLOSE_S)

    def __enter__(self) -> Runtime:  # noqa: PYI034 (typing.Self is 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _kept_plan(self, key: object, generation: int) -> RequestPlan | None:
        """Return the plan of an equal header, unless a version was published or withdrawn since. Thread: any."""
        with self._lock:
            if self._generation != generation or len(self._plans) >= PLANS:
                self._generation, self._plans = generation, {}
            return self._plans.get(key)

    def _keep_plan(self, key: object, plan: RequestPlan, generation: int) -> None:
        """Keep a plan. generation: the table's before the plan was made, for the table may have changed meanwhile."""
        with self._lock:
            if self._generation == generation:
                self._plans[key] = plan

    def _check_process(self) -> None:
        if self._forks != forks.count:
            raise forks.crossed()


def _raise_error(ended: Future[EdgeRuntimeError | None]) -> None:
    error = ended.result()
    if error is not None:
        raise error


def _with_models(config: Config, models: str) -> Config:
    from msgspec.structs import replace

    return replace(config, models=models)
