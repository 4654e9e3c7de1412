"""Messages between the daemon, a prepared parent and its hosts, and the sockets that carry them.

Owns: the message types. Every socket is a Unix socket that keeps messages apart (SOCK_SEQPACKET); msgspec writes and
checks each message, so a broken or hostile host sends at worst bytes that do not decode. Descriptors travel beside a
message (SCM_RIGHTS). No object ever travels as code.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import Declaration
from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import ByRequest, KeptSequences
from edge_runtime.steps import Form

MAX_MESSAGE_BYTES = 1 << 17
"""A description of a model with a thousand tensors is smaller, and a socket takes at least this much at once."""

MAX_TASK_BYTES = MAX_MESSAGE_BYTES - 4096
"""A host's task goes to it in one message."""

STUCK_STATUS = 75
"""The exit status of a shared host in which a model that was given up does not end."""

MAX_DESCRIPTORS = 250
"""Of one message: SCM_MAX_FD of the kernel is 253."""


# ---- the daemon to a prepared parent, and back ----------------------------------------------------------------------


class HostTask(Struct, frozen=True, tag="host"):
    """The task of one host.

    declaration: of its backend. runners: runs that may be on at the same time. ahead: as many more may be handed over,
    and wait in the host for a runner. memory_bytes: data that the host may allocate besides what it began with, None
    for no limit. allows_code: whether files that are code may be loaded. shared_by: the models that it may share a host
    with, as of LoadOptions.
    """

    declaration: Declaration
    artifact: str
    options: LoadOptions
    runners: int
    memory_bytes: int | None = None
    allows_code: bool = False
    ahead: int = 0
    shared_by: str = ""

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.declaration.name


class SharedTask(Struct, frozen=True, tag="shared"):
    """A host that several models share; each comes by `Join`. memory_bytes: as of HostTask, of all together."""

    declaration: Declaration
    memory_bytes: int | None = None

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.declaration.name


class CallTask(Struct, frozen=True, tag="call"):
    """A function that one forked process calls, as a child of sandbox/child.py does: with its task, confined.

    backend: the name, which `prepare` takes, of the libraries of its parent; both functions are `module:name`.
    data: the function's task as JSON. reads, writes, within, niceness: see Confinement.
    """

    backend: str
    prepare: str
    function: str
    data: bytes
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    within: tuple[str, ...] = ()
    niceness: int = 0


class Fork(Struct, frozen=True, tag="fork"):
    """Fork a host. Its control socket, its log and its runners' sockets come with the message, in this order.

    In place of the runners' sockets comes the pipe for its reports where it calls a function. folder: its temporary
    one, to be made; "" where there is none.
    """

    host: int
    task: HostTask | SharedTask | CallTask
    folder: str = ""


class Kill(Struct, frozen=True, tag="kill"):
    """Kill a host with all that it started."""

    host: int


class Prepared(Struct, frozen=True, tag="prepared"):
    """The library is imported."""


class Forked(Struct, frozen=True, tag="forked"):
    """A host was made; reason: why not, where pid is 0."""

    host: int
    pid: int
    reason: str = ""


class Ended(Struct, frozen=True, tag="ended"):
    """A host ended, and all that it started. status: as of Popen, negative for a signal.

    reason: why its parent killed it, "" where it did not.
    """

    host: int
    status: int
    reason: str = ""


class Join(Struct, frozen=True, tag="join"):
    """Load one model more, in a host that is shared.

    Its control socket, its runners' sockets and its file, opened to be read, come with the message, in this order.
    """

    task: HostTask


ParentOrder = Fork | Kill
ParentReport = Prepared | Forked | Ended


# ---- the daemon to a host's control socket, and back ----------------------------------------------------------------


class Hello(Struct, frozen=True, tag="hello"):
    """The host began."""


class TensorLine(Struct, frozen=True, array_like=True):
    """One input or output of a model, as TensorSpec."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    quantisation: tuple[float, int] | None = None
    is_optional: bool = False


class FormLines(Struct, frozen=True, array_like=True):
    """A form in which a model with declared steps can be asked, see steps.py."""

    form: Form
    inputs: tuple[TensorLine, ...]
    outputs: tuple[TensorLine, ...]


class Loaded(Struct, frozen=True, tag="loaded"):
    """The model is loaded: the facts of its instance. can_interrupt: whether its library can end a run.

    forms: beside its own tensors, of declared steps. by_request, sequences: as ModelSpec has them.
    """

    inputs: tuple[TensorLine, ...]
    outputs: tuple[TensorLine, ...]
    max_rows: int | None
    device: str
    precision: str
    concurrency: int
    memory_bytes: int
    can_interrupt: bool
    forms: tuple[FormLines, ...] = ()
    by_request: ByRequest | None = None
    sequences: KeptSequences | None = None


class NotLoaded(Struct, frozen=True, tag="not loaded"):
    """The model is not loaded. code: of the error. wants_own_host: it is shared, and may be, alone."""

    message: str
    code: str
    waits_for_build: bool = False
    wants_own_host: bool = False


class WantsBuilt(Struct, frozen=True, tag="wants built"):
    """The backend asks for the bytes that it has built of the model. plan, key: as of BuildOrder."""

    plan: bytes
    key: str


class Built(Struct, frozen=True, tag="built"):
    """A build, whose memory comes with the message."""

    nbytes: int


class NotBuilt(Struct, frozen=True, tag="not built"):
    """Nothing is built. is_being_built: but it will be."""

    message: str
    is_being_built: bool


class Interrupt(Struct, frozen=True, tag="interrupt"):
    """End a run, where the library can. runner: its number; run: how many runs that runner began."""

    runner: int
    run: int


HostReport = Hello | Loaded | NotLoaded | WantsBuilt
HostOrder = Built | NotBuilt | Interrupt


# ---- the daemon to a runner, and back -------------------------------------------------------------------------------


class SlotPlace(Struct, frozen=True, array_like=True):
    """A tensor in shared memory. region: 0 for the runner's slot, else a region that the host was given."""

    shape: tuple[int, ...]
    offset: int
    nbytes: int
    region: int = 0


class Run(Struct, frozen=True, tag="run", array_like=True):
    """Run the model on these inputs, in its order. results_at: where results may begin in the slot.

    form: 0 for the model's own tensors, else the number of a form of its steps, counted from 1. rows: of each request,
    for a model that sees each by itself; empty: it is one.
    """

    inputs: tuple[SlotPlace, ...]
    results_at: int
    form: int = 0
    rows: tuple[int, ...] = ()


class RequestLine(Struct, frozen=True, array_like=True, omit_defaults=True):
    """One request beside its tensors, for a model that sees each request by itself.

    outputs: wanted names, empty for all. absent: optional inputs that it leaves out. timeout_us: 0 for none. sequence,
    flags: of its sequence, 0 for none; as of `kept_state.START` and `END`.
    """

    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, str | int | float | bool] = {}
    timeout_us: int = 0
    priority: int = 0
    absent: tuple[str, ...] = ()
    sequence: int | str = 0
    flags: int = 0


class RequestLines(Struct, frozen=True, tag="requests", array_like=True):
    """Of the requests of the next run, in its order. Not sent where there are none."""

    lines: tuple[RequestLine, ...]


class ResponseTaken(Struct, frozen=True, tag="taken", array_like=True):
    """A response was taken. is_waited_for: whether anybody waits for another."""

    is_waited_for: bool


class Memory(Struct, frozen=True, tag="memory", array_like=True):
    """The next message holds one byte and the descriptor of memory: of a region, or for 0 of a new slot."""

    nbytes: int
    region: int = 0


class Forget(Struct, frozen=True, tag="forget", array_like=True):
    """A region is gone."""

    region: int


class Results(Struct, frozen=True, tag="results", array_like=True):
    """The run's results are in the slot, in the model's order."""

    outputs: tuple[SlotPlace, ...]


class NeedsMemory(Struct, frozen=True, tag="needs memory", array_like=True):
    """The results need a slot of this size; a new one is to be sent."""

    nbytes: int


class Respond(Struct, frozen=True, tag="respond", array_like=True):
    """A response to one request of the run, or, with neither outputs nor a code, a question whether it is waited for.

    outputs: in the slot, in the model's order, None for one that was not asked for; none: no outputs. code, message: of
    an error, "" for none. is_last: nothing more comes for this request.
    """

    index: int
    outputs: tuple[SlotPlace | None, ...] | None = None
    code: str = ""
    message: str = ""
    is_last: bool = False


class Responded(Struct, frozen=True, tag="responded", array_like=True):
    """The run has ended, and every request of it had its last response."""


class NotRun(Struct, frozen=True, tag="not run", array_like=True):
    """The run failed. code, retry_after_ms: of the error."""

    message: str
    code: str = RunFailed.code
    retry_after_ms: float | None = None


class TensorPlace(Struct, frozen=True, array_like=True):
    """A named tensor in the slot."""

    name: str
    datatype: str
    place: SlotPlace


class CallModel(Struct, frozen=True, tag="call", array_like=True):
    """The run calls another served model, and waits. Its inputs are in the slot; the rest is as in RequestHeader."""

    model: str
    inputs: tuple[TensorPlace, ...]
    version: int | None = None
    outputs: tuple[str, ...] | None = None
    timeout_ms: float | None = None
    parameters: dict[str, str | int | float | bool] = {}


class Answered(Struct, frozen=True, tag="answered", array_like=True):
    """The other model answered. Its outputs are in the slot, from 0."""

    outputs: tuple[TensorPlace, ...]


class NotCalled(Struct, frozen=True, tag="not called", array_like=True):
    """The other model did not answer. The fields are the error's."""

    message: str
    code: str
    retry_after_ms: float | None = None


RunnerOrder = Run | Memory | Forget | RequestLines
RunnerReport = Results | NeedsMemory | NotRun | CallModel | Respond | Responded
CallReport = Answered | NotCalled | Memory
RespondReport = ResponseTaken | Memory


_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (
        *(ParentOrder, ParentReport, HostReport, HostOrder, RunnerOrder, RunnerReport, CallReport, RespondReport),
        *(Hello, Join, Memory),
    )
}
"""Made by the thread that imports this module: where several decode a type for the first time at once, msgspec 0.22
reads what is half made, and ends the process."""


# ---- sockets --------------------------------------------------------------------------------------------------------


class ChannelEnded(Exception):
    """The other side is gone."""


class BrokenMessage(ChannelEnded):
    """The other side sent bytes that are not a message: the channel cannot be used again."""


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Struct, descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises ChannelEnded."""
    send_bytes(channel, msgspec.msgpack.encode(message), descriptors)


def send_bytes(channel: socket.socket, data: bytes, descriptors: Sequence[int] = (), flags: int = 0) -> None:
    """Send the bytes of one message. Raises ChannelEnded."""
    try:
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            channel.sendmsg([data], rights, flags)
        else:
            channel.send(data, flags)
    except OSError as error:
        raise ChannelEnded(f"the other side is gone ({error.strerror})") from error


def receive(channel: socket.socket, kind: Any) -> Any:
    """Receive one message of a type. Raises ChannelEnded, BrokenMessage, TimeoutError."""
    return decode(receive_bytes(channel), kind)


def receive_bytes(channel: socket.socket, flags: int = 0) -> bytes:
    """Receive the bytes of one message.

    Raises ChannelEnded; TimeoutError, or BlockingIOError where the kernel keeps the time: nothing came.
    """
    try:
        data = channel.recv(MAX_MESSAGE_BYTES, flags)
    except (TimeoutError, BlockingIOError):
        raise
    except OSError as error:
        raise ChannelEnded(f"the other side is gone ({error.strerror})") from error
    if not data:
        raise ChannelEnded("the other side has ended")
    return data


def receive_with_descriptors(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive the bytes of one message and its descriptors, which the caller owns. Raises ChannelEnded."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    except OSError as error:
        raise ChannelEnded(f"the other side is gone ({error.strerror})") from error
    if not data:
        close_all(descriptors)
        raise ChannelEnded("the other side has ended")
    return data, list(descriptors)


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message. Raises BrokenMessage."""
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenMessage(f"a message is malformed: {error}") from error


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; an error of one keeps none of the others open."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
