"""What every client does without a socket: builds calls, decodes their replies, and remembers what models take.

Owns: the meaning of a call (defaults, waits, datatypes of lists, size checks before sending). Clients and links only
send, wait and receive. Thread: any; its dicts are only added to and cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from edge_runtime.client import frames
from edge_runtime.client.frames import Frame, Options, Shared
from edge_runtime.client.in_flight import Call
from edge_runtime.client.near_misses import checked_options
from edge_runtime.errors import TensorMismatch
from edge_runtime.messages import RegionPlace
from edge_runtime.tensors import Array
from edge_runtime.wire.operations import DEFAULT_WAIT_S, Operation, Scope, pack_operation

SLACK_S = 1.0
"""How much longer than the request's own timeout a client waits for the daemon's word on it."""

MAX_IN_FLIGHT = 256
"""Enough to fill the largest batches of tiny models; the daemon's own queues are bounded besides."""

READY_POLL_S = 0.05
"""How often `wait_ready` asks; a daemon with one tiny model is ready after about 250 ms."""

SIZE_CHECK_BYTES = 1 << 20
"""From here a tensor, or a message, is held against the daemon's limit; no daemon has a reason to set less."""

NO_LIMIT = 1 << 63
"""What a daemon that states no limit takes."""


NO_DESTINATIONS: Mapping[str, Array] = {}


class CallPlaces(NamedTuple):
    """Where arrays of one call lie in shared memory, by name, and the connection that may say so."""

    connection: int
    inputs: Mapping[str, RegionPlace]
    outputs: Mapping[str, RegionPlace]


class ClientCore:
    """Calls and replies of one client. timeout_ms: of requests that name none; None: the model's default.

    bounded_endpoint: where a whole message is bounded rather than each tensor (MQTT), the endpoint for its error.
    """

    def __init__(self, timeout_ms: float | None, bounded_endpoint: str = "") -> None:
        self.metadata: dict[str, Mapping[str, Any]] = {}
        """Of models that were asked for; a reload that changes datatypes is a new model in all but name."""
        self._timeout_ms = timeout_ms
        self._bounded_endpoint = bounded_endpoint
        self._encoder = frames.RequestEncoder()
        self._decoder = frames.ReplyDecoder()
        self._most_bytes: int | None = None

    def operation(self, operation: Operation, values: Mapping[str, Any], timeout_ms: float | None = None) -> Call:
        """Build the call of an operation. timeout_ms: of one with scope control; the others take the client's."""
        if operation.scope is Scope.INFER:
            timeout_ms = self._timeout_ms
        else:
            self.metadata.pop(values.get("model", ""), None)
        wait_s = _wait_s(timeout_ms, operation.wait_s)
        return Call(pack_operation(operation, values), (), wait_s, self._decoder.value)

    def options(
        self,
        version: int | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        timeout_ms: float | None,
        priority: int,
        timing: bool,
    ) -> Options:
        """The options of an inference call, with the client's timeout where it names none. Raises TypeError."""
        if timeout_ms is None:
            timeout_ms = self._timeout_ms
        return checked_options(version, outputs, timeout_ms, priority, timing=timing)

    def infer(  # noqa: PLR0917 (what a call is made of)
        self,
        model: str,
        tensors: Mapping[str, Array],
        options: Options,
        parameters: Mapping[str, Any] | None,
        destinations: Mapping[str, Array] = NO_DESTINATIONS,
        places: CallPlaces | None = None,
    ) -> Call:
        """Build an inference call. Raises Unsupported and TensorMismatch for what cannot be sent.

        destinations: arrays that outputs go into. places: which arrays lie in shared memory.
        """
        timeout_ms = options.timeout_ms
        if places is None:
            header, data = self._encoder.encode(model, tensors, options, parameters)
            decode = partial(self._decoder.result_into, destinations, ()) if destinations else self._decoder.result
            return Call(header, data, _wait_s(timeout_ms, DEFAULT_WAIT_S), decode, timeout_ms)
        in_place = options
        if places.outputs:
            in_place = options._replace(output_places=tuple(map(places.outputs.get, options.outputs or ())))
        header, data = self._encoder.encode(model, tensors, in_place, parameters, places.inputs)
        decode = partial(self._decoder.result_into, destinations, tuple(places.inputs))
        call = Call(header, data, _wait_s(timeout_ms, DEFAULT_WAIT_S), decode, timeout_ms)

        def in_frames() -> tuple[bytes, Sequence[Frame], Callable[[Sequence[Any]], Any]]:
            plain = self.infer(model, tensors, options, parameters, destinations)
            return plain.header, plain.tensors, plain.decode

        call.shared = Shared(places.connection, in_frames, (*tensors.values(), *destinations.values()))
        return call

    def is_large(self, call: Call) -> bool:
        """Whether a call needs `check_size`."""
        return self._bounded_bytes(call) >= SIZE_CHECK_BYTES

    @property
    def knows_limit(self) -> bool:
        """Whether `learn_limit` was called."""
        return self._most_bytes is not None

    def learn_limit(self, metadata: Mapping[str, Any]) -> None:
        """Remember the daemon's limit."""
        self._most_bytes = int(metadata.get("max_frame_bytes", NO_LIMIT))

    def check_size(self, model: str, tensors: Mapping[str, Array], call: Call) -> None:
        """Raise TensorMismatch for what the daemon would close the connection over, or the broker drop."""
        most = self._most_bytes
        if most is None or self._bounded_bytes(call) <= most:
            return
        if self._bounded_endpoint:
            raise TensorMismatch(
                f"the request to model {model!r} is {self._bounded_bytes(call)} bytes and "
                f"{self._bounded_endpoint} takes at most {most} in one message; send fewer rows at once, use ZeroMQ, "
                "or raise [mqtt] max_packet_bytes and the broker's limit"
            )
        sizes = zip(tensors, map(_nbytes, call.tensors), strict=True)
        name, nbytes = next((name, nbytes) for name, nbytes in sizes if nbytes > most)
        raise TensorMismatch(
            f"input {name!r} of model {model!r} is {nbytes} bytes and this daemon takes at most {most} in one "
            "tensor; send fewer rows at once, or raise [zmq] max_frame_bytes in its configuration"
        )

    def _bounded_bytes(self, call: Call) -> int:
        if self._bounded_endpoint:
            return len(call.header) + sum(map(_nbytes, call.tensors))
        return max(map(_nbytes, call.tensors), default=0)


def _wait_s(timeout_ms: float | None, default_s: float) -> float:
    """How long a client waits for a reply, in seconds: the timeout and some slack, else the operation's default."""
    return default_s if timeout_ms is None else timeout_ms / 1e3 + SLACK_S


def _nbytes(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
