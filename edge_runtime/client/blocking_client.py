"""Methods that all blocking clients have.

Owns: the methods' signatures, and carrying out core.py's flows on the caller's thread. doors/zmq/client.py,
doors/mqtt/client.py and doors/open_inference/client.py say how a call is sent. The classes are bases because callers
see one set of methods; a client over MQTT has those that change nothing.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.client.core import ClientCore, Flow, MetadataOf
from edge_runtime.client.in_flight import Call
from edge_runtime.messages import InferResult
from edge_runtime.operations import DEFAULT_WAIT_S
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture
    from edge_runtime.client.sequence import ClientSequence
    from edge_runtime.client.stream import ClientStream

T = TypeVar("T")


class BlockingClient(ABC):
    """The methods of every client that blocks. endpoint: what it is connected to, for messages."""

    endpoint: str
    _core: ClientCore

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the connections, end the threads. Idempotent. Thread: any."""

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
        """Run a model once and wait for the answer. Thread: any; over MQTT any but a future's callback.

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
        asked = self._core.checked_arguments(
            model, inputs, picture, pictures, raw, version, outputs, timeout_ms, priority, timing, parameters, cast
        )
        return self._run(self._core.infer(asked, retry=retry))

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
        asked = self._core.checked_arguments(
            model, inputs, picture, pictures, raw, version, outputs, timeout_ms, priority, timing, parameters, cast
        )
        return self._submit(self._run(self._core.call(asked)))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        text: str | None = None,
        chat: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        pictures: Sequence[Picture] | None = None,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        retry: bool = False,
        **parameters: Any,
    ) -> ClientStream:
        """Run a model whose answer comes in parts: an iterator of results, each as it comes, with `part` and `final`.

        Sent at the first step. Leave it and the rest is not made: `break`, an exception, `close`, or no reference
        left. text, chat: in place of the inputs of these names, as language models have them; chat: OpenAI's messages,
        or a mapping with `messages` and more. pictures: for a model that sees them, before the text, or the last
        message's. parameters: of the request; a list or mapping goes as JSON text.
        timeout_ms: of the whole; without it, and without the model's, 30 s may pass between two parts. A model may end
        without outputs: then no result is the last. retry: as of `infer`, before the first part only. One thread at a
        time waits for a part; `close` is any thread's. Errors as of `infer`, at the step that meets them.
        """
        from edge_runtime.client.stream import ClientStream, stream_arguments

        asked = stream_arguments(
            self._core, model, inputs, text, chat, pictures, version, outputs, timeout_ms, priority, timing, parameters
        )
        return ClientStream(self._core, asked, retry, self._run, self._next_part, self._leave)

    def sequence(self, model: str, sequence: int | str | None = None) -> ClientSequence:
        """Begin a sequence of a model that keeps state: `with client.sequence("asr") as s: s.infer({"audio": x})`.

        sequence: its id, 1 to 2^64 - 1 or text; None for a new one. Requests of one sequence are asked one at a time.
        """
        from edge_runtime.client.sequence import ClientSequence

        return ClientSequence(self._core, model, sequence, self._run)

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make a zeroed array, as `Client.allocate`, but an ordinary one: only ZeroMQ shares memory."""
        return np.zeros(shape, dtype)

    # ---- the other side and its models ------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Return whether the daemon answers; over MQTT False at once where the device's status says it is away."""
        return self._run(self._core.is_live())

    def is_ready(self, model: str = "") -> bool:
        """Return whether the daemon, or one model, can answer inference; False when the daemon does not answer."""
        return self._run(self._core.is_ready(model))

    def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the daemon, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        self._run(self._core.wait_ready(limit_s, model))

    # ---- operations of scope infer: begin (made by tests/architecture/operation_texts.py from operations.py) ----

    def models(self) -> list[dict[str, Any]]:
        """List every version that the daemon knows, and each file of its models folder that it does not serve.

        Each entry has name, version, state, reason, backend, device, precision, mode and memory_bytes. What lies in the
        folder and is not a version has version null, state "not_served", its path, and the reason.
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

    def overview(self) -> dict[str, Any]:
        """Tell in one sentence how the device is, and show its machine and its models.

        `level` is `good`, `warning` or `bad`. Rates are those of the last five seconds, quantiles those of the last
        five seconds in which there was an answer, a minute back at most. Answered where the [page](page.md) is on, as
        are `history` and `events`.
        """
        return cast("dict[str, Any]", self._call("overview"))

    def history(self, model: str | None = None) -> dict[str, Any]:
        """Tell rates, latencies and refusals of the last fifteen minutes, a sample each five seconds.

        Oldest first; `null` where nothing was answered.
        """
        return cast("dict[str, Any]", self._call("history", model=model))

    def events(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last loads, updates, failures and warnings, each with what to do, newest first.

        `docs` names the document with more. count: how many.
        """
        return cast("list[dict[str, Any]]", self._call("events", count=count))

    def doctor(self) -> dict[str, Any]:
        """Tell what a bug report needs, without passwords, tokens and keys.

        `files`: texts by name. `edge-runtime doctor --bundle FILE` packs them.
        """
        return cast("dict[str, Any]", self._call("doctor"))

    def tuning(self, model: str) -> dict[str, Any]:
        """Tell what `edge-runtime tune` found out about a model: why it is served as it is.

        `reasons`: the sentences in its `model.toml`; `picture`: SVG, or null where no tune wrote one.
        """
        return cast("dict[str, Any]", self._call("tuning", model=model))

    def example(self, model: str) -> dict[str, Any]:
        """Give an input to try a model with: its release's golden one, or that of its warm-up.

        `source`: "golden", "warm-up", or null where there is neither; `body`: a JSON request for inference, null too
        where it would have more than 262,144 elements.
        """
        return cast("dict[str, Any]", self._call("example", model=model))

    def cameras(self) -> list[dict[str, Any]]:
        """List the cameras, and what becomes of their frames.

        An entry for each rule that looks at one: model, name, camera, from, state (`starting`, `online`, `lost`),
        reason, losses, dropped. A camera that none looks at has state `unused`.
        """
        return cast("list[dict[str, Any]]", self._call("cameras"))

    def results(self) -> list[dict[str, Any]]:
        """List the last result of each rule of [[publish]].

        `answer` is as it is published, `null` before the first. The first call finds what was published last; for 10 s
        after each call it is the newest answer, published or not. `has_picture`: the [page](page.md) shows it, to who
        has the right `view`.
        """
        return cast("list[dict[str, Any]]", self._call("results"))

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

    # ---- operations of scope infer: end ------------------------------------------------------------------------------

    # ---- private ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _ask(self, call: Call) -> Any:
        """Send a call, wait for its reply and return the decoded result."""

    @abstractmethod
    def _submit(self, call: Call) -> Future[Any]:
        """Send an inference call; the future gets the result or the error."""

    @abstractmethod
    def _next_part(self, call: Call) -> Any:
        """Wait for the next part of the answer to a call, and return the decoded result."""

    @abstractmethod
    def _leave(self, call: Call) -> None:
        """End an answer in parts, of which no more are wanted. Idempotent. Thread: any."""

    def _call(self, name: str, timeout_ms: float | None = None, **values: Any) -> Any:
        """Ask an operation. timeout_ms: of one with scope control; the others take the client's."""
        return self._run(self._core.operation(name, values, timeout_ms))

    def _run(self, flow: Flow[T]) -> T:
        """Carry out a flow."""
        try:
            need = next(flow)
            while True:
                try:
                    found = self._ask(need) if isinstance(need, Call) else self._carry_out(need)
                except Exception as error:  # noqa: BLE001 (the flow judges it)
                    need = flow.throw(error)
                else:
                    need = flow.send(found)
        except StopIteration as end:
            return cast("T", end.value)

    def _carry_out(self, need: MetadataOf | float) -> Any:
        if isinstance(need, MetadataOf):
            return self._run(self._core.fetch(need))
        return time.sleep(need)


class ControllingClient(BlockingClient):
    """The methods of a client that may change what a daemon runs, too."""

    # ---- operations of scope control: begin (made by tests/architecture/operation_texts.py) --------------------------

    def camera_add(self, camera: str, url: str, model: str | None = None, *, timeout_ms: float | None = None) -> Any:
        """Read a camera, in place of one of that name.

        Until the next reload or restart, which take what the configuration says. What `[[camera]]` says of one of that
        name beside its `url` stays. Returns as `cameras`. camera: the camera's name. url: where it is, as `url` of
        [[camera]]. model: a model whose answers are published, where no rule says so.
        """
        return self._call("camera_add", timeout_ms, camera=camera, url=url, model=model)

    def camera_remove(self, camera: str, *, timeout_ms: float | None = None) -> Any:
        """Stop reading a camera, with the rules that look at it.

        Until the next reload or restart, which take what the configuration says. Returns as `cameras`. camera: the
        camera's name.
        """
        return self._call("camera_remove", timeout_ms, camera=camera)

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

    # ---- operations of scope control: end ----------------------------------------------------------------------------
