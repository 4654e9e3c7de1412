"""A loaded model that keeps state between the requests of a sequence: gathers states, runs, and scatters the next ones.

Owns: the states of all live sequences of one model, in its host. States are paired by name. Two are kept of each
sequence, its newest and the one before: the next run says which it continues, so a run whose answer did not count,
because it failed, came too late or its batch ran again, is as if it had not been. No row's state depends on another
row. Thread: any runner of the host; no two runs of one sequence are on at the same time.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edge_runtime.backends.base import Bound, CallOther, LibraryInstance, RequestsRun
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.kept_state import (
    END,
    START,
    Control,
    KeptSteps,
    SequenceOptions,
    SequenceSettings,
    StateTensor,
    no_sequence,
    row_type,
    text_of,
)
from edge_runtime.model_spec import DYNAMIC, ROW_INPUT, KeptSequences, TensorSpec
from edge_runtime.tensors import DATATYPES, Array, Tensors, element_count

SLOTS_BYTES = 64 << 20
LEAST_SLOTS, MOST_SLOTS = 16, 1024
"""How many sequences a model keeps that does not say it: as many as this memory holds, within these bounds."""

KEPT = KeptSteps.KEPT

NUMBERS = ("UINT64", "INT64", "UINT32", "INT32")
"""Datatypes of an input that gets an id as a number."""

Rows = npt.NDArray[Any]
"""One `kept_state.row_type` for each request of a run."""


def stateful(instance: LibraryInstance, options: SequenceOptions) -> LibraryInstance:
    """Return the instance as its callers see it: without states and controls. Raises LoadFailed: they do not fit."""
    if instance.spec.by_request is not None:
        return SequencedInstance(instance, options)
    return StatefulInstance(instance, options)


class SequencedInstance:
    """A model that sees each request, with its sequence, and keeps its state itself."""

    def __init__(self, instance: LibraryInstance, options: SequenceOptions) -> None:
        if options.settings.state:
            raise LoadFailed("a model that sees each request keeps its state itself; leave [[sequence.state]] out")
        slots = options.settings.max_sequences or MOST_SLOTS
        self._instance = instance
        self.spec = replace(instance.spec, sequences=KeptSequences(slots))
        self.backend, self.device, self.precision = instance.backend, instance.device, instance.precision
        self.concurrency, self.memory_bytes = instance.concurrency, instance.memory_bytes

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. Raises RunFailed."""
        return self._instance.run(_without_rows(inputs), outputs)

    def run_requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[Array] | None:
        """Run requests; the lines of the run say of which sequences. Raises as the instance."""
        return self._instance.run_requests(_without_rows(inputs), run)

    def bind(self, max_rows: int) -> Bound | None:
        """Return None: a run in a host is waited for."""

    def close(self) -> None:
        """Free its memory."""
        self._instance.close()

    def attach(self, call: CallOther | None) -> None:
        """Prepare the runs of this thread."""
        self._instance.attach(call)

    def interrupt(self, thread: int) -> None:
        """End the run of a thread soon."""
        self._instance.interrupt(thread)

    def remember(self, values: dict[object, object]) -> None:
        """Let the next run have these values."""
        self._instance.remember(values)


def rows_of(array: Array) -> Rows:
    """Return the sequence of each row of a run."""
    rows: Rows = np.ascontiguousarray(array).view(row_type())[:, 0]
    return rows


def _without_rows(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in inputs.items() if name != ROW_INPUT}


class StatefulInstance:
    """An instance whose runs continue sequences."""

    def __init__(self, instance: LibraryInstance, options: SequenceOptions) -> None:
        spec, settings = instance.spec, options.settings
        self._instance = instance
        tensors = (*spec.inputs, *spec.outputs)
        is_open = bool(spec.inputs) and all(each.has_dynamic_axis_0 for each in tensors)
        self._batches = is_open if options.batches is None else options.batches
        inputs = {each.name: each for each in spec.inputs}
        outputs = {each.name: each for each in spec.outputs}
        self._controls = [
            _Control(kind, _named(name, inputs, f"sequence control '{name}'"), settings.values.get(kind, (0, 1)))
            for kind, name in settings.controls.items()
        ]
        own = [
            StateTensor(each.input, each.output, "its own", each.shape[1:] if self._batches else each.shape)
            for each in spec.own_states
        ]
        options = replace(options, initial=options.initial | {each.input: each.initial for each in spec.own_states})
        declared = (*own, *settings.state)
        pairs = [
            (
                each,
                _named(each.input, inputs, f"state input '{each.input}'"),
                _named(each.output, outputs, f"state output '{each.output}'", "output"),
            )
            for each in declared
        ]
        shapes = [_state_shape(state, spec_in, batches=self._batches) for state, spec_in, _ in pairs]
        row_bytes = options.rest_bytes + sum(
            element_count(shape) * DATATYPES[spec_in.datatype].itemsize
            for shape, (_, spec_in, _) in zip(shapes, pairs, strict=True)
        )
        slots = settings.max_sequences or min(max(SLOTS_BYTES // max(row_bytes * KEPT, 1), LEAST_SLOTS), MOST_SLOTS)
        self._states = [
            _State(_Pair(*pair, shape), slots, options, batches=self._batches)
            for pair, shape in zip(pairs, shapes, strict=True)
        ]
        self._done = KeptSteps(slots)
        hidden = {*settings.controls.values(), *(each.input for each in declared)}
        unseen = {each.output for each in declared if not each.is_answered}
        self._values = KeptValues(slots, settings, self._done) if spec.remembers and not declared else None
        is_alone = self._values is not None or any(each.is_open for each in self._states)
        self.spec = replace(
            spec,
            own_states=(),
            inputs=tuple(each for each in spec.inputs if each.name not in hidden),
            outputs=tuple(each for each in spec.outputs if each.name not in unseen),
            sequences=KeptSequences(
                slots,
                all(each.takes_text for each in self._controls),
                joins=not is_alone,
                has_states=bool(self._states or self._controls or self._values is not None),
            ),
        )
        self._outputs = [each.name for each in self.spec.outputs]
        self.backend, self.device, self.precision = instance.backend, instance.device, instance.precision
        self.concurrency = instance.concurrency
        self.memory_bytes = instance.memory_bytes + row_bytes * KEPT * slots
        if self._values is not None:
            self.memory_bytes += self._values.most_bytes

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once, each row with its sequence's state; rows of none begin one. Raises RunFailed, SequenceLost."""
        given = dict(inputs)
        rows = rows_of(given.pop(ROW_INPUT) if ROW_INPUT in given else no_sequence())
        is_kept = bool(rows["serial"][0])
        if not is_kept and self._batches and given:
            rows = np.repeat(rows[:1], len(next(iter(given.values()))))
        states, slots, steps = self._states, rows["slot"], rows["steps"]
        fresh = steps == 0
        if is_kept:
            self._done.check(rows)
        for state in states:
            given[state.input] = state.gather(slots, steps, fresh)
        for control in self._controls:
            given[control.name] = control.values(rows, is_kept=is_kept)
        values: dict[object, object] = {}
        if self._values is not None:
            values = self._values.gather(slots, steps, fresh) if is_kept else values
            self._instance.remember(values)
        wanted = self._outputs if outputs is None else list(outputs)
        unseen = [state.output for state in states if state.output not in wanted]
        results = self._instance.run(given, [*wanted, *unseen])
        if is_kept:
            found = dict(zip((*wanted, *unseen), results, strict=True))
            self._keep(rows, [state.checked(found[state.output], len(rows)) for state in states], values)
        return results[: len(wanted)]

    @property
    def keeps_values(self) -> bool:
        """Whether its sequences keep what code puts there, beside tensors."""
        return self._values is not None

    @property
    def state_specs(self) -> list[TensorSpec]:
        """Name, datatype and shape of each state of one sequence."""
        return [state.spec for state in self._states]

    def states_of(self, row: Rows) -> list[Array]:
        """Return the states that the next run of one sequence would continue. Raises SequenceLost."""
        slots, steps, fresh = row["slot"], row["steps"], row["steps"] == 0
        self._done.check(row)
        arrays = [state.gather(slots, steps, fresh) for state in self._states]
        return [array[0] for array in arrays] if self._batches else arrays

    def keep(self, row: Rows, states: Sequence[Array]) -> None:
        """Keep these states of one sequence, in the shapes of `state_specs`, as those after a step."""
        values = self._values.gather(row["slot"], row["steps"], row["steps"] == 0) if self._values is not None else {}
        self._keep(row, [array[np.newaxis] for array in states] if self._batches else states, values)

    def _keep(self, rows: Rows, following: Sequence[Array], values: dict[object, object]) -> None:
        slots, steps = rows["slot"], rows["steps"] + 1
        if self._values is not None:
            self._values.scatter(rows, values)
        for state, arrays in zip(self._states, following, strict=True):
            state.scatter(slots, steps, arrays)
        self._done.move_on(rows)

    def bind(self, max_rows: int) -> Bound | None:
        """Return None: each run has other states."""

    def close(self) -> None:
        """Free its memory."""
        self._instance.close()

    def attach(self, call: CallOther | None) -> None:
        """Prepare the runs of this thread."""
        self._instance.attach(call)

    def interrupt(self, thread: int) -> None:
        """End the run of a thread soon."""
        self._instance.interrupt(thread)

    def run_requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[Array] | None:
        """Raise RunFailed: a model that sees each request keeps its state itself."""
        del inputs, run
        raise RunFailed("requests are not told apart where states are paired with tensors")

    def remember(self, values: dict[object, object]) -> None:
        """Raise RunFailed: its sequences have their values by their rows."""
        del values
        raise RunFailed("the values of a sequence come with its row")


class _Pair(NamedTuple):
    """A state as declared, its two tensors, and the shape of one sequence's at its beginning."""

    declared: StateTensor
    input: TensorSpec
    output: TensorSpec
    shape: tuple[int, ...]


class _State:
    """One state of all sequences. Shapes: batched, [rows, *shape]; else `shape` is the whole tensor's."""

    def __init__(self, pair: _Pair, slots: int, options: SequenceOptions, *, batches: bool) -> None:
        declared, spec_in, spec_out, shape = pair
        self.input, self.output = declared.input, declared.output
        self._batches = batches
        dtype = DATATYPES[spec_in.datatype].dtype
        if not DATATYPES[spec_in.datatype].itemsize:
            raise LoadFailed(f"state '{self.input}' is text; wanted numbers")
        if spec_in.datatype != spec_out.datatype or declared.datatype not in (None, spec_in.datatype):
            raise LoadFailed(
                f"state '{self.input}' is {spec_in.datatype}, '{self.output}' gives {spec_out.datatype}"
                + (f", and {declared.datatype} is declared" if declared.datatype is not None else "")
                + "; all must be the same"
            )
        self.spec = TensorSpec(self.input, spec_in.datatype, spec_in.shape[1:] if batches else spec_in.shape)
        self.is_open = DYNAMIC in self.spec.shape
        self._initial = _initial(declared, shape, dtype, options)
        self._kept: Any = [[None] * slots for _ in range(KEPT)]
        if not self.is_open:
            self._kept = np.zeros((KEPT, slots, *shape), dtype)  # not touched, so no memory yet

    def gather(self, slots: Rows, steps: Rows, fresh: Rows) -> Array:
        """Return the states that a run continues."""
        if self.is_open or not self._batches:
            array: Array = self._initial if fresh[0] else self._kept[int(steps[0]) % KEPT][int(slots[0])]
            return array[np.newaxis] if self._batches else array
        states: Array = self._kept[(steps % KEPT).astype(np.intp), slots]
        if fresh.any():
            states[fresh] = self._initial
        return states

    def checked(self, array: Array, rows: int) -> Array:
        """Return the next states that the model gave. Raises RunFailed where it cannot be one."""
        wanted = (rows, *self._initial.shape) if self._batches else self._initial.shape
        is_fit = array.shape == wanted
        if self.is_open:
            is_fit = array.ndim == len(wanted) and (not self._batches or array.shape[0] == rows)
        if not is_fit:
            raise RunFailed(
                f"output '{self.output}' has the shape {list(array.shape)}; as the next '{self.input}' it must have "
                f"{list(wanted)}"
            )
        return array

    def scatter(self, slots: Rows, steps: Rows, arrays: Array) -> None:
        """Keep the next states."""
        if self.is_open:
            array = arrays[0] if self._batches else arrays
            self._kept[int(steps[0]) % KEPT][int(slots[0])] = array.copy()
        elif self._batches:
            self._kept[(steps % KEPT).astype(np.intp), slots] = arrays
        else:
            self._kept[int(steps[0]) % KEPT, int(slots[0])] = arrays


class KeptValues:
    """The values that code keeps for each sequence, one row a run: as `_State`, of a dict.

    Owns: that all of them take no more than `most_bytes`. Where they would, those are dropped first that no sequence
    continues any more: its last run was here, or it is idle for too long; what would continue them still is told.
    """

    def __init__(
        self,
        slots: int,
        settings: SequenceSettings,
        done: KeptSteps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds."""
        self.most_bytes = settings.values_mb << 20
        self._idle_s = settings.idle_ms / 1e3
        self._done = done
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: list[list[dict[object, object]]] = [[{} for _ in range(slots)] for _ in range(KEPT)]
        self._nbytes = np.zeros((KEPT, slots), np.int64)
        self._used_s = np.full(slots, -math.inf)

    def gather(self, slots: Rows, steps: Rows, fresh: Rows) -> dict[object, object]:
        """Return a copy of the values that a run continues, for it to change. Raises RunFailed: it cannot be made."""
        if fresh[0]:
            return {}
        try:
            return copy.deepcopy(self._kept[int(steps[0]) % KEPT][int(slots[0])])
        except Exception as error:
            raise RunFailed(
                f"a value that the model keeps for its sequence cannot be copied: {type(error).__name__}: {error}; "
                "keep what all sequences share in what load returns"
            ) from error

    def scatter(self, rows: Rows, values: dict[object, object]) -> None:
        """Keep the values after a run. Raises RunFailed: they are too large; then nothing changed."""
        slot, step = int(rows["slot"][0]), int(rows["steps"][0]) + 1
        is_last = bool(rows["flags"][0] & END)  # of which nothing continues, unless its answer did not count
        nbytes = 0 if is_last else size_of(values)
        with self._lock:
            if step == 1:  # what is there was another sequence's
                self._drop(slot)
            before = int(self._nbytes[step % KEPT, slot])
            total = int(self._nbytes.sum()) - before + nbytes
            if total > self.most_bytes:
                total -= self._drop_over(slot)
            if total > self.most_bytes:
                raise RunFailed(
                    f"it would keep {nbytes:,} bytes for this sequence, and {total:,} for all, two steps of each; at "
                    f"most {self.most_bytes:,} are kept: have the code keep less, raise values_mb in [sequence], or "
                    "lower max_sequences"
                )
            self._kept[step % KEPT][slot] = {} if is_last else values
            self._nbytes[step % KEPT, slot] = nbytes
            self._used_s[slot] = -math.inf if is_last else self._clock()

    def _drop(self, slot: int) -> None:
        for kept in self._kept:
            kept[slot] = {}
        self._nbytes[:, slot] = 0

    def _drop_over(self, but: int) -> int:
        """Drop what no sequence continues any more; return the bytes. but: a slot that stays."""
        held = self._nbytes.sum(axis=0)
        over = (held > 0) & (self._used_s < self._clock() - self._idle_s)
        over[but] = False
        for slot in np.flatnonzero(over).tolist():
            self._drop(slot)
            self._done.forget(slot)
        return int(held[over].sum())


_NUMBERS = frozenset({int, float, bool, complex, type(None)})
_PLAIN = frozenset({*_NUMBERS, str, bytes})
_NOT_KEPT = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)
"""Parts of the program, and not of a value that names them."""


def size_of(value: object) -> int:
    """Return the bytes of all that a value reaches, each object once; of classes, functions and modules none.

    Numbers count wherever they are named: to know them again would take twice the time of their copy.
    """
    total = 0
    seen: set[int] = set()
    rest: list[object] = [value]
    while rest:
        each = rest.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) in _PLAIN:  # most are
            total += sys.getsizeof(each)
            continue
        if isinstance(each, _NOT_KEPT):
            continue
        total += sys.getsizeof(each, 0)
        if isinstance(each, np.ndarray):
            # The whole of which a part is a view is kept with it.
            rest.extend([each.base] if each.base is not None else each.ravel().tolist() if each.dtype.hasobject else [])
            continue
        total += _beside(each)
        found = gc.get_referents(each)
        total += sum(map(sys.getsizeof, [part for part in found if type(part) in _NUMBERS]))
        rest += [part for part in found if type(part) not in _NUMBERS]
    return total


def _beside(value: object) -> int:
    """Bytes of a library's array that Python does not know of."""
    try:
        nbytes = getattr(value, "nbytes", 0)
    except Exception:  # noqa: BLE001  an attribute of anybody's
        return 0
    return max(nbytes - sys.getsizeof(value, 0), 0) if isinstance(nbytes, int) else 0


class _Control:
    """An input that says something of each row's request."""

    def __init__(self, kind: Control, spec: TensorSpec, values: tuple[float, float]) -> None:
        self.name = spec.name
        self._kind = kind
        self._shape = spec.shape
        self._dtype = DATATYPES[spec.datatype].dtype
        self._false, self._true = values
        self.takes_text = kind != "CORRID" or spec.datatype == "BYTES"
        if kind == "CORRID" and spec.datatype not in (*NUMBERS, "BYTES"):
            raise LoadFailed(
                f"unexpected data type for control CONTROL_SEQUENCE_CORRID: '{spec.name}' is {spec.datatype}; wanted "
                f"{', '.join(NUMBERS)} or BYTES"
            )

    def values(self, rows: Rows, *, is_kept: bool) -> Array:
        """Return the input of a run. is_kept: False for one of no sequence, which is the first and the last at once."""
        shape = tuple(
            (len(rows) if axis == 0 else 1) if length == DYNAMIC else length for axis, length in enumerate(self._shape)
        )
        if self._kind == "CORRID":
            each: Array = rows["number"]
            if self._dtype.hasobject:
                each = np.array([text_of(row) if row["is_text"] else b"%d" % row["number"] for row in rows], object)
            array: Array = each.astype(self._dtype)
        else:
            holds: Array = np.ones(len(rows), bool)
            if self._kind != "READY" and is_kept:
                holds = rows["flags"] & (START if self._kind == "START" else END) != 0
            array = np.where(holds, self._true, self._false).astype(self._dtype)
        if not shape or math.prod(shape) == len(rows):
            return array.reshape(shape)
        whole: Array = np.broadcast_to(array.reshape(len(rows), *(1,) * (len(shape) - 1)), shape).copy()
        return whole


def _named(name: str, specs: Mapping[str, TensorSpec], what: str, kind: str = "input") -> TensorSpec:
    """Return a tensor of the model. Raises LoadFailed."""
    found = specs.get(name)
    if found is None:
        raise LoadFailed(
            f"configuration specified {what}, but model does not provide that {kind}; it has {', '.join(sorted(specs))}"
        )
    return found


def _state_shape(declared: StateTensor, spec: TensorSpec, *, batches: bool) -> tuple[int, ...]:
    """Return the shape of one sequence's state at its beginning. Raises LoadFailed: the declared one does not fit."""
    inner = spec.shape[1:] if batches else spec.shape
    if declared.shape is None:
        return tuple(1 if length == DYNAMIC else length for length in inner)
    if len(declared.shape) != len(inner) or any(
        DYNAMIC not in (ours, theirs) and ours != theirs for ours, theirs in zip(declared.shape, inner, strict=True)
    ):
        raise LoadFailed(
            f"state '{spec.name}' is declared with the shape {list(declared.shape)}; the model has {list(inner)}"
        )
    return tuple(
        next((length for length in pair if length != DYNAMIC), 1) for pair in zip(inner, declared.shape, strict=True)
    )


def _initial(declared: StateTensor, shape: tuple[int, ...], dtype: np.dtype[Any], options: SequenceOptions) -> Array:
    """Return the state at a sequence's beginning. Raises LoadFailed: its file has another size."""
    if declared.initial is None:
        return np.zeros(shape, dtype)
    data = options.initial[declared.input]
    if len(data) != element_count(shape) * dtype.itemsize:
        raise LoadFailed(
            f"initial_state/{declared.initial} has {len(data)} bytes; state '{declared.input}' of the shape "
            f"{list(shape)} has {element_count(shape) * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype).reshape(shape)
