"""Protocols on the HTTP door beside the Open Inference Protocol: how one is declared, and how its paths are answered.

A capability declares a `ProtocolDeclaration`; the table of what is shipped finds it, and the door opens those whose
setting is true, in the order of that table, and imports no other. The table of operations and one `Request` path stay:
a protocol says what its bodies mean and how answers are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    from edge_runtime.doors.http.call import HttpCall
    from edge_runtime.doors.http.connection import Frames
    from edge_runtime.doors.http.head import HttpHead
    from edge_runtime.doors.open_inference.operations import Caller
    from edge_runtime.messages import RequestHeader
    from edge_runtime.models.servable import Servable
    from edge_runtime.request.operation_handlers import Done
    from edge_runtime.request.replies import Encoding
    from edge_runtime.request.request import Request


class ProtocolDeclaration(Struct, frozen=True):
    """A protocol on the HTTP door. Where its setting is None it is on if only this machine reaches the door.

    name: of the setting in `[http]` that switches it on; that of a plug-in is on where the plug-in is in use. opens:
    "module:function" of a function that takes the daemon's `DoorContext` and the door's `OpenInference`, which has the
    table of operations, and returns the HttpProtocol; its ConfigError says what cannot be.
    """

    name: str
    opens: str

    @property
    def callables(self) -> tuple[str, ...]:
        """The function that it names."""
        return (self.opens,)


Paths = Sequence[tuple[re.Pattern[str], Mapping[str, str]]]
"""Patterns of whole paths, whose groups become a call's values, each with the name of the call by method."""


def paths(*rows: tuple[str, Mapping[str, str]]) -> Paths:
    """Compile the paths of a protocol."""
    return [(re.compile(path), calls) for path, calls in rows]


class CallRequests(NamedTuple):
    """The meaning of one request for inference: the requests that it becomes, each with its tensors.

    encoding: writes the answer; a `JoinedEncoding` where there are several, which are answered as one, or none: then
    nothing was asked but that the model is loaded, which it is.
    """

    encoding: Encoding
    requests: Sequence[tuple[RequestHeader, Sequence[Any]]]


class JoinedEncoding(Protocol):
    """An encoding of the answer to a call that became several requests."""

    def join(self, requests: Sequence[Request]) -> Frames:
        """Write one response of all, which are answered, in their order. Thread: any."""
        ...


@runtime_checkable
class HasPage(Protocol):
    """A protocol with a page for people. page_path: where it is."""

    page_path: str


class HttpProtocol(Protocol):
    """One protocol. Thread: the door's; any for `read`, `model_of`, `requests_of` and the work of encodings.

    paths: that it answers; where a path is another protocol's too, see `claims`. A GET that several answer has the
    fields of each. open_calls: those that want no token.
    """

    paths: Paths
    open_calls: frozenset[str]

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding of the errors of a call, and of its results. call: not read further than its path."""
        ...

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Read the protocol's own parts of a head: `call.values`, `call.ignores_body`, `call.check`.

        Raises EdgeRuntimeError.
        """
        ...

    def claims(self, call: HttpCall) -> bool:
        """Whether a request for inference is its own, though a protocol before it has the same path."""
        ...

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """Whether a large body takes long to read, as text does, and is read beside the door's thread."""
        ...

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> Any:
        """Read the body of a request for inference as a message of its own. Thread: any. Raises DecodeFailed."""
        ...

    def model_of(self, message: Any, call: HttpCall) -> tuple[str, int | None]:
        """Return the model that a message asks, and the version that it names. Raises EdgeRuntimeError."""
        ...

    def requests_of(self, servable: Servable, message: Any, head: HttpHead, call: HttpCall) -> CallRequests:
        """Return the requests that a message means for its model. Raises EdgeRuntimeError."""
        ...

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Answer any other call. fields: of its body.

        reply: gets what the protocol's encoding writes, such as the JSON of the answer and its status, an EventStream,
        or an EdgeRuntimeError, once, from any thread. May raise it, too.
        """
        ...

    def close(self) -> None:
        """End the requests under way. Idempotent. Thread: main."""
        ...
