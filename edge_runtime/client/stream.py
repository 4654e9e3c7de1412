"""An answer in parts as a client has it: an iterator of results, each as it comes.

Owns: that parts are in order, that the last ends it, and that who leaves early has the rest cancelled. Does no I/O
itself: its client carries out the flows. Thread: one at a time waits; any may close it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from edge_runtime.client.core import ClientCore, Flow, InferArguments
from edge_runtime.client.in_flight import Call
from edge_runtime.client.pictures import picture_url
from edge_runtime.messages import TEXT, InferResult
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture

CHAT = "chat"
"""Name of the input of language models that takes messages, as one JSON object."""

RunT = TypeVar("RunT")


def stream_arguments(  # noqa: PLR0917 (what a client's method takes)
    core: ClientCore,
    model: str,
    inputs: Mapping[str, npt.ArrayLike] | None,
    text: str | None,
    chat: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    pictures: Sequence[Picture] | None,
    version: int | None,
    outputs: Sequence[str] | None,
    timeout_ms: float | None,
    priority: int,
    timing: bool,
    parameters: Mapping[str, Any],
) -> InferArguments:
    """Check the options of `stream`, see BlockingClient. Raises TypeError, TensorMismatch, OSError."""
    given: dict[str, npt.ArrayLike] = dict(inputs or {})
    if pictures:
        text, chat = None, _with_pictures(chat, text, pictures)
    if text is not None:
        given[TEXT] = _element(text)
    if chat is not None:
        whole = chat if isinstance(chat, Mapping) else {"messages": list(chat)}
        given[CHAT] = _element(json.dumps(whole))
    told = {name: _parameter(value) for name, value in parameters.items() if value is not None}
    asked = core.checked_arguments(
        model, given, None, None, None, version, outputs, timeout_ms, priority, timing, told, False
    )
    return asked._replace(options=asked.options._replace(stream=True))


def _with_pictures(
    chat: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, text: str | None, pictures: Sequence[Picture]
) -> dict[str, Any]:
    """The chat with pictures before the text of its last message; a text alone becomes a message."""
    if chat is None:
        chat = [{"role": "user", "content": text or ""}]
    whole = dict(chat) if isinstance(chat, Mapping) else {"messages": list(chat)}
    if not whole.get("messages"):
        raise TypeError("pictures= are of the last message of chat=, which has none; wanted one, or text=")
    *before, last = whole["messages"]
    content = last.get("content") or ""
    told = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    seen = [{"type": "image_url", "image_url": {"url": picture_url(each)}} for each in pictures]
    return {**whole, "messages": [*before, {**last, "content": [*seen, *told]}]}


def _element(text: str) -> Array:
    return np.array([text.encode()], object)


def _parameter(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | Mapping) else value


class StreamSteps(Generic[RunT]):
    """One answer in parts. RunT: what `run` and `next_part` return, a result or what is awaited."""

    def __init__(  # noqa: PLR0917 (its client's parts)
        self,
        core: ClientCore,
        asked: InferArguments,
        retry: bool,
        run: Callable[[Flow[Any]], Any],
        next_part: Callable[[Call], RunT],
        leave: Callable[[Call], None],
    ) -> None:
        """run: carries out a flow. next_part: waits for a part. leave: ends a call early; Thread: any."""
        self._core = core
        self._asked = asked
        self._retry = retry
        self._run = run
        self._next_part = next_part
        self._leave = leave
        self._call: Call | None = None
        self._part = 0
        self._is_over = False

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self._close()

    def _close(self) -> None:
        self._is_over = True
        if self._call is not None:
            self._leave(self._call)

    def _begun(self, begun: tuple[Call, InferResult]) -> InferResult:
        self._call, result = begun
        if self._is_over:  # closed by another thread meanwhile
            self._leave(self._call)
        return result

    def _taken(self, result: InferResult) -> InferResult | None:
        """Return a part; None for an end without outputs. Raises ConnectionError: one is missing before it."""
        if result.part != self._part:
            raise ConnectionError(
                f"part {result.part} of an answer of model {self._asked.model!r} came, wanted part {self._part}: what "
                "was between them was lost on the way; ask again"
            )
        self._part += 1
        self._is_over = self._is_over or result.final
        return result if result.outputs or not result.final else None


class ClientStream(StreamSteps[InferResult]):
    """An answer in parts of a blocking client: an iterator, and a context manager at whose end it is left."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._turn = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> InferResult:
        with self._turn:
            if self._is_over:
                raise StopIteration
            try:
                if self._call is None:
                    result = self._begun(self._run(self._core.begin(self._asked, retry=self._retry)))
                else:
                    result = self._next_part(self._call)
                taken = self._taken(result)
            except BaseException:
                was_closed = self._is_over
                self._close()
                if was_closed:  # by another thread, for which this one waited
                    raise StopIteration from None
                raise
        if taken is None:
            raise StopIteration
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave it: the rest is cancelled. Idempotent. Thread: any."""
        self._close()


class AsyncClientStream(StreamSteps[Awaitable[InferResult]]):
    """An answer in parts of an AsyncClient: for `async for`, and a context manager at whose end it is left."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResult:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._call is None:
                result = self._begun(await self._run(self._core.begin(self._asked, retry=self._retry)))
            else:
                result = await self._next_part(self._call)
            taken = self._taken(result)
        except BaseException:
            was_closed = self._is_over
            self._close()
            if was_closed:
                raise StopAsyncIteration from None
            raise
        if taken is None:
            raise StopAsyncIteration
        return taken

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def aclose(self) -> None:
        """Leave it: the rest is cancelled. Idempotent."""
        self._close()
