"""A sequence as a client has it: requests of one model, each of which continues the state that the one before left.

Owns: the id, and which request is the first and which the last. Does no I/O itself: its client sends. Thread: one at a
time, since requests of a sequence have an order.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt

from edge_runtime.client.core import ClientCore, InferArguments
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from edge_runtime.messages import InferResult, SequenceStep
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture


class SequenceMarks:
    """The first and the last request of one sequence.

    A request that was refused did not count, and may be sent again; one whose run failed did, as far as the start and
    the end go. After a TimeoutError or ConnectionError it is not known: begin anew.
    """

    def __init__(self, core: ClientCore, model: str, sequence: int | str | None) -> None:
        self.model = model
        self.id = sequence if sequence is not None else secrets.randbits(62) + 1
        self._core = core
        self._is_begun = False

    def begin_anew(self) -> None:
        """Have the next request be a first one, as after a `SequenceLost`: the state begins anew."""
        self._is_begun = False

    def arguments(
        self,
        inputs: Mapping[str, npt.ArrayLike] | None,
        picture: Picture | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        timeout_ms: float | None,
        *,
        end: bool,
    ) -> InferArguments:
        """Return the arguments of the next request."""
        asked = self._core.checked_arguments(
            self.model, inputs, picture, None, None, None, outputs, timeout_ms, 0, False, None, False
        )
        step = SequenceStep(self.id, not self._is_begun, end)
        return asked._replace(options=asked.options._replace(sequence=step))

    def note(self, error: EdgeRuntimeError | None, *, end: bool) -> None:
        """Note how a request ended."""
        if error is None or isinstance(error, RunFailed):
            self._is_begun = not end


class ClientSequence(SequenceMarks):
    """A sequence of a blocking client; a context manager."""

    def __init__(
        self, core: ClientCore, model: str, sequence: int | str | None, ask: Callable[[InferArguments], InferResult]
    ) -> None:
        """ask: sends a request, and waits."""
        super().__init__(core, model, sequence)
        self._ask = ask

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it: without a last request (`end=True`) the daemon keeps its state until it is idle for too long."""

    def infer(
        self,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        end: bool = False,
        picture: Picture | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
    ) -> InferResult:
        """Run the next step; as `Client.infer`. end: it is the last. Raises SequenceLost: the state is gone."""
        try:
            result = self._ask(self.arguments(inputs, picture, outputs, timeout_ms, end=end))
        except EdgeRuntimeError as error:
            self.note(error, end=end)
            raise
        self.note(None, end=end)
        return result


class AsyncClientSequence(SequenceMarks):
    """A sequence of an AsyncClient; a context manager of both kinds."""

    def __init__(
        self,
        core: ClientCore,
        model: str,
        sequence: int | str | None,
        ask: Callable[[InferArguments], Awaitable[InferResult]],
    ) -> None:
        """ask: sends a request, and waits."""
        super().__init__(core, model, sequence)
        self._ask = ask

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it, as `ClientSequence`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave it, as `ClientSequence`."""

    async def infer(
        self,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        end: bool = False,
        picture: Picture | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
    ) -> InferResult:
        """Run the next step; as `ClientSequence.infer`."""
        try:
            result = await self._ask(self.arguments(inputs, picture, outputs, timeout_ms, end=end))
        except EdgeRuntimeError as error:
            self.note(error, end=end)
            raise
        self.note(None, end=end)
        return result
