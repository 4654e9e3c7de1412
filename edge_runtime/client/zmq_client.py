"""The client: arrays in, arrays out, over wire v1. Synchronous calls and pipelined futures, from any thread.

core.py builds the calls and decodes the replies, link.py carries them; asyncio_client.py is the same for an event loop.
The public names are `Client` and `CurveKeys`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.client.channel import Channel, CurveKeys
from edge_runtime.client.core import MAX_IN_FLIGHT, READY_POLL_S, CallPlaces, ClientCore
from edge_runtime.client.frames import Options, arrays, check_destinations, fit_datatypes
from edge_runtime.client.in_flight import Call
from edge_runtime.client.link import Link
from edge_runtime.client.memory import NOT_ATTACHED, ClientMemory
from edge_runtime.client.near_misses import advised
from edge_runtime.client.pictures import with_pictures, with_raw
from edge_runtime.client.retries import ask_until_due
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.errors import ConfigError, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import InferResult
from edge_runtime.tensors import Array
from edge_runtime.wire.operations import DEFAULT_WAIT_S, OPERATIONS, Scope

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture

__all__ = ["Client", "CurveKeys"]


class Client:
    """A connection to a daemon; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    endpoint: `ipc:///path`, `tcp://host:port`, a socket's path, or None for `$EDGE_RUNTIME_ENDPOINT`, else the
    default place. control: where load and unload go; None: `<path>.control` beside an ipc endpoint.
    timeout_ms: for requests that name none; None: the model's default. max_in_flight: the most requests in flight.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError without a
    reply within timeout_ms + 1 s of sending (30 s without a timeout), or without a slot for as long before;
    ConnectionError at once when no daemon listens, or when the connection is lost before the reply; Draining when the
    daemon was told to stop and has not run the request.

        with Client() as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=20)["scores"]
            boxes = client.infer("yolo", picture="photo.jpg").answer.boxes
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        control: str | None = None,
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        curve: CurveKeys | None = None,
    ) -> None:
        self.endpoint = client_endpoint(endpoint)
        self._link = Link(Channel(self.endpoint, curve), max_in_flight)
        if control is None and self.endpoint.startswith("ipc://"):
            control = control_endpoint_beside(self.endpoint)
        self._control = Link(Channel(client_endpoint(control), curve), max_in_flight) if control else None
        self._core = ClientCore(timeout_ms)
        self._memory = ClientMemory(self.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the sockets, end the threads. Idempotent. Thread: any."""
        self._memory.close()
        self._link.close()
        if self._control is not None:
            self._control.close()

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
        """Run a model once and wait for the answer. Thread: any; the calling thread drives the socket itself.

        Shapes: whole, axis 0 rows for a model that batches (see `metadata`). Arrays keep their datatype; lists and
        numbers take the model's. outputs: their names in order; None for all; or arrays by name, into which they go
        (C-contiguous; where a result is smaller, it is the array's beginning). priority: 1 (first) to 9; 0 for the
        model's default. timing: fill `InferResult.timing`. The returned arrays are writable, and the caller's own.
        cast: convert arrays to the model's datatypes where those are of the same kind, and integers fit.
        retry: send a refused request again, when the daemon says or after a growing pause, until its deadline; also
        what a daemon that stops has not run, to the one that comes after it.
        picture, pictures: in place of the input that declared steps take them for: paths, bytes (JPEG, PNG, WebP, BMP),
        PIL images, or uint8 frames [height, width, 3], RGB; `InferResult.answer` and `answers` say what was seen. raw:
        True for the bare outputs of pictures, False for answers to the model's own tensors.
        Raises as the class says; TensorMismatch before sending for a tensor above the daemon's limit; OSError for a
        picture that cannot be read.
        """
        options = self._core.options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = with_pictures(inputs, picture, pictures), with_raw(parameters, raw)

        def ask(options: Options) -> InferResult:
            call = self._packed(model, inputs, options, parameters, outputs, cast=cast)
            try:
                result: InferResult = self._link.ask(call)
            except TensorMismatch as error:
                raise self._advised(error, model, inputs) from None
            return result

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

        Arrays of 256 KiB or more are sent from their own memory: leave them unchanged until the future is done. Blocks
        while `max_in_flight` requests are pending (TimeoutError after this one's own wait, which begins again when it
        is sent). Callbacks run on the client's thread and should be short; there a full client raises QueueFull
        instead of blocking. Cancelling a future discards its reply; the daemon still runs it.
        """
        options = self._core.options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = with_pictures(inputs, picture, pictures), with_raw(parameters, raw)
        return self._link.submit(self._packed(model, inputs, options, parameters, outputs, cast=cast))

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make an array in memory that is shared with the daemon: zeroed, C-contiguous. Thread: any.

        `infer` and `submit` send only the place of such an input, or of a contiguous part of it, and the daemon writes
        an output of `outputs={"scores": array}` into it. Leave an input unchanged, and an output unread, until the
        answer is there. Allocate once and use it again. The memory is free again when the array and all its views are
        gone; after `close` it reads as zeros. Over tcp, and where the daemon shares no memory, it is an ordinary array
        and every call gives the same answer by frames. Raises QueueFull over the daemon's bound ([shared_memory]).
        """
        array = self._memory.allocate(shape, dtype)
        if array is None:
            return np.zeros(shape, dtype)
        if self._memory.attached != self._link.connection or not self._link.connection:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the next call tells
                self._attach()
        return array

    # ---- the daemon and its models ----------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Return whether the daemon answers."""
        return self._says("live")

    def is_ready(self, model: str = "") -> bool:
        """Return whether the daemon, or one model, can answer inference; False when the daemon does not answer."""
        return self._says("ready", model)

    def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the daemon, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        while not self.is_ready(model):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{model or 'the daemon'} at {self.endpoint} was not ready within {limit_s:.1f} s")
            time.sleep(READY_POLL_S)

    # ---- operations: begin (made by tests/architecture/operation_texts.py from wire/operations.py) -------------------

    def models(self) -> list[dict[str, Any]]:
        """List every version that the daemon knows, and each file of its models folder that it does not serve.

        Each entry has name, version, state, reason, backend, device, precision, mode and memory_bytes. What lies in the
        folder and is no version has version null, state "not_served", its path, and the reason.
        """
        return cast("list[dict[str, Any]]", self._call("models"))

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe what a model takes and gives.

        In the Open Inference Protocol's words, with `max_batch_rows` and `max_frame_bytes`. Over MQTT the latter bounds
        a whole message. `steps`: what `model.toml` declares of pictures and answers, where it does; `forms`: what a
        picture may be sent as, and what then comes back. `preset`: the one that the model's own file tells, where no
        steps for pictures are declared.
        """
        return cast("dict[str, Any]", self._call("metadata", model=model, version=version))

    def model_config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe a loaded model as Triton's ModelConfig.

        What was found out of it: `max_batch_size` is the most rows of one run, 0 where it does not batch.
        """
        return cast("dict[str, Any]", self._call("model_config", model=model, version=version))

    def model_statistics(self, model: str | None = None, version: int | None = None) -> list[dict[str, Any]]:
        """Tell what loaded models have done, in Triton's words.

        `inference_count` counts rows, `execution_count` runs, both without warm-up.
        """
        return cast("list[dict[str, Any]]", self._call("model_statistics", model=model, version=version))

    def stats(self) -> dict[str, Any]:
        """Tell counters, latencies by model, memory and uptime."""
        return cast("dict[str, Any]", self._call("stats"))

    def load(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Load a model, or one version, anew, and wait until it is ready.

        Returns the model's entries as in `models`. Waits up to 10 minutes. Raises LoadFailed, BackendUnavailable and
        ModelNotFound.
        """
        return self._call("load", timeout_ms, model=model, version=version)

    def unload(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Take a model, or one version, out of service.

        Admitted requests are answered first. Returns and raises as `load`.
        """
        return self._call("unload", timeout_ms, model=model, version=version)

    def update_status(self) -> dict[str, Any]:
        """Tell what runs by updates, what is under way, what was refused and why, and how the last check ended.

        Raises Unsupported where no updates are configured, as every operation of updates.
        """
        return cast("dict[str, Any]", self._call("update_status"))

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last events of updates, newest first.

        Each entry has at_utc, model, counter, what and reason. count: entries, 50 by default.
        """
        return cast("list[dict[str, Any]]", self._call("update_history", count=count))

    def update_check(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now what the repository offers, and install nothing.

        The result has at_utc, is_ok, reason, source and offers; a fault of the repository is told there. Raises
        EdgeRuntimeError with the code `update_failed` while the updater is at work.
        """
        return cast("dict[str, Any]", self._call("update_check", timeout_ms))

    def update_apply(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now and install what is meant for this device.

        Returns the result of `update_check` once every release is observed. A daemon whose client stops waiting goes
        on.
        """
        return cast("dict[str, Any]", self._call("update_apply", timeout_ms))

    def update_import(self, folder: str | os.PathLike[str], *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Install from a folder, such as a USB stick.

        As `update_apply`, from a folder that `repo bundle` wrote. folder: a folder that the daemon sees.
        """
        return cast("dict[str, Any]", self._call("update_import", timeout_ms, folder=folder))

    def update_rollback(self, model: str, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Let the release before serve again, and refuse the current one.

        A release that is under way is withdrawn instead. The result has model, and `release`, which serves now, or
        `withdrawn`. Waits up to 10 minutes.
        """
        return cast("dict[str, Any]", self._call("update_rollback", timeout_ms, model=model))

    # ---- operations: end ---------------------------------------------------------------------------------------------

    # ---- private ----------------------------------------------------------------------------------------------------

    def _packed(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        options: Options,
        parameters: Mapping[str, Any] | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        *,
        cast: bool,
    ) -> Call:
        core = self._core
        tensors, guessed = arrays(inputs)
        if guessed or cast:
            fit_datatypes(tensors, list(tensors) if cast else guessed, self._metadata(model))
        destinations = check_destinations(outputs)
        call = core.infer(model, tensors, options, parameters, destinations, self._places(tensors, destinations))
        if core.is_large(call):
            if not core.knows_limit:
                # A model that is missing or not ready refuses the call itself, with a better message.
                with contextlib.suppress(EdgeRuntimeError):
                    core.learn_limit(self._metadata(model))
            core.check_size(model, tensors, call)
        return call

    def _places(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> CallPlaces | None:
        """Where a call's arrays lie in shared memory that the present connection may name; None: in frames."""
        memory = self._memory
        places = memory.call_places(inputs, outputs)
        if places is None:
            return None
        if memory.attached != self._link.connection:
            self._attach()
        return None if memory.attached == NOT_ATTACHED else places._replace(connection=memory.attached)

    def _attach(self) -> None:
        """Let the connection name this client's regions."""
        memory = self._memory
        call = self._core.operation(OPERATIONS["attach_memory"], {"secret": memory.secret.hex()})
        try:
            self._link.ask(call)
        except EdgeRuntimeError:  # a daemon that has forgotten them
            memory.lose()
        else:
            memory.attached = call.connection

    def _advised(self, error: TensorMismatch, model: str, inputs: Mapping[str, npt.ArrayLike]) -> TensorMismatch:
        """The error, with what would fit the model as it is now."""
        self._core.metadata.pop(model, None)
        with contextlib.suppress(EdgeRuntimeError, ConnectionError, TimeoutError):
            return advised(error, arrays(inputs)[0], self._metadata(model))
        return error

    def _metadata(self, model: str) -> Mapping[str, Any]:
        """Return a model's metadata, fetched once."""
        found = self._core.metadata.get(model)
        if found is None:
            found = self._core.metadata[model] = self.metadata(model)
        return found

    def _says(self, name: str, model: str = "") -> bool:
        try:
            return bool(self._call(name, model=model))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _call(self, name: str, timeout_ms: float | None = None, **values: Any) -> Any:
        """Call an operation. timeout_ms: of one with scope control; the others take the client's."""
        operation = OPERATIONS[name]
        link = self._link if operation.scope is Scope.INFER else self._control
        if link is None:
            raise ConfigError(f"{name} needs the control endpoint, which a tcp endpoint does not tell; give control=")
        return link.ask(self._core.operation(operation, values, timeout_ms))
