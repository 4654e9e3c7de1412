"""The client over HTTP and gRPC: arrays in, arrays out, to any server of the Open Inference Protocol.

Owns: what the methods of a client are in that protocol's words, and the threads of submitted calls. doors/http/link.py
and doors/grpc/link.py carry the calls. The public name is `OipClient`. gRPC needs the `grpc` extra.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from edge_runtime.client.blocking_client import ControllingClient
from edge_runtime.client.core import MAX_IN_FLIGHT, SLACK_S, ClientCore, Flow, wait_for_s
from edge_runtime.client.frames import (
    CallPlaces,
    Options,
    cut_traceparent,
    fill_destination,
    read_answers,
    tensor_frame,
    with_sequence,
)
from edge_runtime.client.in_flight import NEVER_S, Call, InFlight, acquire, all_in_flight, closed
from edge_runtime.doors.open_inference.client_call import OipCall, OipLink, OipQuestion, OipReply
from edge_runtime.doors.open_inference.url import OipAccess, oip_access
from edge_runtime.errors import ConfigError, EdgeRuntimeError, Unsupported
from edge_runtime.extras import install_advice
from edge_runtime.messages import InferResult, TensorHeader, Timing
from edge_runtime.operations import Operation
from edge_runtime.tensors import Array, datatype_name

__all__ = ["OipClient"]

END_S = 2.0
"""How long `close`, and the interpreter's exit, wait for calls that were interrupted: one may still connect."""


class OipClient(ControllingClient):
    """A connection to a server of the Open Inference Protocol; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    url: `http[s]://host[:port]`, `grpc[s]://host[:port]`, `http+unix:///path` or `grpc+unix:///path`. token_file:
    holds a token on its first line; None for `$EDGE_RUNTIME_TOKEN`. ca_file, cert_file, key_file: PEM files for TLS.
    timeout_ms: for requests that name none; None: the model's default. max_in_flight: the most requests in flight.

    Errors of every call: the EdgeRuntimeError that the server answered, rebuilt (`errors.py`); TimeoutError without an
    answer within timeout_ms + 1 s (30 s without a timeout); ConnectionError when nothing listens, or the connection is
    lost before the answer; Unsupported for operations that the protocol does not have, and for parameters other than
    bool, numbers and text. Each submitted request in flight has a thread of the client, on which its callbacks run.

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
        self._core = ClientCore(timeout_ms, OpenInferenceCalls(self.endpoint, access.address.protocol == "grpc"))
        self._slots = _Slots(max_in_flight)
        self._threads = _CallThreads()
        self._is_closed = False
        weakref.finalize(self, _end, self._link, self._threads)  # at exit, too: no call may hold that up

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the connections, end the threads. Idempotent. Thread: any."""
        self._is_closed = True
        _end(self._link, self._threads)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _ask(self, call: Call) -> Any:
        request = call.oip
        assert request is not None
        if self._is_closed:
            raise closed()
        if isinstance(request, OipQuestion):
            return self._link.ask(request, call.wait_s)
        if call.parts is not None:
            return self._first_part(call)
        try:
            if not self._slots.has(call):  # else it was submitted
                self._take_slot(call)
            return call.decode(self._link.infer(request, call.wait_s))
        finally:
            self._slots.free(call)

    def _first_part(self, call: Call) -> Any:
        try:
            self._take_slot(call)
            call.replies = self._link.stream(call.oip, call.wait_s, is_whole=call.timeout_ms is not None)
            return self._next_part(call)
        except BaseException:
            self._leave(call)
            raise

    def _next_part(self, call: Call) -> Any:
        found: OipReply | None = call.replies.next()
        number = call.taken
        call.taken += 1
        if found is None or found.final:
            self._leave(call)
        if found is None:
            return InferResult(call.model, call.oip.version or 0, {}, part=number)
        return replace(call.decode(found), part=number, final=found.final)

    def _leave(self, call: Call) -> None:
        if call.replies is not None:
            call.replies.close()
        self._slots.free(call)

    def _submit(self, call: Call) -> Future[Any]:
        future = Future[Any]()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                self._slots.free(call)
                return
            try:
                result = self._run(self._core.answered(call))
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

    def _take_slot(self, call: Call) -> None:
        self._link.check_process()
        if self._is_closed:
            raise closed()
        self._slots.take(call)


class OpenInferenceCalls:
    """Calls in the words of the Open Inference Protocol; a CallBuilder. Does no I/O."""

    noun = "server"
    ready_ask_s = math.inf
    knows_pictures = False

    def __init__(self, endpoint: str, is_grpc: bool) -> None:
        self.endpoint = endpoint
        self.names_parts = not is_grpc
        self._is_grpc = is_grpc

    def operation(self, operation: Operation, values: Mapping[str, Any], wait_s: float) -> Flow[Any]:
        """Ask an operation of ours in the protocol's words. Raises Unsupported for one that it has no words for."""
        known: Mapping[str, Callable[..., Flow[Any]]] = {
            "live": self._live,
            "ready": self._ready,
            "models": self._entries,
            "metadata": self._describe,
            "model_config": self._configuration,
            "model_statistics": self._statistics,
            "stats": self._count,
            "load": self._load,
            "unload": self._unload,
        }
        if operation.name not in known:
            raise Unsupported(
                f"the Open Inference Protocol has no {operation.name} (asked of {self.endpoint}); ask over ZeroMQ, at "
                "an ipc:// or tcp:// endpoint"
            )
        return (yield from known[operation.name](wait_s, **values))

    def infer(  # noqa: PLR0917 (what a call is made of)
        self,
        model: str,
        tensors: Mapping[str, Array],
        options: Options,
        parameters: Mapping[str, Any] | None,
        destinations: Mapping[str, Array],
        places: CallPlaces | None,  # noqa: ARG002 (memory is shared over ZeroMQ only)
    ) -> Call:
        """Build an inference call. Raises Unsupported and TensorMismatch for values that cannot be sent."""
        traceparent, parameters = cut_traceparent(parameters)
        sent = dict(with_sequence(parameters, options.sequence) or {})
        if unknown := [name for name, value in sent.items() if not isinstance(value, bool | int | float | str)]:
            raise Unsupported(f"parameter {unknown[0]!r}: the Open Inference Protocol carries bool, numbers and text")
        if options.timeout_ms is not None:
            sent["timeout_ms"] = float(options.timeout_ms)
        if options.priority:
            sent["priority"] = options.priority
        if options.timing:
            sent["timing"] = True
        wait_s = max(wait_for_s(options.timeout_ms), SLACK_S)
        call = Call(b"", (), wait_s, partial(_result, destinations), options.timeout_ms)
        call.oip = OipCall(
            model,
            options.version,
            [(name, datatype_name(each.dtype), each.shape, tensor_frame(name, each)) for name, each in tensors.items()],
            options.outputs,
            sent,
            traceparent=traceparent,
        )
        if options.stream:
            call.parts = deque()
        return call

    def _live(self, wait_s: float) -> Flow[bool]:
        return bool((yield _question("server_live", wait_s)).get("live", True))

    def _ready(self, wait_s: float, model: str) -> Flow[bool]:
        name = "model_ready" if model else "server_ready"
        return bool((yield _question(name, wait_s, model=model)).get("ready", True))

    def _entries(self, wait_s: float) -> Flow[list[dict[str, Any]]]:
        return [_entry(each) for each in (yield _question("repository_index", wait_s))]

    def _describe(self, wait_s: float, model: str, version: int | None) -> Flow[dict[str, Any]]:
        found: dict[str, Any] = yield _question("model_metadata", wait_s, model=model, version=version)
        if self._is_grpc:  # whose ModelMetadata has no place for steps
            with contextlib.suppress(EdgeRuntimeError):  # an extension, which not every server has
                parameters = (yield from self._configuration(wait_s, model, version)).get("parameters") or {}
                for name in ("steps", "preset", "pipeline"):
                    if name in parameters:
                        found[name] = json.loads(parameters[name]["string_value"])
        return found if version is None else {**found, "version": version}

    def _configuration(self, wait_s: float, model: str, version: int | None) -> Flow[dict[str, Any]]:
        found: dict[str, Any] = yield _question("model_config", wait_s, model=model, version=version)
        return found

    def _statistics(self, wait_s: float, model: str | None, version: int | None) -> Flow[list[dict[str, Any]]]:
        found = yield _question("model_statistics", wait_s, model=model, version=version)
        return list(found.get("model_stats") or ())

    def _count(self, wait_s: float) -> Flow[dict[str, Any]]:
        server = yield _question("server_metadata", wait_s)
        counts: Sequence[Mapping[str, Any]] = ()
        with contextlib.suppress(EdgeRuntimeError):  # an extension, which not every server has
            counts = yield from self._statistics(wait_s, None, None)
        is_ready = False
        with contextlib.suppress(ConnectionError, TimeoutError, EdgeRuntimeError):
            is_ready = yield from self._ready(wait_s, "")
        return {
            "version": f"{server.get('name', '')} {server.get('version', '')}".strip(),
            "ready": is_ready,
            "models": (yield from self._entries(wait_s)),
            "metrics": {"models": _numbers(counts)},
        }

    def _load(self, wait_s: float, model: str, version: int | None) -> Flow[list[dict[str, Any]]]:
        return (yield from self._changed("repository_load", wait_s, model, version))

    def _unload(self, wait_s: float, model: str, version: int | None) -> Flow[list[dict[str, Any]]]:
        return (yield from self._changed("repository_unload", wait_s, model, version))

    def _changed(self, name: str, wait_s: float, model: str, version: int | None) -> Flow[list[dict[str, Any]]]:
        if version is not None:
            raise Unsupported(
                "the Open Inference Protocol loads and unloads whole models; name no version, or use ZeroMQ"
            )
        yield _question(name, wait_s, model=model)
        return [each for each in (yield from self._entries(wait_s)) if each["name"] == model]


class _Slots:
    """Bounds the calls in flight. Thread: any, also in a signal's handler in the middle of another call.

    Invariant: the lock is taken by `with` alone. An interrupt may leave the lock inside a `threading.Semaphore` held.
    """

    def __init__(self, most: int) -> None:
        self._in_flight = InFlight(most)
        self._lock = threading.RLock()
        self._waiting: deque[threading.Lock] = deque()

    def has(self, call: Call) -> bool:
        """Whether a call has a slot."""
        return call.number in self._in_flight.calls

    def take(self, call: Call) -> None:
        """Give a call a slot; an interrupt leaves it to `free`. Raises TimeoutError when none was free in time."""
        end_s, is_open = time.monotonic() + call.wait_s, True
        while True:
            with self._lock:
                if not self._in_flight.is_full:
                    self._in_flight.number(call)
                    self._in_flight.add(call, NEVER_S)
                    return
                if not is_open:
                    raise all_in_flight(self._in_flight.most, call.wait_s)
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
            try:
                is_open = acquire(gate, end_s - time.monotonic())
            finally:
                with contextlib.suppress(ValueError):  # it was opened
                    self._waiting.remove(gate)

    def free(self, call: Call) -> None:
        """Take back its slot, if it has one, and let the next call look. Idempotent."""
        with self._lock:
            self._in_flight.take(call.number)
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
        from edge_runtime.doors.http.link import HttpLink

        return HttpLink(access)
    try:
        from edge_runtime.doors.grpc.link import GrpcLink
    except ImportError as error:
        raise ConfigError(f"{access.address.url}: {error}; {install_advice('grpc-client')}") from None
    return GrpcLink(access)


def _question(name: str, wait_s: float, **values: Any) -> Call:
    """The call of an operation; the link decodes its answer."""
    call = Call(b"", (), wait_s, dict)
    call.oip = OipQuestion(name, values)
    return call


def _result(destinations: Mapping[str, Array], answer: OipReply) -> InferResult:
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
    version = int(answer.version) if answer.version.isascii() and answer.version.isdigit() else 0
    told_answers = answer.answer if isinstance(answer.answer, dict) else None
    return InferResult(answer.model, version, outputs, timing, answers=read_answers(told_answers, outputs))


def _entry(told: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the repository's index as `models` has it."""
    version = str(told.get("version") or "")
    return {
        **told,
        "name": told.get("name", ""),
        "version": int(version) if version.isascii() and version.isdigit() else version,
        "state": str(told.get("state") or "").lower(),
        "reason": told.get("reason") or "",
    }


def _numbers(stats: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the protocol's statistics of each model, under the names of `stats`; versions together."""
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
