"""What one request header means for one servable: checked once, then used for every request with those bytes.

Owns: the checks of a header against a model's specs (one bad request must not reach a batch). Pure but for the reply
header it caches. A plan is valid while its servable is the live one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import DeadlineUnmeetable, TensorMismatch, Unsupported
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.serving.servable import InlineBuffers, Servable
from edge_runtime.serving.servables import Servables
from edge_runtime.serving.split import Split
from edge_runtime.tensors import DATATYPES, Array, array_from_wire
from edge_runtime.wire.codec import RequestHeader, TensorHeader, frame_sizes, pack_answer


@dataclass(frozen=True, slots=True)
class InlineCut:
    """How to cut a batch's outputs into requests: for each output wanted, its index and one request's share.

    nbytes: of one request's outputs together.
    """

    outputs: tuple[tuple[int, Struct], ...]
    nbytes: int
    header: bytes


class Canary(NamedTuple):
    """The newcomer's plan of a header, and who says when it is its turn."""

    split: Split
    plan: RequestPlan


class RequestPlan:
    """A checked header.

    sizes: exact bytes of each tensor frame, -1 for BYTES. order: for each input of the model, which frame holds it.
    shape: inner shapes and datatypes, equal for requests that may share a batch. inline: set when the lean path may
    answer it; not while every request has to be seen on its own. timeout_s is math.inf without a deadline. canary: who
    may answer in this one's place, or None.
    """

    def __init__(self, servable: Servable, header: RequestHeader, canary: Canary | None = None) -> None:
        spec = servable.spec
        self.servable = servable
        self.inputs = header.inputs
        self.order = _match_inputs(spec, header.inputs)
        self.rows = _count_rows(servable, [header.inputs[index] for index in self.order])
        self.sizes = frame_sizes(header.inputs)
        self.nbytes = sum(size for size in self.sizes if size > 0)
        self.outputs = _match_outputs(spec, header.outputs)
        self.shape = tuple(tensor.shape[1:] if servable.batches else tensor.shape for tensor in header.inputs)
        self.timeout_s = _timeout_s(header, servable)
        self.priority = header.priority or servable.settings.priority or DEFAULT_PRIORITY
        self.wants_timing = header.timing
        self.canary = canary
        is_seen_alone = canary is not None or servable.follower is not None
        self.inline = self._cut(servable.inline) if servable.inline is not None and not is_seen_alone else None
        self._answer_shapes: tuple[tuple[int, ...], ...] | None = None
        self._answer_header = b""

    def turn(self) -> RequestPlan:
        """This, or the newcomer's plan when it is its turn to answer. Counts a request: ask once for each."""
        canary = self.canary
        return canary.plan if canary is not None and canary.split.is_newcomers_turn() else self

    def arrays(self, frames: Sequence[bytes | memoryview]) -> list[Array]:
        """Frames as arrays in the model's order, without copying. Raises TensorMismatch for wrong lengths."""
        inputs = self.inputs
        return [array_from_wire(inputs[index].datatype, inputs[index].shape, frames[index]) for index in self.order]

    def check_frames(self, lengths: Sequence[int]) -> None:
        """Raise TensorMismatch unless number and lengths of the tensor frames are what the header says."""
        if len(lengths) != len(self.sizes):
            raise TensorMismatch(f"the header names {len(self.sizes)} inputs, {len(lengths)} tensor frames came")
        for tensor, want, got in zip(self.inputs, self.sizes, lengths, strict=True):
            if want not in (-1, got):
                raise TensorMismatch(
                    f"input {tensor.name!r}: {tensor.datatype} {list(tensor.shape)} is {want} bytes, got {got}"
                )

    def select(self, outputs: Sequence[Array]) -> list[Array]:
        """The outputs asked for, in the order asked for."""
        return [outputs[index] for index in self.outputs]

    def answer_header(self, selected: Sequence[Array], timing: dict[str, float] | None = None) -> bytes:
        """Header of an answer with these arrays; packed again only when shapes differ from the last answer's."""
        shapes = tuple(array.shape for array in selected)
        if timing is None and shapes == self._answer_shapes:
            return self._answer_header
        packed = pack_answer(self.servable.model, self.servable.number, self.tensor_headers(shapes), timing)
        if timing is None:
            self._answer_shapes, self._answer_header = shapes, packed
        return packed

    def tensor_headers(self, shapes: Sequence[tuple[int, ...]]) -> list[TensorHeader]:
        """Name, datatype and shape of each output asked for."""
        specs = self.servable.spec.outputs
        return [
            TensorHeader(specs[index].name, specs[index].datatype, shape)
            for index, shape in zip(self.outputs, shapes, strict=True)
        ]

    def _cut(self, buffers: InlineBuffers) -> InlineCut | None:
        if self.rows > buffers.max_rows or self.wants_timing or -1 in self.sizes:
            return None
        if self.order != tuple(range(len(self.order))):
            return None
        shapes = [(self.rows, *buffers.output_inner_shapes[index]) for index in self.outputs]
        cuts = tuple((index, Struct(f"{self.rows * buffers.output_row_bytes[index]}s")) for index in self.outputs)
        if not all(cut.size for _, cut in cuts):
            return None
        header = pack_answer(self.servable.model, self.servable.number, self.tensor_headers(shapes))
        return InlineCut(cuts, sum(cut.size for _, cut in cuts), header)


def plan_request(servables: Servables, header: RequestHeader) -> RequestPlan:
    """Check a header against the servable that answers it now.

    Raises RequestError; NotReady, which asks for a version that waits on demand. Thread: any.
    """
    servable = servables.resolve(header.model, header.version)
    split = servables.split_of(header.model) if header.version is None else None
    canary = Canary(split, RequestPlan(split.newcomer, header)) if split is not None else None
    return RequestPlan(servable, header, canary)


def _match_inputs(spec: ModelSpec, inputs: Sequence[TensorHeader]) -> tuple[int, ...]:
    """For each input of the model, the index of the request's tensor of that name."""
    given = {tensor.name: index for index, tensor in enumerate(inputs)}
    wanted = [tensor.name for tensor in spec.inputs]
    if len(given) != len(inputs) or set(given) != set(wanted):
        got = ", ".join(tensor.name for tensor in inputs) or "none"
        raise TensorMismatch(f"inputs: got {got}; wanted {', '.join(wanted)}, each once")
    for tensor in spec.inputs:
        _check_tensor(tensor, inputs[given[tensor.name]])
    return tuple(given[name] for name in wanted)


def _check_tensor(spec: TensorSpec, got: TensorHeader) -> None:
    if got.datatype not in DATATYPES:
        raise Unsupported(f"input {got.name!r}: datatype {got.datatype!r} is unknown; wanted {spec.datatype}")
    is_bits = (spec.datatype, got.datatype) == ("BF16", "UINT16")
    if got.datatype != spec.datatype and not is_bits:
        raise TensorMismatch(f"input {got.name!r}: got {got.datatype}, wanted {spec.datatype}")
    if not spec.fits(got.shape):
        raise TensorMismatch(f"input {got.name!r}: got shape {list(got.shape)}, wanted {list(spec.shape)} (-1 is any)")


def _count_rows(servable: Servable, inputs: Sequence[TensorHeader]) -> int:
    if not servable.batches:
        return 1
    counts = {tensor.shape[0] for tensor in inputs}
    if len(counts) != 1:
        raise TensorMismatch(f"axis 0 is rows and must be equal in all inputs; got {sorted(counts)}")
    (rows,) = counts
    if not 1 <= rows <= servable.max_rows:
        raise TensorMismatch(f"got {rows} rows; model {servable.model} takes 1 to {servable.max_rows} in one request")
    return rows


def _match_outputs(spec: ModelSpec, names: Sequence[str] | None) -> tuple[int, ...]:
    known = {tensor.name: index for index, tensor in enumerate(spec.outputs)}
    if names is None:
        return tuple(known.values())
    for name in names:
        if name not in known:
            raise TensorMismatch(f"output {name!r} is unknown; the model gives {', '.join(known)}")
    return tuple(known[name] for name in names)


def _timeout_s(header: RequestHeader, servable: Servable) -> float:
    timeout_ms = header.timeout_ms if header.timeout_ms is not None else servable.settings.default_timeout_ms
    if timeout_ms is None:
        return math.inf
    if timeout_ms <= 0:
        raise DeadlineUnmeetable(f"timeout_ms is {timeout_ms}: the deadline is already over")
    return timeout_ms / 1e3
