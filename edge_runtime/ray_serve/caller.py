"""Asks a deployment of `deployment` by its handle: one answer or error by the deadline, whatever becomes of replicas.

Owns: the deadline, which counts from the ingress on; which errors another replica is asked after; and the cancellation
of requests whose caller has left. Thread: any; `infer_async` an event loop's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from edge_runtime.client.pictures import with_pictures
from edge_runtime.errors import DeadlineExceeded, Draining, EdgeRuntimeError, NotReady, QueueFull
from edge_runtime.messages import InferResult
from edge_runtime.ray_serve.instant import LONGEST_PAUSE_S, RETRY_S, Instant
from edge_runtime.tensors import Array, as_tensors

if TYPE_CHECKING:
    from edge_runtime.client.pictures import Picture

_SENDER = uuid.uuid4().hex
"""Of this process: callers of several processes have their turns in a replica's queue."""


def infer(
    handle: Any,
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
    began: Instant | None = None,
    multiplexed: bool = False,
) -> InferResult:
    """Run one request on a replica and wait for its answer, at most until its deadline.

    The request is sent to another replica where one ends or cannot be reached, while the deadline allows: running it
    twice does no harm. handle: of a deployment of `deployment`. began: when the request came in, None for now; the
    deadline is timeout_ms later, on whatever machine. multiplexed: prefer replicas that have the model loaded, of a
    deployment with `models_per_replica`. The others: as of `Runtime.infer`. Raises RequestError, Refused, RunFailed.
    Not within an event loop.
    """
    call = _ReplicaCall(handle, model, _options(raw, version, outputs, timeout_ms, priority, timing=timing), began)
    call.prepare(inputs, picture, pictures, multiplexed=multiplexed)
    for pause_s in call.pauses():
        time.sleep(pause_s)
        response = call.send()
        try:
            result: InferResult = response.result(timeout_s=call.wait_s())
        except TimeoutError:
            response.cancel()
        except (Exception, concurrent.futures.CancelledError) as error:  # noqa: BLE001 (`judge` raises it, or ours)
            call.judge(error)
        except BaseException:
            response.cancel()  # an interrupt: nobody waits for the answer
            raise
        else:
            return result
    raise call.ended()


async def infer_async(
    handle: Any,
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
    began: Instant | None = None,
    multiplexed: bool = False,
) -> InferResult:
    """Like `infer`, in an event loop, such as another deployment's. To cancel it takes the request back."""
    call = _ReplicaCall(handle, model, _options(raw, version, outputs, timeout_ms, priority, timing=timing), began)
    call.prepare(inputs, picture, pictures, multiplexed=multiplexed)
    for pause_s in call.pauses():
        await asyncio.sleep(pause_s)
        response = call.send()
        waiting = asyncio.ensure_future(_answer_of(response))
        try:
            await asyncio.wait({waiting}, timeout=call.wait_s())
        except asyncio.CancelledError:
            _leave(response, waiting)
            raise
        if not waiting.done():
            _leave(response, waiting)
        elif waiting.cancelled():  # by its replica, which ends
            call.judge(TaskCancelledError())
        elif (error := waiting.exception()) is not None:
            call.judge(error)
        else:
            return waiting.result()
    raise call.ended()


# ---- private --------------------------------------------------------------------------------------------------------


class _ReplicaCall:
    """One request until its answer: what is sent, how long it may take, and the last error."""

    def __init__(self, handle: Any, model: str, options: dict[str, Any], began: Instant | None) -> None:
        self._handle = handle
        self._model = model
        self._options = options
        self._began = began or Instant.now()
        self._inputs: dict[str, Array] = {}
        self._error: EdgeRuntimeError | None = None
        timeout_ms = options["timeout_ms"]
        self._timeout_s = math.inf if timeout_ms is None else timeout_ms / 1e3

    def prepare(
        self,
        inputs: Mapping[str, Any] | None,
        picture: Picture | None,
        pictures: Sequence[Picture] | Array | None,
        *,
        multiplexed: bool,
    ) -> None:
        """Make the arrays, and choose the method of the handle."""
        self._inputs = as_tensors(with_pictures(inputs, picture, pictures))
        options = {"multiplexed_model_id": self._model} if multiplexed else {}
        self._handle = self._handle.options(method_name="infer", **options)

    def pauses(self) -> Iterator[float]:
        """Pauses before each time that it is sent, while there is time for one more."""
        return self._began.tries(min(self._timeout_s, RETRY_S))

    def send(self) -> Any:
        """Send it to a replica that Serve chooses; a DeploymentResponse."""
        return self._handle.remote(self._model, self._inputs, self._began, _SENDER, self._options)

    def wait_s(self) -> float | None:
        """Seconds until its deadline; None without one."""
        return None if self._timeout_s == math.inf else max(self._timeout_s - self._began.age_s(), 0.0)

    def judge(self, error: BaseException) -> None:
        """Return where another replica may answer. Raises the error, ours as it was where it was raised."""
        own = _own_error(error)
        if own is None:
            raise error
        if not isinstance(own, _ReplicaEnded | Draining):
            raise own from None
        self._error = own

    def ended(self) -> EdgeRuntimeError:
        """Return the error of a request whose time is over."""
        if self._timeout_s - self._began.age_s() <= LONGEST_PAUSE_S or self._error is None:
            told = "" if self._error is None else f"; the last try ended so: {self._error.message}"
            return DeadlineExceeded(f"model {self._model} gave no answer within {self._timeout_s * 1e3:g} ms{told}")
        return self._error


class _ReplicaEnded(NotReady):
    """The replica that had the request ended, or cannot be reached."""


def _options(
    raw: bool | None,
    version: int | None,
    outputs: Sequence[str] | None,
    timeout_ms: float | None,
    priority: int,
    *,
    timing: bool,
) -> dict[str, Any]:
    """The options of `Runtime.submit`."""
    return {
        "raw": raw,
        "version": version,
        "outputs": outputs,
        "timeout_ms": timeout_ms,
        "priority": priority,
        "timing": timing,
    }


def _leave(response: Any, waiting: asyncio.Future[InferResult]) -> None:
    """Take a request back whose caller has left."""
    waiting.add_done_callback(lambda each: each.cancelled() or each.exception())  # else the loop logs its end
    response.cancel()
    waiting.cancel()


async def _answer_of(response: Any) -> InferResult:
    answer: InferResult = await response
    return answer


def _own_error(error: BaseException) -> EdgeRuntimeError | None:
    """An error of a response as one of ours; None where it is not."""
    if isinstance(error, EdgeRuntimeError):
        cause = getattr(error, "cause", None)  # of the class that Ray makes of both
        return cause if isinstance(cause, EdgeRuntimeError) else error
    if isinstance(error, BackPressureError):
        after_s = error.retry_after_s
        return QueueFull(str(error), retry_after_ms=None if after_s is None else after_s * 1e3)
    ended = ActorDiedError, ActorUnavailableError, TaskCancelledError, concurrent.futures.CancelledError
    if isinstance(error, ended):
        return _ReplicaEnded(f"the replica that had the request ended: {str(error).partition(chr(10))[0]}")
    return None
