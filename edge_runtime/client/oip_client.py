"""The client over HTTP and gRPC: arrays in, arrays out, to any server of the Open Inference Protocol.

Owns: what the methods of a client are in that protocol's words. http_link.py and grpc_link.py carry them.
The public name is `OipClient`. gRPC needs the `grpc` extra.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import PICTURE_SIZE, answers_of
from edge_runtime.client.core import MAX_IN_FLIGHT, READY_POLL_S, SLACK_S
from edge_runtime.client.frames import (
    Options,
    arrays,
    check_destinations,
    fill_destination,
    fit_datatypes,
    tensor_frame,
)
from edge_runtime.client.in_flight import acquire, all_in_flight, closed
from edge_runtime.client.near_misses import advised, checked_options
from edge_runtime.client.oip_call import OipCall, OipLink, OipReply
from edge_runtime.client.pictures import with_pictures, with_raw
from edge_runtime.client.retries import ask_until_due
from edge_runtime.config.oip_url import OipAccess, oip_access
from edge_runtime.errors import ConfigError, EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.messages import PICTURE, InferResult, TensorHeader, Timing
from edge_runtime.steps import ModelSteps, steps_from_fields
from edge_runtime.tensors import Array, datatype_name
from edge_runtime.wire.operations import DEFAULT_WAIT_S, OPERATIONS

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture

__all__ = ["OipClient"]

END_S = 2.0
"""How long `close`, and the interpreter's exit, wait for calls that were interrupted: one may still connect."""


class OipClient:
    """A connection to a server of the Open Inference Protocol; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    url: `http[s]://host[:port]`, `grpc[s]://host[:port]`, `http+unix:///path` or `grpc+unix:///path`. token_file:
    holds a token on its first line; None for `$EDGE_RUNTIME_TOKEN`. ca_file, cert_file, key_file: PEM files for TLS.
    timeout_ms: for requests that name none; None: the model's default. max_in_flight: the most requests in flight.

    Errors of every call: the EdgeRuntimeError that the server answered, rebuilt (`errors.py`); TimeoutError without an
    answer within timeout_ms + 1 s (30 s without a timeout); ConnectionError when nothing listens, or the connection is
    lost before the answer. Operations that the protocol does not have raise Unsupported.

        with OipClient("http://127.0.0.1:8000") as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=20)["scores"]
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        access = oip_access(url, token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        self.endpoint = access.address.url
        self._link = _link(access)
        self._is_grpc = access.address.protocol == "grpc"
        self._timeout_ms = timeout_ms
        self._metadata: dict[tuple[str, int | None], Mapping[str, Any]] = {}
        self._most = max_in_flight
        self._slots = _Slots(max_in_flight)
        self._threads = _CallThreads()
        self._is_closed = False
        weakref.finalize(self, _end, self._link, self._threads)  # at exit, too: no call may hold that up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the connections, end the threads. Idempotent. Thread: any."""
        self._is_closed = True
        _end(self._link, self._threads)

    # ---- inference --------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
        cast: bool = False,
        retry: bool = False,
    ) -> InferResult:
        """Run a model once and wait for the answer, as `Client.infer`. Thread: any; it waits itself.

        parameters: bool, int, float and str, which is what the protocol carries.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = self._with_pictures(model, version, inputs, picture, pictures), with_raw(parameters, raw)

        def ask(options: Options) -> InferResult:
            call, destinations = self._call_of(model, inputs, options, parameters, outputs, cast=cast)
            try:
                self._take_slot(call)
                return self._answer(call, destinations)
            except TensorMismatch as error:
                with contextlib.suppress(EdgeRuntimeError, ConnectionError, TimeoutError):
                    error = advised(error, arrays(inputs)[0], self._known_metadata(model, version))
                raise error from None
            finally:
                self._slots.free(call)

        return ask_until_due(options, ask) if retry else ask(options)

    def submit(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
        cast: bool = False,
    ) -> Future[InferResult]:
        """Send a request and return at once; the future gets the result or the error of `infer`. Thread: any.

        Large arrays are sent from their own memory: leave them unchanged until the future is done. Blocks while
        `max_in_flight` requests are pending (TimeoutError after this one's own wait). Each request in flight has a
        thread of the client, on which callbacks run.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = self._with_pictures(model, version, inputs, picture, pictures), with_raw(parameters, raw)
        call, destinations = self._call_of(model, inputs, options, parameters, outputs, cast=cast)
        future = Future[InferResult]()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                self._slots.free(call)
                return
            try:
                result = self._answer(call, destinations)
            except BaseException as error:  # noqa: BLE001 (whatever it is, it belongs to the future)
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            self._take_slot(call)
            self._threads.run(answer)
        except BaseException:
            self._slots.free(call)
            raise
        return future

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make a zeroed array, as `Client.allocate`, but an ordinary one."""
        return np.zeros(shape, dtype)

    # ---- the server and its models ----------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Return whether the server answers."""
        return self._says("server_live", "live")

    def is_ready(self, model: str = "") -> bool:
        """Return whether the server, or one model, can answer inference; False when the server does not answer."""
        return self._says("model_ready" if model else "server_ready", "ready", model=model)

    def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the server, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        while not self.is_ready(model):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{model or 'the server'} at {self.endpoint} was not ready within {limit_s:.1f} s")
            time.sleep(READY_POLL_S)

    # ---- operations: begin (made by tests/architecture/operation_texts.py from wire/operations.py) -------------------

    def models(self) -> list[dict[str, Any]]:
        """List every version that the daemon knows, and each file of its models folder that it does not serve."""
        return cast("list[dict[str, Any]]", self._call("models"))

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe what a model takes and gives."""
        return cast("dict[str, Any]", self._call("metadata", model=model, version=version))

    def model_config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe a loaded model as Triton's ModelConfig."""
        return cast("dict[str, Any]", self._call("model_config", model=model, version=version))

    def model_statistics(self, model: str | None = None, version: int | None = None) -> list[dict[str, Any]]:
        """Tell what loaded models have done, in Triton's words."""
        return cast("list[dict[str, Any]]", self._call("model_statistics", model=model, version=version))

    def stats(self) -> dict[str, Any]:
        """Tell counters, latencies by model, memory and uptime."""
        return cast("dict[str, Any]", self._call("stats"))

    def load(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Load a model, or one version, anew, and wait until it is ready."""
        return self._call("load", timeout_ms, model=model, version=version)

    def unload(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Take a model, or one version, out of service."""
        return self._call("unload", timeout_ms, model=model, version=version)

    def update_status(self) -> dict[str, Any]:
        """Tell what runs by updates, what is under way, what was refused and why, and how the last check ended."""
        return cast("dict[str, Any]", self._call("update_status"))

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last events of updates, newest first."""
        return cast("list[dict[str, Any]]", self._call("update_history", count=count))

    def update_check(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now what the repository offers, and install nothing."""
        return cast("dict[str, Any]", self._call("update_check", timeout_ms))

    def update_apply(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now and install what is meant for this device."""
        return cast("dict[str, Any]", self._call("update_apply", timeout_ms))

    def update_import(self, folder: str | os.PathLike[str], *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Install from a folder, such as a USB stick."""
        return cast("dict[str, Any]", self._call("update_import", timeout_ms, folder=folder))

    def update_rollback(self, model: str, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Let the release before serve again, and refuse the current one."""
        return cast("dict[str, Any]", self._call("update_rollback", timeout_ms, model=model))

    # ---- operations: end ---------------------------------------------------------------------------------------------

    # ---- private ----------------------------------------------------------------------------------------------------

    def _options(
        self,
        version: int | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        timeout_ms: float | None,
        priority: int,
        timing: bool,
    ) -> Options:
        timeout_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        return checked_options(version, outputs, timeout_ms, priority, timing=timing)

    def _call_of(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        options: Options,
        parameters: Mapping[str, Any] | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        *,
        cast: bool,
    ) -> tuple[OipCall, Mapping[str, Array]]:
        """Raises Unsupported and TensorMismatch for what cannot be sent."""
        tensors, guessed = arrays(inputs)
        if guessed or cast:
            fit_datatypes(tensors, list(tensors) if cast else guessed, self._known_metadata(model))
        sent = dict(parameters or {})
        if unknown := [name for name, value in sent.items() if not isinstance(value, bool | int | float | str)]:
            raise Unsupported(f"parameter {unknown[0]!r}: the Open Inference Protocol carries bool, numbers and text")
        if options.timeout_ms is not None:
            sent["timeout_ms"] = float(options.timeout_ms)
        if options.priority:
            sent["priority"] = options.priority
        if options.timing:
            sent["timing"] = True
        call = OipCall(
            model,
            options.version,
            [(name, datatype_name(each.dtype), each.shape, tensor_frame(name, each)) for name, each in tensors.items()],
            options.outputs,
            sent,
            _wait_s(options.timeout_ms),
        )
        return call, check_destinations(outputs)

    def _with_pictures(
        self,
        model: str,
        version: int | None,
        inputs: Mapping[str, npt.ArrayLike] | None,
        picture: Picture | None,
        pictures: Sequence[Picture] | Array | None,
    ) -> Mapping[str, npt.ArrayLike]:
        """The inputs with the picture under the name that this model has for it: not every server knows another."""
        if picture is None and pictures is None:
            return with_pictures(inputs, None, None)
        name = next(iter(self._steps(model, version).inputs), PICTURE)
        return with_pictures(inputs, picture, pictures, name)

    def _answer(self, call: OipCall, destinations: Mapping[str, Array]) -> InferResult:
        """Send a call that has a slot, and give the slot back."""
        try:
            result = _result(self._link.infer(call), destinations)
        except TensorMismatch:
            self._forget(call.model)  # another version may serve now, which takes something else
            raise
        finally:
            self._slots.free(call)
        if self._gives_answers(call, result):
            answers = answers_of(self._steps(result.model, result.version or None), result.outputs)
            result = replace(result, answers=tuple(answers))
        return result

    def _gives_answers(self, call: OipCall, result: InferResult) -> bool:
        """Whether outputs are answers, which the protocol does not say: by what was sent, and how it is read."""
        raw = call.parameters.get("raw")
        if raw is not None:
            return raw is False
        known = self._metadata.get((call.model, call.version), {}).get("steps", {}).get("inputs", ())
        is_picture = any(name in known and kind in ("BYTES", "UINT8") for name, kind, *_ in call.inputs)
        return is_picture or PICTURE_SIZE in result.outputs

    def _steps(self, model: str, version: int | None) -> ModelSteps:
        """The steps that a version declares, asked once."""
        fields = self._known_metadata(model, version).get("steps")
        return ModelSteps() if fields is None else steps_from_fields(fields)

    def _take_slot(self, call: OipCall) -> None:
        self._link.check_process()
        if self._is_closed:
            raise closed()
        if not self._slots.take(call):
            raise all_in_flight(self._most, call.wait_s)

    def _known_metadata(self, model: str, version: int | None = None) -> Mapping[str, Any]:
        """Return a model's metadata, fetched once."""
        found = self._metadata.get((model, version))
        if found is None:
            found = self._metadata[model, version] = self.metadata(model, version)
        return found

    def _forget(self, model: str) -> None:
        for known in [each for each in list(self._metadata) if each[0] == model]:
            self._metadata.pop(known, None)

    def _says(self, name: str, field: str, **values: Any) -> bool:
        try:
            return bool(self._ask(name, **values).get(field, True))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _call(self, name: str, timeout_ms: float | None = None, **values: Any) -> Any:
        """Call an operation of ours in the protocol's words. Raises Unsupported for one that it has no words for."""
        known: Mapping[str, Callable[..., Any]] = {
            "models": self._entries,
            "metadata": self._describe,
            "model_config": self._configuration,
            "model_statistics": self._statistics,
            "stats": self._count,
            "load": self._load,
            "unload": self._unload,
        }
        if name not in known:
            raise Unsupported(
                f"the Open Inference Protocol has no {name} (asked of {self.endpoint}); ask over ZeroMQ, at an "
                "ipc:// or tcp:// endpoint"
            )
        wait_s = OPERATIONS[name].wait_s if timeout_ms is None else timeout_ms / 1e3 + SLACK_S
        return known[name](wait_s, **values)

    def _entries(self, wait_s: float) -> list[dict[str, Any]]:
        return [_entry(each) for each in self._ask("repository_index", wait_s=wait_s)]

    def _describe(self, wait_s: float, model: str, version: int | None) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("model_metadata", wait_s=wait_s, model=model, version=version)
        if self._is_grpc:  # whose ModelMetadata has no place for steps
            with contextlib.suppress(EdgeRuntimeError):  # an extension, which not every server has
                parameters = self._configuration(wait_s, model, version).get("parameters") or {}
                for name in ("steps", "preset", "pipeline"):
                    if name in parameters:
                        found[name] = json.loads(parameters[name]["string_value"])
        return found if version is None else {**found, "version": version}

    def _configuration(self, wait_s: float, model: str, version: int | None) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("model_config", wait_s=wait_s, model=model, version=version)
        return found

    def _statistics(self, wait_s: float, model: str | None, version: int | None) -> list[dict[str, Any]]:
        found = self._ask("model_statistics", wait_s=wait_s, model=model, version=version)
        return list(found.get("model_stats") or ())

    def _count(self, wait_s: float) -> dict[str, Any]:
        server = self._ask("server_metadata", wait_s=wait_s)
        counts: Sequence[Mapping[str, Any]] = ()
        with contextlib.suppress(EdgeRuntimeError):  # an extension, which not every server has
            counts = self._statistics(wait_s, None, None)
        return {
            "version": f"{server.get('name', '')} {server.get('version', '')}".strip(),
            "ready": self.is_ready(),
            "models": self._entries(wait_s),
            "metrics": {"models": _numbers(counts)},
        }

    def _load(self, wait_s: float, model: str, version: int | None) -> list[dict[str, Any]]:
        return self._changed("repository_load", wait_s, model, version)

    def _unload(self, wait_s: float, model: str, version: int | None) -> list[dict[str, Any]]:
        return self._changed("repository_unload", wait_s, model, version)

    def _changed(self, name: str, wait_s: float, model: str, version: int | None) -> list[dict[str, Any]]:
        if version is not None:
            raise Unsupported(
                "the Open Inference Protocol loads and unloads whole models; name no version, or use ZeroMQ"
            )
        self._forget(model)
        self._ask(name, wait_s=wait_s, model=model)
        return [each for each in self._entries(wait_s) if each["name"] == model]

    def _ask(self, name: str, wait_s: float | None = None, **values: Any) -> Any:
        if self._is_closed:
            raise closed()
        return self._link.ask(name, values, _wait_s(self._timeout_ms) if wait_s is None else wait_s)


class _Slots:
    """The calls in flight, `most` at once. Thread: any, also in a signal's handler in the middle of another call.

    Invariant: the lock is taken by `with` alone. An interrupt may leave the lock inside a `threading.Semaphore` held.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._taken: set[int] = set()  # ids of calls
        self._waiting: deque[threading.Lock] = deque()

    def take(self, call: OipCall) -> bool:
        """Give a call a slot; False when none was free within its wait. An interrupt leaves it to `free`."""
        end_s, is_open = time.monotonic() + call.wait_s, True
        while True:
            with self._lock:
                if len(self._taken) < self._most:
                    self._taken.add(id(call))
                    return True
                if not is_open:
                    return False
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
            try:
                is_open = acquire(gate, end_s - time.monotonic())
            finally:
                with contextlib.suppress(ValueError):  # it was opened
                    self._waiting.remove(gate)

    def free(self, call: OipCall) -> None:
        """Take back its slot, if it has one, and let the next call look. Idempotent."""
        with self._lock:
            self._taken.discard(id(call))
        with contextlib.suppress(IndexError):  # none waits
            self._waiting.popleft().release()


class _CallThreads:
    """The threads that wait for submitted calls: as many as there are calls. Thread: any."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Callable[[], None]) -> None:
        """Run it on a thread that is free, else on a new one."""
        try:
            self._idle.get_nowait()
        except Empty:
            # Daemons: the interpreter's exit would wait for all others before anything could interrupt them.
            thread = threading.Thread(target=self._serve, args=(self._work, self._idle), name="edge-oip", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._work.put(work)

    def end(self) -> None:
        """End them when they are free, and wait a while for the others. Thread: any, also one of them."""
        self._work.put(None)
        end_s = time.monotonic() + END_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end_s - time.monotonic(), 0.0))

    @staticmethod
    def _serve(work: SimpleQueue[Callable[[], None] | None], idle: SimpleQueue[None]) -> None:
        """Body of each; holds no client while it is free."""
        while (each := work.get()) is not None:
            each()
            del each
            idle.put(None)
        work.put(None)  # for the next thread


def _end(link: OipLink, threads: _CallThreads) -> None:
    link.close()
    threads.end()


def _link(access: OipAccess) -> OipLink:
    if access.address.protocol == "http":
        from edge_runtime.client.http_link import HttpLink

        return HttpLink(access)
    try:
        from edge_runtime.client.grpc_link import GrpcLink
    except ImportError as error:
        raise ConfigError(f"{access.address.url}: {error}; install it with: pip install 'edge-runtime[grpc]'") from None
    return GrpcLink(access)


def _wait_s(timeout_ms: float | None) -> float:
    return DEFAULT_WAIT_S if timeout_ms is None else max(timeout_ms, 0.0) / 1e3 + SLACK_S


def _result(answer: OipReply, destinations: Mapping[str, Array]) -> InferResult:
    outputs: dict[str, Array] = {}
    for each in answer.outputs:
        array, destination = each.array(), destinations.get(each.name)
        if destination is not None:
            array = fill_destination(TensorHeader(each.name, each.datatype, each.shape), destination, array)
        outputs[each.name] = array
    told = answer.parameters
    timing = None
    if "run_ms" in told:
        timing = Timing(float(told["queue_ms"]), float(told["run_ms"]), int(told["batch_rows"]))
    version = int(answer.version) if answer.version.isdigit() else 0
    return InferResult(answer.model, version, outputs, timing)


def _entry(told: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the repository's index as `models` has it."""
    version = str(told.get("version") or "")
    return {
        **told,
        "name": told.get("name", ""),
        "version": int(version) if version.isdigit() else version,
        "state": str(told.get("state") or "").lower(),
        "reason": told.get("reason") or "",
    }


def _numbers(stats: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the protocol's statistics say of each model, under the names of `stats`; versions together."""
    found: dict[str, dict[str, Any]] = {}
    for told in stats:
        times = told.get("inference_stats") or {}
        success, queue = times.get("success") or {}, times.get("queue") or {}
        numbers = found.setdefault(str(told.get("name", "")), dict.fromkeys(("answered", "failed", "rows", "runs"), 0))
        numbers["answered"] += int(success.get("count", 0))
        numbers["failed"] += int((times.get("fail") or {}).get("count", 0))
        numbers["rows"] += int(told.get("inference_count", 0))
        numbers["runs"] += int(told.get("execution_count", 0))
        for name, each in (("total_ms", success), ("queue_ms", queue)):
            if int(each.get("count", 0)):
                numbers[name] = {"mean": int(each.get("ns", 0)) / int(each["count"]) / 1e6}
        if numbers["runs"]:
            numbers["batch_rows"] = {"mean": numbers["rows"] / numbers["runs"]}
    return found
