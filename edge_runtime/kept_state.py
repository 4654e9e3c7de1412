"""State that a model keeps from one request of a sequence to the next: values. Knows no thread, no library, no wire.

Owns: the keys of `[sequence]`, and the row by which the daemon tells a model's host whose state a request continues.
The ring `sequences` has the table of live sequences (daemon) and the states themselves (host).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct, field

from edge_runtime.errors import SequenceLost
from edge_runtime.model_spec import ROW_BYTES, TensorSpec
from edge_runtime.steps import Datatype, Form, TensorShape

if TYPE_CHECKING:  # a verb's help reads settings, and no numbers
    import numpy as np

    from edge_runtime.tensors import Array

SEQUENCES = "sequences"
"""The name of the `StateDeclaration` that we ship."""

INITIAL_STATE = "initial_state"
"""The folder of a model's files of initial states, beside its settings."""

SEQUENCE_STATE = "sequence_state"
"""The tensor by which the state of a sequence is sent and asked for: BYTES, one element. Alone, in the model's inputs'
place: empty text leaves the state as it is, a snapshot takes its place; the answer is the snapshot of it, or empty."""

STATE_FORM = Form(SEQUENCE_STATE, answers=False)

Control = Literal["START", "END", "READY", "CORRID"]

MAX_TEXT_BYTES = 128
"""Of an id that is text, as Triton has it."""

_ROW = (
    ("serial", "<u8"), ("steps", "<u8"), ("number", "<u8"), ("slot", "<u4"), ("flags", "u1"), ("is_text", "u1"),
    ("length", "<u2"), ("text", f"S{MAX_TEXT_BYTES}"),
)  # fmt: skip
"""A request's sequence, as the host reads it. serial: of the live sequence, never used again; 0: none, and nothing is
kept. steps: how many of its requests counted so far. flags: START, END. number, or text with its length: its id."""

START, END = 1, 2


class StateTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One state: an input that gets what an output gave for the request before. Keys of `[[sequence.state]]`."""

    input: str
    """The input that takes the state."""

    output: str
    """The output that gives the next one. The two are a pair by these names, whatever order the model has them in."""

    initial: str | None = None
    """A file in the folder `initial_state` beside `model.toml`: the state at a sequence's beginning, little-endian, in
    C order. When absent: zeros."""

    shape: TensorShape | None = None
    """The state's whole shape at a sequence's beginning, where the model leaves lengths open. When absent: 1 each."""

    datatype: Datatype | None = None
    """The datatype that the model must have for it. When absent: as the model says."""

    is_answered: bool = False
    """Whether callers get the output too."""


class SequenceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that keeps state between the requests of a sequence."""

    state: tuple[StateTensor, ...] = ()
    """Tables `[[sequence.state]]`. Of an OpenVINO model with states of its own, and of code: none."""

    controls: dict[Control, str] = field(default_factory=dict)
    """Inputs that the daemon fills in, by meaning: `START`, `END` and `READY` are 1 where it holds, `CORRID` is the
    sequence's id: `{START = "is_first"}`."""

    values: dict[Control, tuple[float, float]] = field(default_factory=dict)
    """What a control's input gets for false and for true. When absent: 0 and 1."""

    idle_ms: Annotated[float, Meta(gt=0, le=1e9)] = 60_000.0
    """A sequence without a request for this long is lost, and its next request is refused with `sequence_lost`."""

    max_sequences: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Sequences at the same time; the start of a further one gets `queue_full`. When absent: as many as 64 MiB hold,
    from 16 to 1024."""

    values_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    """Of code that keeps values (`context.sequence`): memory for those of all its sequences, counted in the memory
    budget. A run that would keep more fails, and its sequence goes on as before."""

    snapshot: bool = False
    """Whether a client may have the state of its sequence, as signed text, and begin one from it: after a restart, or
    on another device with the same `sequences.key` in its state folder."""

    def __post_init__(self) -> None:
        for kind in ("input", "output"):
            names = [getattr(each, kind) for each in self.state]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"two states have the {kind} {twice!r}; each has one of its own")
        given = [*self.controls.values(), *(each.input for each in self.state)]
        twice = next((name for name in given if given.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"sequence batching control tensor '{twice}' is specified for multiple control kinds")


class SequenceOptions(Struct, frozen=True):
    """How a host keeps the states of one model. initial: the bytes of each state's file, by input.

    batches: whether axis 0 is rows, in states too; None: where every input, output and state leaves it open. model,
    version, key: of snapshots, where it hands them out. rest_bytes: that its declared inputs keep of one sequence.
    """

    settings: SequenceSettings
    initial: dict[str, bytes] = {}
    batches: bool | None = None
    model: str = ""
    version: int = 0
    key: bytes = b""
    rest_bytes: int = 0


@cache
def row_type() -> np.dtype[Any]:
    """Return the dtype of a request's sequence, of ROW_BYTES."""
    import numpy as np

    return np.dtype(list(_ROW))


def no_sequence() -> Array:
    """Return the row of a run that belongs to no sequence: it begins with the initial state, and nothing is kept."""
    import numpy as np

    return np.zeros((1, ROW_BYTES), np.uint8)


def text_of(row: Any) -> bytes:
    """Return the id of a row that is text: numpy drops NUL at its end."""
    return bytes(row["text"]).ljust(int(row["length"]), b"\0")


class KeptSteps:
    """The slots of a host: which live sequence each one holds, and after how many steps. Two steps of each are kept.

    Thread: any runner of the host; no two runs of one sequence are on at the same time.
    """

    KEPT = 2
    """The newest step, and the one before: the next run says which it continues, so that a run whose answer did not
    count is as if it had not been."""

    def __init__(self, slots: int) -> None:
        import numpy as np

        self._serials = np.zeros(slots, np.uint64)
        self._steps = np.zeros(slots, np.uint64)

    def check(self, rows: Any) -> None:
        """Raise SequenceLost for a row whose state is not here: nothing continues a state that is not its own.

        rows: of `row_type`, one for each request of a run.
        """
        slots, steps = rows["slot"], rows["steps"]
        done = self._steps[slots]
        known = (self._serials[slots] == rows["serial"]) & ((steps == done) | (steps + 1 == done)) | (steps == 0)
        if not known.all():
            row = rows[~known][0]
            name = text_of(row).decode("utf-8", "replace") if row["is_text"] else int(row["number"])
            raise SequenceLost(
                f"the state of sequence {name} is not kept here; its next request must specify the START flag on the "
                "first request of the sequence"
            )

    def move_on(self, rows: Any) -> None:
        """Take note that each row's next step is kept now."""
        slots = rows["slot"]
        self._serials[slots], self._steps[slots] = rows["serial"], rows["steps"] + 1

    def forget(self, slot: int) -> None:
        """Have what continues this slot be told as lost."""
        self._serials[slot] = 0


class KeptStates(Protocol):
    """Gives the states of each sequence, and takes others in their place. row: of `row_type`, one."""

    @property
    def state_specs(self) -> list[TensorSpec]:
        """Name, datatype and shape of each state of one sequence."""
        ...

    def states_of(self, row: Any) -> list[Array]:
        """Return the states that the next run of one sequence would continue. Raises SequenceLost."""
        ...

    def keep(self, row: Any, states: Sequence[Array]) -> None:
        """Keep these states of one sequence, in the shapes of `state_specs`, as those after a step."""
        ...


class StateDeclaration(Struct, frozen=True):
    """A capability that keeps state. All are "module:attribute".

    instance: in the host, (LibraryInstance, SequenceOptions) -> LibraryInstance; raises LoadFailed. form: there too,
    (what that made, SequenceOptions, the `KeptStates` of declared inputs or None) -> the HostForm STATE_FORM; raises
    LoadFailed. table: in the daemon, the `SequenceTable` of a servable. key: there too, (state folder, model, version)
    -> bytes: that of snapshots; raises LoadFailed.
    """

    name: str
    instance: str
    form: str
    table: str
    key: str
