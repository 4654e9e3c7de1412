"""A request header checked against one servable: once, then used for every request with those bytes.

Owns: the checks of a header against a model's specs, so no bad request reaches a batch. Knows no wire: the bytes that
an encoding writes for each answer of a plan are kept with it, and are the encoding's. A plan is valid while its
servable is the live one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.answers import Answer, answer_fields, answers_of, array_outputs, kind_of, parted_by
from edge_runtime.config.settings import DEFAULT_PRIORITY, ModelSettings
from edge_runtime.errors import DeadlineUnmeetable, Forbidden, TensorMismatch, Unsupported
from edge_runtime.hosts.regions import SharedTensor
from edge_runtime.messages import RAW, TOP_K, UNNAMED, RequestHeader, TensorHeader
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import BARE, InlineBuffers, Servable
from edge_runtime.request import policy
from edge_runtime.request.request import CLIENT, Origin
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import DATATYPES, Array, array_from_wire, element_count
from edge_runtime.wire.codec import frame_sizes, typed

if TYPE_CHECKING:
    from edge_runtime.models.split import Split


class InlineCut(Struct, frozen=True):
    """How to cut a batch's outputs into requests: for each wanted output, its index and one request's share.

    shapes: of one request's outputs, in that order. nbytes: of these together.
    """

    outputs: tuple[tuple[int, struct.Struct], ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class Canary(NamedTuple):
    """The candidate's plan of a header, and the split that decides when it answers."""

    split: Split
    plan: RequestPlan


class HeadPlan(NamedTuple):
    """As much of a plan as admission reads, of a request of which only the head has come.

    Nothing is known of it but its timeout, so it counts as one row, at its model's own priority and level.
    """

    timeout_s: float
    priority: int
    level: int
    rows: int = 1
    shape: object = None


class RequestPlan:
    """A checked header.

    sizes: exact bytes of each tensor frame, -1 for BYTES. order: for each input of the model, which frame holds it.
    shape: inner shapes and datatypes, equal for requests that may share a batch. copies_shared: inputs may lie in their
    client's memory, and no host reads them, so a lone run copies them first. inline: set when the lean path may answer
    it; None while a canary or a mirror needs each request by itself. timeout_s is math.inf without a deadline.
    absent: optional inputs that it leaves out, whose index in `order` is -1. makes_bursts: many requests of it may be
    one, whose only input and outputs are theirs in a row.
    level, queue_timeout_s: of a model with `[queue]`.
    canary: a release that may answer instead, or None. origin: of all its requests. places: where outputs go in shared
    memory, as in the header. kept: for the encoding of its answers. is_bare: its answers are their outputs, and
    nothing beside them. is_judged_first: the queue of its model alone decides what is refused, so that is known before
    a request is made.
    """

    def __init__(
        self, servable: Servable, header: RequestHeader, canary: Canary | None = None, origin: Origin = CLIENT
    ) -> None:
        header = named_inputs(servable, header)
        servable = servable.form_for(header)
        self.servable = servable
        self.inputs = header.inputs
        self.order = _match_inputs(servable, header.inputs)
        self.absent = _absent_inputs(servable, self.order)
        self.rows = _count_rows(servable, [header.inputs[index] for index in self.order if index >= 0])
        self.sizes = frame_sizes(header.inputs)
        self.nbytes = sum(size for size in self.sizes if size > 0)
        _check_places(header.inputs)
        self.places = header.output_places
        self.copies_shared = header.has_places and not servable.is_hosted
        self._plain_dtypes = [
            _plain_dtype(header.inputs[index], self.sizes[index]) if index >= 0 else None for index in self.order
        ]
        self.outputs = _match_outputs(servable, header.outputs)
        self._least_bytes = _output_bytes(servable, self.outputs, self.rows) if self.places else ()
        shapes = tuple(tensor.shape[1:] if servable.batches else tensor.shape for tensor in header.inputs)
        self.shape: object = (shapes, self.absent) if self.absent else shapes
        settings = servable.settings
        self.timeout_s = _timeout_s(header, servable)
        self.priority = header.priority or settings.priority or DEFAULT_PRIORITY
        self.level, self.queue_timeout_s = 0, math.inf
        if settings.queue is not None:
            self.priority, self.level = settings.priority, policy.level_of(header.asked_level, settings.queue)
            self.queue_timeout_s = policy.queue_timeout_s(
                settings.queue.policy_of(self.level), header.queue_timeout_ms or 0.0
            )
        self.wants_timing = header.timing
        self._gives_answers = (
            servable.steps is not None
            and servable.form.answers
            and not (servable.chain is not None and _wants_raw(header))  # a model has a form of its own for that
        )
        self._top_k = _top_k(header, servable)
        self.origin = origin
        self.metrics = ModelMetrics() if origin.is_check else servable.metrics
        self.canary = canary
        self.is_bare = not self.wants_timing and not self._gives_answers
        self.is_judged_first = canary is None and servable.chain is None and servable.mode == "workers"
        is_seen_alone = header.has_places or canary is not None or (servable.mirror is not None and not origin.is_check)
        is_seen_alone = is_seen_alone or header.has_extra or servable.sequences is not None
        self.inline = self._cut(servable.inline) if servable.inline is not None and not is_seen_alone else None
        self.makes_bursts = not is_seen_alone and not self.wants_timing and self._is_rows_of_one_tensor()
        self.kept: Any = None

    def turn(self) -> RequestPlan:
        """This plan, or the candidate's when it is its turn. Counts a request: called once for each."""
        canary = self.canary
        return canary.plan if canary is not None and canary.split.is_candidates_turn() else self

    def arrays(self, tensors: Sequence[Any]) -> list[Array]:
        """A request's tensors, in the header's order, as arrays in the model's order, without copying.

        tensors: arrays of the header's shapes, frames of bytes, or SharedTensors: BOOL, whose values are checked, is
        copied now, others when they run (`copies_shared`). Raises TensorMismatch unless
        number and lengths of the frames are what the header says.
        """
        inputs = self.inputs
        if len(tensors) != len(inputs):
            raise TensorMismatch(f"the header names {len(inputs)} inputs, {len(tensors)} tensor frames came")
        arrays: list[Array] = []
        for index, plain in zip(self.order, self._plain_dtypes, strict=True):
            if index < 0:
                arrays.append(self._no_input(len(arrays)))
                continue
            tensor = tensors[index]
            if isinstance(tensor, SharedTensor):
                tensor = self._own_or_shared(inputs[index], tensor)
            elif not isinstance(tensor, np.ndarray):
                header, want = inputs[index], self.sizes[index]
                if plain is not None and len(tensor) == want:
                    array = np.frombuffer(tensor, plain)
                    if array.flags.aligned:
                        arrays.append(array.reshape(header.shape))
                        continue
                if want not in (-1, len(tensor)):
                    raise TensorMismatch(
                        f"input byte size mismatch for input '{header.name}' for model '{self.servable.model}'. "
                        f"Expected {want}, got {len(tensor)}: its shape is {header.datatype} {_shape(header.shape)}"
                    )
                what = f"inference input '{header.name}' for model '{self.servable.model}'"
                tensor = array_from_wire(header.datatype, header.shape, tensor, what)
            arrays.append(tensor)
        servable = self.servable
        if servable.form.kind != "tensor" and servable.steps is not None:
            for index, spec in enumerate(servable.spec.inputs):
                declared = servable.steps.inputs.get(spec.name)
                if arrays[index].dtype == object and declared is not None and declared.is_file:
                    arrays[index] = _without_base64(arrays[index])
        return arrays

    def _no_input(self, index: int) -> Array:
        """Return the stand-in for an optional input that a request leaves out: no elements."""
        dtype = DATATYPES[self.servable.spec.inputs[index].datatype].dtype
        return np.empty((self.rows, 0) if self.servable.batches else (0,), dtype)

    def rows_of(self, data: bytes) -> list[Array]:
        """The only input of several requests, whose bytes are `data`: [requests * rows, *inner], without copying."""
        return [np.frombuffer(data, self._plain_dtypes[0]).reshape((-1, *self.inputs[0].shape[1:]))]

    def check_destinations(self, destinations: Sequence[Array | None]) -> None:
        """Raise TensorMismatch for an output that its place in shared memory cannot hold."""
        for index, place, destination, least in zip(
            self.outputs, self.places, destinations, self._least_bytes, strict=True
        ):
            if place is None or destination is None:
                continue
            spec = self.servable.spec.outputs[index]
            if spec.datatype == "BYTES":
                raise TensorMismatch(f"output {spec.name!r}: BYTES tensors come in frames, never in a region")
            itemsize = DATATYPES[spec.datatype].itemsize
            if place.offset % itemsize:
                raise TensorMismatch(f"output {spec.name!r}: offset {place.offset} is not a multiple of {itemsize}")
            if destination.nbytes < least:
                raise TensorMismatch(f"output {spec.name!r} is {least} bytes, its place has {destination.nbytes}")

    def _own_or_shared(self, header: TensorHeader, tensor: SharedTensor) -> Array:
        if header.datatype == "BOOL":  # its values are checked, on a copy
            return array_from_wire(header.datatype, header.shape, tensor.array.tobytes())
        return tensor.array

    def select(self, outputs: Sequence[Array]) -> list[Array]:
        """The wanted outputs, in the order of the request."""
        return [outputs[index] for index in self.outputs]

    def answers(self, selected: Sequence[Array]) -> list[Answer] | None:
        """Return these outputs as answers, one a row; None where they are bare outputs."""
        servable = self.servable
        if not self._gives_answers or servable.steps is None:
            return None
        names = [servable.spec.outputs[index].name for index in self.outputs]
        answers = answers_of(servable.steps, dict(zip(names, selected, strict=True)))
        if self._top_k is not None:
            answers = [replace(each, classes=each.classes and each.classes[: self._top_k]) for each in answers]
        # Nothing found is an answer, too: of a pipeline whose step had no item, or was skipped.
        return answers if answers or not servable.steps.outputs.keys().isdisjoint(names) else None

    def words(self, selected: Sequence[Array]) -> dict[str, Any] | None:
        """The JSON of the same, beside these outputs as tensors, which stand for masks and embeddings."""
        answers, steps = self.answers(selected), self.servable.steps
        if answers is None or steps is None:
            return None
        names = (self.servable.spec.outputs[index].name for index in self.outputs)
        return answer_fields(answers, as_list=steps.has_items, named=array_outputs(steps, names))

    def tensor_headers(self, shapes: Sequence[tuple[int, ...]]) -> list[TensorHeader]:
        """Name, datatype and shape of each wanted output."""
        specs = self.servable.spec.outputs
        places = self.places or (None,) * len(self.outputs)
        return [
            TensorHeader(specs[index].name, specs[index].datatype, shape, place)
            for index, shape, place in zip(self.outputs, shapes, places, strict=True)
        ]

    def _is_rows_of_one_tensor(self) -> bool:
        """Whether requests are rows of one input to a host, and their outputs, at least one, rows of fixed size."""
        servable = self.servable
        if not servable.is_hosted or servable.form != BARE or not servable.batches:
            return False
        if self._plain_dtypes != self._plain_dtypes[:1] or self._plain_dtypes[0] is None:
            return False
        outputs = [servable.spec.outputs[index] for index in self.outputs]
        return bool(outputs) and all(
            each.has_fixed_inner_shape and element_count(each.shape[1:]) * DATATYPES[each.datatype].itemsize > 0
            for each in outputs
        )

    def _cut(self, buffers: InlineBuffers) -> InlineCut | None:
        if self.rows > buffers.max_rows or self.wants_timing or -1 in self.sizes:
            return None
        if self.order != tuple(range(len(self.order))):
            return None
        shapes = tuple((self.rows, *buffers.output_inner_shapes[index]) for index in self.outputs)
        cuts = tuple(
            (index, struct.Struct(f"{self.rows * buffers.output_row_bytes[index]}s")) for index in self.outputs
        )
        if not cuts or not all(cut.size for _, cut in cuts):
            return None  # nothing to cut a batch by
        return InlineCut(cuts, shapes, sum(cut.size for _, cut in cuts))


def plan_request(table: ModelTable, header: RequestHeader, origin: Origin = CLIENT) -> RequestPlan:
    """Check a header against the servable that answers it now.

    Raises RequestError; NotReady, which asks for a version that waits on demand. Thread: any.
    """
    if header.model in table.closed and not origin.asks_closed:
        raise Forbidden(f"model {header.model} belongs to the detectors that sent it; no other door asks it")
    servable = table.resolve(header.model, header.version)
    split = table.split_of(header.model) if header.version is None else None
    canary = Canary(split, RequestPlan(split.candidate, header, None, origin)) if split is not None else None
    return RequestPlan(servable, header, canary, origin)


def plan_head(servable: Servable, header: RequestHeader) -> HeadPlan:
    """Plan a request by its head alone. header: says its timeout. Thread: any."""
    settings = servable.settings
    timeout_ms = timeout_ms_of(header, settings)
    return HeadPlan(
        math.inf if timeout_ms is None else timeout_ms / 1e3,
        settings.priority or DEFAULT_PRIORITY,
        settings.queue.default_level if settings.queue is not None else 0,
    )


def named_inputs(servable: Servable, header: RequestHeader) -> RequestHeader:
    """The header with the model's name for an UNNAMED tensor. Raises TensorMismatch where no input takes one."""
    if all(tensor.name != UNNAMED for tensor in header.inputs):
        return header
    declared = next(iter(servable.steps.inputs), None) if servable.steps is not None else None
    own = [spec.name for spec in servable.spec.inputs]
    is_pipeline = servable.chain is not None
    if declared is None and is_pipeline:
        declared = next((spec.name for spec in servable.spec.inputs if spec.datatype == "BYTES"), None)
    if declared is None and UNNAMED not in own:
        raise TensorMismatch(_why_undeclared(servable, is_pipeline=is_pipeline))
    inputs = [replace(each, name=declared or UNNAMED) if each.name == UNNAMED else each for each in header.inputs]
    return replace(header, inputs=tuple(inputs))


def _why_undeclared(servable: Servable, *, is_pipeline: bool = False) -> str:
    from edge_runtime.hosts.steps_instance import why_undeclared

    return why_undeclared(servable.model, servable.spec, servable.about.offered, is_pipeline=is_pipeline)


def _match_inputs(servable: Servable, inputs: Sequence[TensorHeader]) -> tuple[int, ...]:
    """For each input of the model, the index of the request's tensor of that name; -1 for one that may be left out."""
    spec = servable.spec
    given = {tensor.name: index for index, tensor in enumerate(inputs)}
    wanted = [tensor.name for tensor in spec.inputs]
    needed = {tensor.name for tensor in spec.inputs if not tensor.is_optional}
    if len(given) != len(inputs) or not needed <= set(given) <= set(wanted):
        raise TensorMismatch(f"{_inputs_fault(servable, inputs)} It takes {', '.join(wanted)}, each once.")
    for tensor in spec.inputs:
        if tensor.name not in given:
            continue
        got_tensor = inputs[given[tensor.name]]
        _check_tensor(servable, tensor, got_tensor)
        if fault := servable.why_unreadable(got_tensor):
            raise TensorMismatch(f"input {tensor.name!r}: {fault}")
    return tuple(given.get(name, -1) for name in wanted)


def _inputs_fault(servable: Servable, inputs: Sequence[TensorHeader]) -> str:
    """Why a request's inputs are not the model's, as Triton says it."""
    spec, model = servable.spec, servable.model
    given = [tensor.name for tensor in inputs]
    known = {tensor.name for tensor in spec.inputs}
    strange = next((name for name in given if name not in known), None)
    if strange is not None and len(given) == len(known):
        return f"unexpected inference input '{strange}' for model '{model}'."
    needed = [tensor.name for tensor in spec.inputs if not tensor.is_optional]
    number = (
        f"{len(known)} inputs"
        if len(needed) == len(known)
        else f"number of inputs between {len(needed)} and {len(known)}"
    )
    fault = f"expected {number} but got {len(given)} inputs for model '{model}'. Got input(s) {_quoted(given)}"
    if missing := [name for name in needed if name not in given]:
        return f"{fault}, but missing required input(s) {_quoted(missing)}. Please provide all required input(s)."
    return f"{fault}."


def _quoted(names: Sequence[str]) -> str:
    """Names as Triton lists them."""
    return f"[{','.join(map(repr, names))}]"


def _absent_inputs(servable: Servable, order: Sequence[int]) -> tuple[str, ...]:
    return tuple(spec.name for spec, index in zip(servable.spec.inputs, order, strict=True) if index < 0)


def _check_tensor(servable: Servable, spec: TensorSpec, got: TensorHeader) -> None:
    model = servable.model
    if got.datatype not in DATATYPES:
        raise Unsupported(f"input {got.name!r}: datatype {got.datatype!r} is unknown; wanted {spec.datatype}")
    is_bits = (spec.datatype, got.datatype) == ("BF16", "UINT16")
    if got.datatype != spec.datatype and not is_bits:
        fault = (
            f"inference input '{got.name}' data-type is '{got.datatype}', but model '{model}' expects '{spec.datatype}'"
        )
        if got.datatype == "BYTES" and len(spec.shape) == 4 and (servable.steps is None or not servable.steps.inputs):
            fault = f"{fault}; {_why_undeclared(servable)}"
        raise TensorMismatch(f"{fault}{_wanted(servable, got)}")
    if not spec.fits(got.shape):
        raise TensorMismatch(
            f"unexpected shape for input '{got.name}' for model '{model}'. Expected {_shape(spec.shape)}, got "
            f"{_shape(got.shape)}; -1 is any length{_wanted(servable, got)}"
        )


def _wanted(servable: Servable, got: TensorHeader) -> str:
    """Return what a declared input takes in place of its tensor, as the end of an error; "" where nothing is to say."""
    declared = servable.steps.inputs.get(got.name) if servable.steps is not None else None
    words = "" if declared is None else declared.wanted(got.datatype, is_pipeline=servable.chain is not None)
    return f"; {words}" if words else ""


def _without_base64(files: Array) -> Array:
    """Files, of which JSON has only base64. No picture or sound is base64, so neither is taken for the other."""
    import base64

    found: Array = files.copy()
    for index, data in np.ndenumerate(files):
        if isinstance(data, bytes) and data.isascii():
            with suppress(ValueError):
                found[index] = base64.b64decode(data, validate=True)
    return found


def _wants_raw(header: RequestHeader) -> bool:
    return typed(header.parameters or {}, RAW, bool, None) is True


def _top_k(header: RequestHeader, servable: Servable) -> int | None:
    """Most classes that the words of an answer are to have; None: as many as are declared."""
    steps = servable.steps
    if steps is None or not servable.form.answers:
        return None
    wanted: int | None = typed(header.parameters or {}, TOP_K, int, None)
    if wanted is None:
        return None
    declared = max((each.top_k for each in steps.outputs.values() if kind_of(each) == "classes"), default=wanted)
    if not 1 <= wanted <= declared:
        raise TensorMismatch(f"top_k: got {wanted}, wanted 1 to {declared}, which is the top_k in model.toml")
    return wanted


def _shape(shape: Sequence[int]) -> str:
    """A shape without spaces, as Triton writes it."""
    return f"[{','.join(map(str, shape))}]"


def _plain_dtype(tensor: TensorHeader, size: int) -> np.dtype[np.generic] | None:
    """The dtype that a frame of this input is viewed as with no further look; None where its values are checked."""
    return DATATYPES[tensor.datatype].dtype if size > 0 and tensor.datatype != "BOOL" else None


def _count_rows(servable: Servable, inputs: Sequence[TensorHeader]) -> int:
    if not servable.batches:
        return 1
    counts = {tensor.shape[0] for tensor in inputs} or {1}  # of one that leaves out all its inputs
    if len(counts) != 1:
        raise TensorMismatch(f"axis 0 is rows and must be equal in all inputs; got {sorted(counts)}")
    (rows,) = counts
    if not 1 <= rows <= servable.max_rows:
        most = servable.max_rows
        raise TensorMismatch(
            f"inference request batch-size must be <= {most} for '{servable.model}', and 1 or more; got {rows}"
        )
    return rows


def _match_outputs(servable: Servable, names: Sequence[str] | None) -> tuple[int, ...]:
    known = {tensor.name: index for index, tensor in enumerate(servable.spec.outputs)}
    if names is None:
        return tuple(index for index, tensor in enumerate(servable.spec.outputs) if not tensor.is_optional)
    for name in names:
        if name not in known:
            raise TensorMismatch(
                f"unexpected inference output '{name}' for model '{servable.model}'; it gives {', '.join(known)}"
            )
    times = parted_by(known) if servable.form.answers else ""
    if times and times not in names:
        raise TensorMismatch(
            f"outputs: got {', '.join(names)}; model {servable.model!r} has several answers for what was sent, so ask "
            f"for {times!r} too, or with raw = true for the bare outputs"
        )
    return tuple(known[name] for name in names)


def _output_bytes(servable: Servable, outputs: Sequence[int], rows: int) -> tuple[int, ...]:
    """Bytes of each wanted output; 0 where only the run shows it."""
    found: list[int] = []
    for index in outputs:
        spec = servable.spec.outputs[index]
        shape = (rows, *spec.shape[1:]) if servable.batches else spec.shape
        found.append(0 if DYNAMIC in shape else element_count(shape) * DATATYPES[spec.datatype].itemsize)
    return tuple(found)


def _check_places(inputs: Sequence[TensorHeader]) -> None:
    for tensor in inputs:
        if tensor.place is not None and tensor.datatype == "BYTES":
            raise TensorMismatch(f"input {tensor.name!r}: BYTES tensors are sent in frames, never in a region")


def timeout_ms_of(header: RequestHeader, settings: ModelSettings) -> float | None:
    """The deadline of a request, in milliseconds from its arrival; None: it has none."""
    given = [header.timeout_ms, header.queue_timeout_ms if settings.queue is None else None]
    return min((each for each in given if each is not None), default=settings.default_timeout_ms)


def _timeout_s(header: RequestHeader, servable: Servable) -> float:
    timeout_ms = timeout_ms_of(header, servable.settings)
    if timeout_ms is None:
        return math.inf
    if timeout_ms <= 0:
        raise DeadlineUnmeetable(f"timeout_ms is {timeout_ms}: the deadline is already over")
    return timeout_ms / 1e3
