"""A model's inputs and outputs: names, datatypes, shapes. Pure values; backends read them from artifacts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

DYNAMIC = -1
"""A dimension of any length."""

ROW_INPUT, ROW_BYTES = "/sequence", 160
"""The input with a row for each request of a run, see kept_state.py; no model has one of that name."""


class TensorSpec(Struct, frozen=True):
    """One input or output: OIP datatype and whole shape, -1 where the model leaves a dimension open.

    quantisation: scale and zero point, where integers stand for `scale * (integer - zero point)`. is_optional: an input
    that a request may leave out, or an output that only a request gets which names it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    quantisation: tuple[float, int] | None = None
    is_optional: bool = False

    @property
    def has_dynamic_axis_0(self) -> bool:
        """Whether axis 0 could be rows."""
        return bool(self.shape) and self.shape[0] == DYNAMIC

    @property
    def has_fixed_inner_shape(self) -> bool:
        """Whether every dimension after axis 0 is known, so that a row has a fixed size."""
        return DYNAMIC not in self.shape[1:]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a concrete shape is allowed: same rank, equal where this spec is fixed, never negative."""
        return len(shape) == len(self.shape) and all(
            got >= 0 and want in (DYNAMIC, got) for got, want in zip(shape, self.shape, strict=True)
        )


class ByRequest(Struct, frozen=True):
    """How a model takes its requests where it sees each of them by itself, as Triton's python models do.

    max_rows: of one request, and of all in a run; 0: axis 0 does not hold rows. joins: a run may have several requests.
    streams: each request gets any number of responses, one after another.
    """

    max_rows: int
    joins: bool
    streams: bool = False


class KeptSequences(Struct, frozen=True):
    """The sequences that a loaded model can keep.

    slots: at the same time. takes_text: whether an id may be text. joins: whether rows of several run together.
    has_states: whether the model itself has states or controls, so that a request of a sequence is one run of it.
    """

    slots: int
    takes_text: bool = True
    joins: bool = True
    has_states: bool = True


class OwnState(Struct, frozen=True):
    """A state that a model's own file declares, as two tensors of it.

    shape: of `initial`, one row where axis 0 is rows. initial: its value at a sequence's beginning.
    """

    input: str
    output: str
    shape: tuple[int, ...]
    initial: bytes


class ModelSpec(Struct, frozen=True):
    """All inputs and outputs of one version, in the model's own order.

    max_rows: most rows that one run takes, as a TensorRT engine was built for; None where the library sets no bound.
    by_request: None for a model that sees the joined rows of a run alone. sequences: None for a model that keeps
    nothing from one request to the next. remembers: a run of code may keep values for the next one of its sequence, see
    `LibraryInstance.remember`. own_states: where its sequences keep them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int | None = None
    by_request: ByRequest | None = None
    sequences: KeptSequences | None = None
    remembers: bool = False
    own_states: tuple[OwnState, ...] = ()

    @property
    def run_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of a run: behind the model's, a row of each request's sequence, where it keeps state."""
        return self.inputs if self.sequences is None else (*self.inputs, _ROWS)

    @property
    def may_batch(self) -> bool:
        """Axis 0 is dynamic in every input and output: a candidate for batching, to be confirmed by the load probe."""
        return bool(self.inputs) and all(spec.has_dynamic_axis_0 for spec in (*self.inputs, *self.outputs))


_ROWS = TensorSpec(ROW_INPUT, "UINT8", (DYNAMIC, ROW_BYTES))


class DeclaredTensor(Struct, frozen=True):
    """An input or output as a configuration beside the model describes it, rows included.

    shape: what requests have. inner_shape: what the model has in its place, of as many elements.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    inner_shape: tuple[int, ...]


class Interface(Struct, frozen=True):
    """The interface of a model, as Triton's `config.pbtxt` has it: names, shapes, and which outputs.

    No tensors: those of the model. by_place: names that the model does not have stand for its tensors in their order.
    """

    model: str
    inputs: tuple[DeclaredTensor, ...]
    outputs: tuple[DeclaredTensor, ...]
    max_batch_size: int = 0
    by_place: bool = False
