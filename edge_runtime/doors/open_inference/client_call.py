"""An inference call of the Open Inference Protocol and its answer, between a client and the link that carries it.

Owns: the part that HTTP and gRPC share: the fields, the words of operations, errors from the words of a server.
Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from edge_runtime.client.frames import Frame
from edge_runtime.errors import EdgeRuntimeError, TensorMismatch, error_from_wire
from edge_runtime.tensors import Array, Buffer, array_from_wire, datatype


@dataclass(frozen=True, slots=True)
class OipCall:
    """A request to a model. inputs: name, datatype, shape, bytes. outputs: None for all.

    outputs_as: name, datatype and shape of each, for an answer in parts that come by name alone. traceparent: the
    caller's span, in a header.
    """

    model: str
    version: int | None
    inputs: Sequence[tuple[str, str, tuple[int, ...], Frame]]
    outputs: tuple[str, ...] | None
    parameters: Mapping[str, bool | int | float | str]
    outputs_as: Sequence[Mapping[str, Any]] = ()
    traceparent: str | None = None


class OipQuestion(NamedTuple):
    """Another operation of the protocol, by its name in doors/open_inference/operations.py."""

    name: str
    values: Mapping[str, Any]


class OipTensor(NamedTuple):
    """One output. data: its bytes, or where a server sent them as JSON, its elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | list[Any]

    def array(self) -> Array:
        """The output as an array that nothing else refers to; writable."""
        if not isinstance(self.data, list):
            array = array_from_wire(self.datatype, self.shape, self.data)
            return array if array.flags.writeable else array.copy()
        elements = np.array(self.data, dtype=object).reshape(-1)
        kind = datatype(self.datatype)
        if kind.itemsize == 0:
            elements[:] = [each.encode() if isinstance(each, str) else each for each in elements]
        try:
            return elements.astype(kind.dtype).reshape(self.shape)
        except (TypeError, ValueError) as error:
            raise TensorMismatch(f"output {self.name!r} is not a {self.datatype} {list(self.shape)}: {error}") from None


@dataclass(frozen=True, slots=True)
class OipReply:
    """A model's reply. answer: its outputs in words, where the server sends them. final: nothing comes behind it."""

    model: str
    version: str
    outputs: Sequence[OipTensor]
    parameters: Mapping[str, Any]
    answer: Mapping[str, Any] | None = None
    final: bool = True


class OipReplies(Protocol):
    """The replies of one call that is answered in parts."""

    def next(self) -> OipReply | None:
        """Wait for the next; None: there is no more. Raises as `OipLink.infer`. One thread at a time."""
        ...

    def close(self) -> None:
        """Leave it: the server hears of that. Idempotent. Thread: any."""
        ...


class OipLink(Protocol):
    """Carries calls to one server. Thread: any, several at once."""

    def infer(self, request: OipCall, wait_s: float) -> OipReply:
        """Run a model. Raises EdgeRuntimeError, TimeoutError, ConnectionError."""
        ...

    def stream(self, request: OipCall, wait_s: float, *, is_whole: bool) -> OipReplies:
        """Run a model whose answer comes in parts. is_whole: wait_s is of all, not of each part. Raises as `infer`."""
        ...

    def ask(self, question: OipQuestion, wait_s: float) -> Any:
        """Return the fields of an operation's answer. Raises as `infer`."""
        ...

    def check_process(self) -> None:
        """Raise RuntimeError in the child of a fork, where it was used before."""
        ...

    def close(self) -> None:
        """End every call with ConnectionError."""
        ...


def server_error(code: str, message: str, by_status: str, retry_after_ms: float | None) -> EdgeRuntimeError:
    """Rebuild the error that a server answered. by_status: its code where the server names none (another product)."""
    return error_from_wire(code or by_status, message or "the server gave no message", retry_after_ms)
