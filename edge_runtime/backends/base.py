"""The seam between serving and the libraries that run models.

Owns: the protocols Backend and Instance and the values that they pass. LibraryBackend and LibraryInstance have what is
there where the backend's declaration says so (declaration.py). Each backend imports its library in its own file only,
inside `probe` and `load`. This module imports no backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct, field

from edge_runtime.backends.declaration import Declaration
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.kept_state import SequenceOptions
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import Interface, ModelSpec
from edge_runtime.steps import Form, ModelSteps
from edge_runtime.tensors import Array, Tensors

if TYPE_CHECKING:
    from edge_runtime.hosts.messages import RequestLine


class Probe(Struct, frozen=True):
    """A backend's state on this device: usable or why not, the library's version, its devices."""

    name: str
    is_available: bool
    version: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""


DECODE_PICTURE = "decode picture"
"""The function of our own that a pipeline has before crops of encoded pictures; no name of Python."""


class StepFunction(Struct, frozen=True):
    """A function of a pipeline's `steps.py`, or DECODE_PICTURE, with what goes in and out of it."""

    name: str
    spec: ModelSpec


class LoadOptions(Struct, frozen=True):
    """How to load one instance: the profile's backend options, overridden by the model's own.

    threads: cores that one `run` may use (intra-op). concurrency: runs at the same time; OpenVINO makes that many
    streams of `threads` each, ONNX Runtime allows any number. precision: "f32", "bf16", "f16", "int8" (which the
    artifact must hold: no backend quantises) or "" for the backend's default. device: "CPU", "GPU", "NPU", "AUTO",
    "CUDA", "TENSORRT" …; "" is the backend's default. spin: threads wait by spinning, between runs too; spins_in_runs:
    only while a run is on, for one that has all cores (ONNX Runtime; others choose themselves). extra: options in the
    library's own words, passed through. max_rows: most rows of one run, where the configuration says it; engines are
    built for that range. host_memory_bytes: what a host may allocate for the model, None for no limit. steps: declared
    with the model, which its host runs beside it. declared: names, datatypes ("" unsaid) and shapes (() unsaid) for a
    file that does not say them. interface: what callers see, where that is not what the model has. functions: of a
    `steps.py`, each an instance; the artifact is that file. within: real folders and files that a host's files must lie
    in, wherever links lead; () for a folder that only the daemon writes. shared_by: the models that it may share a host
    with while it is quiet, which all name the same; "" for a host of its own. sequence: what it keeps
    from one request to the next, in its host. language: the keys of `[language]`; None: it has no such table.
    """

    threads: int = 1
    precision: str = ""
    device: str = ""
    spin: bool = False
    spins_in_runs: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = 1
    max_rows: int | None = None
    host_memory_bytes: int | None = None
    steps: ModelSteps | None = None
    declared: ModelSpec | None = None
    interface: Interface | None = None
    delegate: str = ""
    delegate_options: Mapping[str, str] = field(default_factory=dict)
    functions: tuple[StepFunction, ...] = ()
    within: tuple[str, ...] = ()
    shared_by: str = ""
    sequence: SequenceOptions | None = None
    language: Any = None


class Bound(Protocol):
    """Preallocated buffers of one instance, with a prepared run for each number of rows.

    inputs and outputs: one array for each tensor, in the model's order, each [max_rows, *inner], C-contiguous. They
    live as long as this object; freeing them earlier crashes the library. Thread: one caller at a time.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    max_rows: int

    def run(self, rows: int) -> None:
        """Run the first `rows` rows of the input buffers into the same rows of the output buffers.

        1 <= rows <= max_rows. Raises RunFailed.
        """
        ...


class TriedInstance(Protocol):
    """The subject of a trial: an instance, or a pipeline that is served."""

    @property
    def spec(self) -> ModelSpec:
        """Its inputs and outputs."""
        ...

    @property
    def precision(self) -> str:
        """Of its floats, as read back after the load."""
        ...

    def run(self, inputs: Tensors) -> list[Array]:
        """Run once; outputs in the order of the spec. Raises RunFailed."""
        ...


class Instance(Protocol):
    """One loaded copy of a version on a device.

    Thread: at most `concurrency` threads call `run` at the same time. `close` is idempotent and is called only when no
    run is on; a run after close raises RunFailed.
    """

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs as the library reports them."""
        ...

    @property
    def backend(self) -> str:
        """Name of the backend that loaded it."""
        ...

    @property
    def device(self) -> str:
        """Where the library runs it, read back after load, for example "CPU" or "CUDA:0"."""
        ...

    @property
    def precision(self) -> str:
        """The precision that it runs in, read back after load: "f32", "bf16", "f16", "int8", "mixed"."""
        ...

    @property
    def concurrency(self) -> int:
        """Threads that may call `run` at the same time; 1 or more."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that loading added: measured where the kernel reports it, else the artifact's size."""
        ...

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once on whole arrays; returns arrays that the caller owns.

        inputs: name -> array, dtype and shape as in `spec`, checked by the caller. outputs: the wanted names, in that
        order; None for all in the model's order. Raises RunFailed.
        """
        ...

    def bind(self, max_rows: int) -> Bound | None:
        """Prepare runs of 1..max_rows rows on fixed buffers; None where shapes or datatypes do not allow it.

        The caller makes sure that axis 0 is rows.
        """
        ...

    def close(self) -> None:
        """Free its memory, and that of all that `bind` returned; bound buffers stay until their owner drops them."""
        ...


class LibraryInstance(Instance, Protocol):
    """An instance as a backend's `load` makes it: with the methods that its declaration or its spec speaks of."""

    def attach(self, call: CallOther | None) -> None:
        """Prepare the runs of this thread, which calls it once before its first run in a host.

        call: calls another served model, for the run that is on; None where it may call none. There where the
        declaration `interrupts` or `calls_models`.
        """
        ...

    def interrupt(self, thread: int) -> None:
        """End the run of a thread (`threading.get_ident`) soon; it raises RunFailed. Thread: any.

        There where the declaration `interrupts`.
        """
        ...

    def run_requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[Array] | None:
        """Run once; returns the outputs of all, joined along axis 0, or None where each request was answered by itself.

        inputs: of all requests, joined. Raises RunFailed, Refused: no request was answered. There where
        `spec.by_request` says that it sees each request.
        """
        ...

    def remember(self, values: dict[object, object]) -> None:
        """Have the next run read and change these values, which its sequence keeps.

        There where `spec.remembers`.
        """
        ...


class SteppedInstance(LibraryInstance, Protocol):
    """An instance whose declaration has a `chain`: that asks it in a form of its own."""

    @property
    def step_form(self) -> HostForm:
        """The form in which the chain asks for a step, beside the model's own form."""
        ...


class HostForm(LibraryInstance, Protocol):
    """Another form of a loaded model: one in which it can be asked, or another function of a pipeline's steps."""

    @property
    def form(self) -> Form:
        """Its inputs and outputs."""
        ...


class Backend(Protocol):
    """A library that runs artifacts."""

    @property
    def declaration(self) -> Declaration:
        """Its own facts."""
        ...

    def probe(self) -> Probe:
        """Find the library, its version and devices. Raises nothing: the probe's reason says what is missing."""
        ...

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        """Load one artifact. Raises LoadFailed (bad artifact), BackendUnavailable (missing device or provider)."""
        ...


class LibraryBackend(Backend, Protocol):
    """A backend as its declaration's factory makes it: with the methods that the declaration speaks of."""

    def load(self, artifact: Path, options: LoadOptions) -> LibraryInstance:
        """Load one artifact, as of Backend."""
        ...

    def load_opened(self, artifact: Path, options: LoadOptions, opened: int) -> LibraryInstance:
        """Load an artifact from a descriptor of it, which stays the caller's, by a process that may not open its path.

        Raises as `load`; HasMoreFiles: it needs other files too. There where the declaration `shares`.
        """
        ...

    def load_functions(self, file: Path, options: LoadOptions) -> Sequence[HostForm]:
        """Load the functions of a pipeline's steps, in their order. Raises as `load`.

        There where the declaration `loads_functions`.
        """
        ...

    def prepare(self, artifact: Path, options: LoadOptions, stop: threading.Event) -> None:
        """Wait until what `load` needs is built, which takes minutes, or `stop` is set. Raises as `load`.

        There where the declaration has a `builder`.
        """
        ...


class BuildOrder(Struct, frozen=True):
    """Builds of a backend on this device, made before it loads a model.

    backend: its name. artifact: the file that it is built of. key: 64 hexadecimal digits, of all that the build depends
    on. plan: more, in the words of the declaration's `builder`.
    """

    backend: str
    artifact: str
    key: str
    plan: bytes


class BuildSource(Protocol):
    """A source of what is built."""

    def built(self, order: BuildOrder) -> bytes:
        """Return the bytes under the order's key. Raises NotBuiltYet: it is being built; LoadFailed: it cannot."""
        ...

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Wait until its build ends; False: `stop` was set before. Never on the loader's thread."""
        ...


class RunOwner(Protocol):
    """Whose run it is. thread: that on which its calls of other models arrive, while they do; else 0."""

    thread: int


class HostedRun(Protocol):
    """A run that was begun. Thread: any."""

    def left_s(self) -> float:
        """How long it may go on; math.inf: it has no limit, or waits for another model now."""
        ...

    def give_up(self) -> None:
        """End a run that is over its limit, if it has not ended, and wait for that: it ends with RunTooLong."""
        ...


OnEnd = Callable[["list[Array] | EdgeRuntimeError"], None]
"""Takes what a run ended with: its outputs, or what `run_parts` would raise."""


class RunEvents(Protocol):
    """The loop on which reports of hosts are events. Thread: any."""

    def watch_once(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` on the loop's thread when a descriptor is readable or has ended, once after each `arm`."""
        ...

    def arm(self, fd: int) -> None:
        """Watch a descriptor again."""
        ...

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        ...


class HostStatus(Struct, frozen=True):
    """The status of a host. restarts: hosts started in place of one that ended; last_end: why, "" for none.

    models: that live in it; memory_bytes is this one's share.
    """

    pid: int
    restarts: int
    memory_bytes: int
    last_end: str
    models: int = 1


@runtime_checkable
class HostedInstance(Protocol):
    """An instance in a host: a child process, which may end while the daemon goes on."""

    @property
    def ahead(self) -> int:
        """Runs that may be handed over beside `concurrency`: they wait in the host until one of those ends."""
        ...

    @property
    def begins(self) -> bool:
        """Whether `begin` begins runs, whose ends are events: no thread waits for them."""
        ...

    def begin(self, parts: Sequence[Sequence[Array]], limit_s: float, owner: RunOwner, on_end: OnEnd) -> HostedRun:
        """Begin what `run_parts` runs, and go on.

        on_end: called once, on any thread, with what `run_parts` returns or raises. owner: knows which thread hears of
        the run. limit_s: who keeps the time calls `give_up`. Raises RunFailed, HostEnded: it has not begun.
        """
        ...

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        """Run requests together; returns the outputs of all, in the model's order, which the caller owns.

        parts: each request's inputs in the model's order, to be joined along axis 0. limit_s: a run that lasts longer
        is ended (math.inf: never). alone: this run is on trial, and the caller starts no other beside it. Starts a host
        where there is none. Raises RunFailed; RunTooLong: this run was over its limit; HostEnded: the host ended during
        this run, for which this run may be to blame or another.
        """
        ...

    def room(self, nbytes: int) -> Array | None:
        """Memory for an input of a request that has not come whole, which a run of that request alone reads in place.

        None where there is none, or the input is small. It comes back with its last view. Contents are left over.
        """
        ...

    @property
    def host(self) -> HostStatus:
        """The status of its host now."""
        ...

    @property
    def forms(self) -> Mapping[Form, Instance]:
        """Of declared steps: the other forms in which the same model can be asked."""
        ...

    def finish_warm_up(self) -> None:
        """From here on deaths during runs are the requests' fault. Raises LoadFailed: too many came before."""
        ...

    def restore(self) -> None:
        """Wait until a host can run again, and start one where the last has ended. Raises LoadFailed.

        Called once after each HostEnded, on a thread that may wait; what is queued stays queued meanwhile.
        """
        ...


@runtime_checkable
class HandsOver(Protocol):
    """An instance in a host whose large results may lie where the host of a pipeline's next step reads them.

    hands_over: whether they do; set from any thread.
    """

    hands_over: bool


Called = tuple[Sequence[TensorHeader], Sequence[Array]] | EdgeRuntimeError
"""How a call of another model ended: its outputs, or the error that any caller of it would get."""

BeginCall = Callable[[RequestHeader, Sequence[Array], Callable[[Called], None]], Callable[[], None]]
"""Calls another served model for the run that is on: its request, the arrays of its inputs (BF16 as bits), and who is
called at the end, once, from any thread. Returns a function that takes the call back. Raises CalledTooSoon,
RequestError, Refused. Thread: the run's."""


CallOther = Callable[[RequestHeader, Sequence[Array]], "dict[str, Array]"]
"""Calls another served model, and waits: its request, and the arrays of its inputs. Raises EdgeRuntimeError."""


Fault = tuple[str, str]
"""Why a request has no outputs: the code of an error, and its words."""


class RequestsRun(Protocol):
    """A run as its instance sees it, beside its inputs.

    rows: of each request, along axis 0; empty: it is one request. lines: more of each request; empty: nothing more.
    """

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each request."""
        ...

    @property
    def lines(self) -> Sequence[RequestLine]:
        """More of each request."""
        ...

    def respond(
        self, index: int, outputs: Sequence[Array | None] | None, fault: Fault | None, *, is_last: bool
    ) -> bool:
        """Answer one request; whether its caller still waits.

        outputs: in the model's order, None for one that was not asked for. Thread: any, while the run is on.
        """
        ...

    def is_cancelled(self, index: int) -> bool:
        """Whether the caller of a request does not wait any more. Thread: as above."""
        ...

    def call(self, header: RequestHeader, arrays: Sequence[Array]) -> dict[str, Array]:
        """Call another served model. Raises EdgeRuntimeError."""
        ...


OnResponse = Callable[[int, "Sequence[Array | None] | EdgeRuntimeError | None", bool], bool]
"""Takes a response to one request of a run that is on: which request, its outputs in the model's order (None for one
that was not asked for) or its error, None for neither, and whether it was the last. Returns whether anybody waits for
another. Thread: the run's."""
