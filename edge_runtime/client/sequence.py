"""A sequence as a client has it: requests of one model, each of which continues the state that the one before left.

Owns: the id, and which request is the first and which the last. Does no I/O itself: its client carries out the flows.
Thread: one at a time, since requests of a sequence have an order.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from edge_runtime.client.core import ClientCore, Flow
from edge_runtime.errors import EdgeRuntimeError, RunFailed, Unsupported
from edge_runtime.kept_state import SEQUENCE_STATE
from edge_runtime.messages import InferResult, SequenceStep
from edge_runtime.tensors import Array

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture

END_MS = 1000.0
"""How long a block waits at its end for its sequence to end: one that does not is lost when it is idle."""

ResultT = TypeVar("ResultT")
StateT = TypeVar("StateT")
NoneT = TypeVar("NoneT")


class SequenceSteps(Generic[ResultT, StateT, NoneT]):
    """The requests of one sequence. Its client's class says whether a method waits, or returns what is awaited.

    A request that was refused did not count, and may be sent again; one whose run failed did, as far as the start and
    the end go. After a TimeoutError or ConnectionError it is not known: begin anew.
    """

    def __init__(
        self, core: ClientCore, model: str, sequence: int | str | None, run: Callable[[Flow[Any]], Any]
    ) -> None:
        """run: carries out a flow."""
        self.model = model
        self.id = sequence if sequence is not None else secrets.randbits(62) + 1
        self._core = core
        self._run = run
        self._is_begun = False
        self._is_known = True

    def infer(
        self,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        end: bool = False,
        picture: Picture | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        retry: bool = False,
    ) -> ResultT:
        """Run the next step; as `Client.infer`. end: it is the last. Raises SequenceLost: the state is gone.

        retry: as there, for a first one that waits for room until its deadline.
        """
        ask = partial(self._step, inputs, picture=picture, outputs=outputs, timeout_ms=timeout_ms, end=end, retry=retry)
        return self._run(ask())  # type: ignore[no-any-return]

    def snapshot(self, *, end: bool = False) -> StateT:
        """Return the state after the last request, as signed text, for `restore`. end: and end the sequence.

        Raises SequenceLost; Unsupported: the model's [sequence] does not say snapshot = true.
        """
        return self._run(self._snapshot(end=end))  # type: ignore[no-any-return]

    def restore(self, state: bytes) -> NoneT:
        """Begin from a snapshot of this version: also one of before a restart, or of another device with the same key.

        Raises DecodeFailed: it is not one, or another's; then nothing begins, and what went on goes on.
        """
        return self._run(self._restore(state))  # type: ignore[no-any-return]

    def begin_anew(self) -> None:
        """Have the next request be a first one, as after a `SequenceLost`: the state begins anew."""
        self._is_begun, self._is_known = False, True

    def _step(
        self,
        inputs: Mapping[str, npt.ArrayLike] | None,
        *,
        end: bool,
        picture: Picture | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        start: bool | None = None,
        retry: bool = False,
    ) -> Flow[InferResult]:
        asked = self._core.checked_arguments(
            self.model, inputs, picture, None, None, None, outputs, timeout_ms, 0, False, None, False
        )
        step = SequenceStep(self.id, not self._is_begun if start is None else start, end)
        asked = asked._replace(options=asked.options._replace(sequence=step))
        try:
            result = yield from self._core.infer(asked, retry=retry)
        except RunFailed:
            self._is_begun = not end
            raise
        except (ConnectionError, TimeoutError):
            self._is_known = False
            raise
        self._is_begun, self._is_known = not end, True
        return result

    def _snapshot(self, *, end: bool) -> Flow[bytes]:
        result = yield from self._step(_state(b""), end=end)
        state = bytes(result[SEQUENCE_STATE][0])
        if not state:
            raise Unsupported(f"model '{self.model}' hands out no states: set snapshot = true in its [sequence]")
        return state

    def _restore(self, state: bytes) -> Flow[None]:
        yield from self._step(_state(state), end=False, start=True)

    def _end(self) -> Flow[None]:
        """End it where it is live, as far as is known; one that cannot be asked is lost when it is idle."""
        if self._is_begun and self._is_known:
            with contextlib.suppress(EdgeRuntimeError, ConnectionError, TimeoutError):
                yield from self._step(_state(b""), end=True, timeout_ms=END_MS)


class ClientSequence(SequenceSteps[InferResult, bytes, None]):
    """A sequence of a blocking client; a context manager, at whose end it ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, unless `end=True` has: its place is free for another. Never raises."""
        self._run(self._end())


class AsyncClientSequence(SequenceSteps[Awaitable[InferResult], Awaitable[bytes], Awaitable[None]]):
    """A sequence of an AsyncClient; a context manager of both kinds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it: without a last request the daemon keeps its state until it is idle for too long."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it, as `ClientSequence`."""
        await self._run(self._end())


def _state(text: bytes) -> dict[str, npt.ArrayLike]:
    return {SEQUENCE_STATE: np.array([text], object)}
