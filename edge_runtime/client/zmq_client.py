"""The client: arrays in, arrays out, over wire v1. Synchronous calls and pipelined futures, from any thread.

Owns: what a call means (defaults, checks before sending, results); link.py carries requests, frames.py packs them.
The public names are `Client` and `CurveKeys`; asyncio_client.py is the same for an event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from edge_runtime.client import frames
from edge_runtime.client.channel import Channel, CurveKeys
from edge_runtime.client.frames import Frame, Options
from edge_runtime.client.link import Link
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.errors import ConfigError, EdgeRuntimeError
from edge_runtime.messages import InferResult

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Client", "CurveKeys"]

DEFAULT_WAIT_S = 30.0
"""How long a call without a timeout waits for its reply: longer than any run on a device, shorter than patience."""

LOAD_WAIT_S = 600.0
"""How long load and unload wait: a large model from a slow card, compiled for a GPU, takes minutes."""

UPDATE_WAIT_S = 48 * 3600.0
"""How long calls wait that may bring a release: a day at most over a slow link, then it is tried and observed. A daemon
that is gone ends them at once."""

SLACK_S = 1.0
"""How much longer than the request's own timeout a client waits for the daemon's word on it (DESIGN 3)."""

MAX_IN_FLIGHT = 256
"""Enough to fill the largest batches of tiny models; the daemon's own queues are bounded besides."""

READY_POLL_S = 0.05
"""How often `wait_ready` asks; a daemon with one tiny model is ready after about 250 ms."""


class Client:
    """A connection to a daemon; thread-safe, one for all threads of a process is enough. Not to be used after a fork.

    endpoint: `ipc:///path`, `tcp://host:port`, a socket's path, or None for `$EDGE_RUNTIME_ENDPOINT`, else the
    default place. control: where load and unload go; None: `<path>.control` beside an ipc endpoint.
    timeout_ms: for requests that name none; None: the model's default. max_in_flight: requests on their way at once.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError when
    nothing came within timeout_ms + 1 s of sending (30 s when there is no timeout at all), or when no request less was
    in flight for as long before; ConnectionError when nobody listens, at once, or the connection is lost before the
    answer.

        with Client() as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=20)["scores"]
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
        self._timeout_ms = timeout_ms
        self._link = Link(Channel(self.endpoint, curve), max_in_flight)
        if control is None and self.endpoint.startswith("ipc://"):
            control = control_endpoint_beside(self.endpoint)
        self._control = Link(Channel(client_endpoint(control), curve), max_in_flight) if control else None
        self._encoder = frames.RequestEncoder()
        self._decoder = frames.ReplyDecoder()
        self._metadata: dict[str, Mapping[str, Any]] = {}
        self._max_frame_bytes: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is pending with ConnectionError and give sockets and threads back. Idempotent, from any thread."""
        self._link.close()
        if self._control is not None:
            self._control.close()

    # ---- inference --------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> InferResult:
        """Run a model once and wait for the answer. Thread: any; the calling thread drives the socket itself.

        Shapes: each input whole, axis 0 rows for a model that batches (`metadata` tells). Arrays keep their datatype;
        lists and numbers take the model's. outputs: those wanted, in that order; None for all. priority: 1 (first) to
        9; 0 for the model's default. timing: fill `InferResult.timing`. The arrays returned are the caller's own and
        writable. Raises as the class says; TensorMismatch already before sending when the daemon takes no such size.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        header, tensors = self._encode(model, inputs, options, parameters)
        return self._decoder.result(self._link.ask(header, tensors, _wait_s(options)))

    def submit(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> Future[InferResult]:
        """Send a request and return at once; the future gets what `infer` would return or raise. Thread: any.

        Arrays of 256 KiB or more are sent from where they are: leave them unchanged until the future is done. Blocks
        while `max_in_flight` requests are pending (TimeoutError after this one's own wait; that for its reply begins
        when it is sent). Callbacks run on the client's thread and should be short; there a full client raises QueueFull
        instead of blocking. Cancelling a future discards its answer; the daemon still runs it.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        header, tensors = self._encode(model, inputs, options, parameters)
        return self._link.submit(header, tensors, _wait_s(options), self._decoder.result)

    # ---- the daemon and its models ----------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Whether the daemon answers; False when nobody does."""
        return self._says("live")

    def is_ready(self, model: str = "") -> bool:
        """Whether the daemon can answer inference, or one model can; False when nobody answers."""
        return self._says("ready", model)

    def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the daemon, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        while not self.is_ready(model):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{model or 'the daemon'} at {self.endpoint} was not ready within {limit_s:.1f} s")
            time.sleep(READY_POLL_S)

    def models(self) -> list[dict[str, Any]]:
        """Every version known: name, version, state, reason, backend, device, precision, mode, memory_bytes."""
        return cast("list[dict[str, Any]]", self._ask("models"))

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """What a model takes and gives (Open Inference Protocol), with `max_batch_rows` and `max_frame_bytes`."""
        return cast("dict[str, Any]", self._ask("metadata", model, version))

    def stats(self) -> dict[str, Any]:
        """Counters, latencies by model, memory and uptime, as the daemon tells them."""
        return cast("dict[str, Any]", self._ask("stats"))

    def load(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Load a model, or one version, and return its entries as in `models` when it is ready. Waits up to 10 minutes.

        Raises LoadFailed, BackendUnavailable, ModelNotFound; ConfigError when no control endpoint is known.
        """
        return self._ask_control("load", model, version, timeout_ms=timeout_ms)

    def unload(self, model: str, version: int | None = None, *, timeout_ms: float | None = None) -> Any:
        """Take a model, or one version, out of service; what was admitted is answered first. As `load` otherwise."""
        return self._ask_control("unload", model, version, timeout_ms=timeout_ms)

    # ---- updates: Unsupported where the daemon has none configured ---------------------------------------------------

    def update_status(self) -> dict[str, Any]:
        """What runs, what is under way, what was refused and why, how the last check ended."""
        return cast("dict[str, Any]", self._ask("update_status"))

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last things that happened, newest first: at_utc, model, counter, what, reason. count: 50 when None."""
        return cast("list[dict[str, Any]]", self._ask("update_history", parameters={"count": count}))

    def update_check(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now what the repository offers, and install nothing; at_utc, is_ok, reason, source, offers.

        Over the control endpoint, as the following; ConfigError when none is known. Raises EdgeRuntimeError with the
        code `update_failed` while the updater is at work; what a repository does wrong is told in the result.
        """
        return cast("dict[str, Any]", self._ask_control("update_check", timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S))

    def update_apply(self, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Look now and install what is meant for this device; the result as of `update_check`, when all is over.

        That takes as long as releases are observed, and a daemon whose client no longer waits goes on.
        """
        return cast("dict[str, Any]", self._ask_control("update_apply", timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S))

    def update_import(self, folder: str | os.PathLike[str], *, timeout_ms: float | None = None) -> dict[str, Any]:
        """As `update_apply`, from a folder that the daemon sees, for example a stick with what `repo bundle` wrote."""
        parameters = frames.folder_parameters(folder)
        return cast(
            "dict[str, Any]",
            self._ask_control("update_import", parameters=parameters, timeout_ms=timeout_ms, wait_s=UPDATE_WAIT_S),
        )

    def update_rollback(self, model: str, *, timeout_ms: float | None = None) -> dict[str, Any]:
        """Let the release before serve again and refuse the one that does, or take back one that is under way.

        The result: model, and `release`, which serves now, or `withdrawn`. Waits up to 10 minutes.
        """
        return cast("dict[str, Any]", self._ask_control("update_rollback", model, timeout_ms=timeout_ms))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _options(
        self, version: int | None, outputs: Sequence[str] | None, timeout_ms: float | None, priority: int, timing: bool
    ) -> Options:
        if timeout_ms is None:
            timeout_ms = self._timeout_ms
        return Options(version, None if outputs is None else tuple(outputs), timeout_ms, priority, timing)

    def _encode(
        self, model: str, inputs: Mapping[str, npt.ArrayLike], options: Options, parameters: Mapping[str, Any] | None
    ) -> tuple[bytes, list[Frame]]:
        tensors, guessed = frames.arrays(inputs)
        if guessed:
            frames.fit_datatypes(tensors, guessed, self._known_metadata(model))
        header, data = self._encoder.encode(model, tensors, options, parameters)
        if frames.largest_bytes(data) >= frames.SIZE_CHECK_BYTES:
            frames.check_frame_sizes(model, tensors, data, self._frame_limit(model))
        return header, data

    def _known_metadata(self, model: str) -> Mapping[str, Any]:
        """A model's metadata, asked for once; a reload that changes datatypes is a new model in all but name."""
        found = self._metadata.get(model)
        if found is None:
            found = self._metadata[model] = self.metadata(model)
        return found

    def _frame_limit(self, model: str) -> int:
        if self._max_frame_bytes is None:
            try:
                found = self._known_metadata(model)
            except EdgeRuntimeError:
                return frames.NO_LIMIT  # the model is not there or not ready: its own refusal says so better
            self._max_frame_bytes = int(found.get("max_frame_bytes", frames.NO_LIMIT))
        return self._max_frame_bytes

    def _says(self, op: str, model: str = "") -> bool:
        try:
            return bool(self._ask(op, model))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _ask(
        self, op: str, model: str = "", version: int | None = None, parameters: Mapping[str, Any] | None = None
    ) -> Any:
        wait_s = frames.wait_s(self._timeout_ms, DEFAULT_WAIT_S, SLACK_S)
        return self._decoder.value(self._link.ask(frames.pack_op(op, model, version, parameters), (), wait_s))

    def _ask_control(
        self,
        op: str,
        model: str = "",
        version: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_ms: float | None,
        wait_s: float = LOAD_WAIT_S,
    ) -> Any:
        if self._control is None:
            raise ConfigError(f"{op} needs the control endpoint, which a tcp endpoint does not tell; give control=")
        self._metadata.pop(model, None)
        header = frames.pack_op(op, model, version, parameters)
        return self._decoder.value(self._control.ask(header, (), frames.wait_s(timeout_ms, wait_s, SLACK_S)))


def _wait_s(options: Options) -> float:
    return frames.wait_s(options.timeout_ms, DEFAULT_WAIT_S, SLACK_S)
