"""Makes requests of what Frigate's ZeroMQ detectors send: handshakes, models, and pictures as tensors.

Owns: which connection may ask which model. The protocol is that of Frigate's plugin (`detectors/plugins/zmq_ipc.py`),
and these rules follow from how it behaves. It takes whatever answers for its model, so a connection is answered by the
model that it sent, or that the operator mapped its name to, and by no other. It shakes hands again after a timeout
only: a connection that is not known gets no answer, and everything else from a known one gets one, or its REQ socket
is stuck. A first handshake that fails is never tried again, so one is answered in time even while its model loads.
Thread: the loop of its socket, but for answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.doors.zmq.transport import Endpoint, Entry, Peer, Route, ZmqConnection
from edge_runtime.errors import (
    DecodeFailed,
    EdgeRuntimeError,
    Forbidden,
    LoadFailed,
    ModelNotFound,
    NotBuiltYet,
    NotReady,
    NotServed,
    QueueFull,
    TensorMismatch,
)
from edge_runtime.frigate.boxes import READERS, ROWS, detections
from edge_runtime.frigate.received_models import ReceivedModels
from edge_runtime.frigate.settings import FrigateSettings
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.loader import Loader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.overrides import Override
from edge_runtime.request.infer import Infer
from edge_runtime.request.plan import RequestPlan
from edge_runtime.request.request import DOOR, CallbackReply, Request
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.tensors import DATATYPES, Array, element_count
from edge_runtime.wire import json_codec

log = logging.getLogger(__name__)

PREFIX = "frigate-"
"""Begins the names of models that detectors sent."""

HANDSHAKE_S = 25.0
"""The plugin waits 30 s for an answer to a handshake, and never asks again where a first one brought none."""

MAX_HEADER_BYTES = 16 << 10
"""Headers are 100 bytes."""

MAX_WAITING = 64
"""Handshakes that wait for their models at once."""

KEPT_HEADERS = 256
"""Headers whose meaning is kept: one for each detector's kind of picture, in practice."""

MAX_AXES = 8

RECEIVED = Override({"isolation": "always", "on_demand": True})
"""Settings of every model that a detector sent, whatever the configuration says of others."""

DTYPES = {"uint8": "UINT8", "float32": "FP32"}
"""Datatypes of the pictures that the plugin sends, by NumPy's names."""

ANSWER = json_codec.dumps({"shape": [ROWS, 6], "dtype": "float32"})
NOTHING = bytes(ROWS * 6 * 4)


@dataclass(slots=True)
class Binding:
    """The model that a connection's pictures are for. model: "" until the one that it sent is known by name."""

    model: str


@dataclass(slots=True)
class Handshake:
    """A handshake whose answer waits for a model. name: as the detector calls it.

    data: the model that it sent, None for a mapped one; held_bytes: what was counted for it. is_answered: it took too
    long, and was answered before the end.
    """

    endpoint: Endpoint
    peer: Peer
    name: str
    due_s: float
    model: str = ""
    data: Any = None
    held_bytes: int = 0
    is_answered: bool = False

    @property
    def sender(self) -> ZmqConnection:
        """Its connection."""
        connection: ZmqConnection = self.peer.envelope[0]
        return connection


@dataclass(slots=True)
class HeaderPlan:
    """The meaning of one header for one model. cast: the datatype that the model takes, None: the picture has it.

    others: the model's other inputs. plan: None until it was asked once.
    """

    header: RequestHeader
    model_type: str
    nbytes: int
    datatype: np.dtype[Any]
    cast: np.dtype[Any] | None
    width: int
    height: int
    others: Sequence[Array]
    plan: RequestPlan | None = field(default=None)


class FrigateFrontend:
    """The receiver of Frigate's endpoint. `attach` first."""

    def __init__(
        self,
        settings: FrigateSettings,
        *,
        table: ModelTable,
        loader: Loader,
        infer: Infer,
        received: ReceivedModels,
        may_receive: bool,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """may_receive: whether models of others than signed releases are served at all."""
        self._settings = settings
        self._table = table
        self._loader = loader
        self._infer = infer
        self._received = received
        self._may_receive = may_receive and settings.accept_models
        self._refusal = _refusal(settings, may_receive=may_receive)
        self._clock = clock
        self._metrics = metrics
        self._call: Callable[[Callable[[], None]], None] = lambda function: function()
        self._known: dict[ZmqConnection, Binding] = {}
        self._handshakes: dict[ZmqConnection, Handshake] = {}
        self._to_load: deque[Handshake] = deque()
        self._loading: Handshake | None = None
        self._kept: dict[str, None] = {}
        self._announced: dict[ZmqConnection, float] = {}
        self._header_plans: dict[tuple[str, bytes], HeaderPlan] = {}
        self._generation = -1

    def attach(self, call: Callable[[Callable[[], None]], None]) -> None:
        """Take the call that runs a function on the thread of the socket; before `start`."""
        self._call = call

    def start(self) -> None:
        """Have the models served that were kept: each is loaded when the detector that sends it is there again."""
        if not self._may_receive:
            return
        for number, model in enumerate(self._received.names()):
            if number >= self._settings.keep_models:
                self._received.remove(model)
                continue
            self._kept = {model: None, **self._kept}  # the one that was used longest ago is first
            keep = partial(_as_kept, model, self._received.place_of(model))
            self._loader.take_in(keep, RECEIVED, partial(_log_unless_served, model), at_once=False)

    # ---- the transport's receiver ------------------------------------------------------------------------------------

    def routes(self) -> Mapping[bytes, Route]:
        """Return no headers: each message is looked at."""
        return {}

    def answer_burst(self, endpoint: Endpoint, route: Route, burst: list[Entry]) -> None:
        """Do nothing: there are no routes."""

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> None:
        """Answer a handshake, a model or a picture."""
        sender = peer.envelope[0]
        binding = self._known.get(sender)
        if binding is not None and binding.model and len(frames) == 2:
            header_plan = self._known_header(binding.model, frames[0])
            if header_plan is not None:
                self._detect(endpoint, peer, sender, header_plan, frames[1])
                return
        try:
            fields = _fields(frames)
            if fields.get("model_request") or fields.get("model_data"):
                self._shake(endpoint, peer, sender, fields, frames)
            elif binding is not None:
                self._detect(endpoint, peer, sender, self._ask(binding, fields, frames), frames[1])
        except EdgeRuntimeError as error:
            if binding is None:
                return  # it times out, and shakes hands
            if isinstance(error, ModelNotFound | NotServed):
                self._known.pop(sender, None)
                return
            self._metrics.refused(error.code)
            _send_nothing(endpoint, peer.envelope, error)

    def unheard(self, sender: Hashable) -> None:
        """Do nothing: a detector asks again after its timeout."""

    def gone(self, sender: Any) -> None:
        """Forget a connection, and drop what waits of it."""
        self._known.pop(sender, None)
        self._handshakes.pop(sender, None)
        if self._announced.pop(sender, None) is not None:
            log.warning(
                "a detector's connection ended before its model came; one larger than max_model_bytes is cut off",
                extra={"max_model_bytes": self._settings.max_model_bytes},
            )
        self._infer.drop(sender)

    def owes(self, sender: Any) -> bool:
        """Whether an answer is still to come for this connection."""
        return sender in self._handshakes or self._infer.unanswered.has(sender)

    def refuse(self, endpoint: Endpoint, peer: Peer, frames: list[Any], error: EdgeRuntimeError) -> None:
        """Answer a message that is too large, if its connection is known: `frames` are its first ones."""
        del frames
        if peer.envelope[0] in self._known:
            _send_nothing(endpoint, peer.envelope, error)

    def beat(self) -> None:
        """Answer the handshakes whose models are there by now, or that cannot wait longer."""
        now_s = self._clock.monotonic_s()
        for handshake in list(self._handshakes.values()):
            if handshake.data is None:
                self._look(handshake)
            if now_s >= handshake.due_s and not handshake.is_answered:
                log.warning(
                    "a detector's model is not loaded yet; until it is, nothing is found",
                    extra={"file": handshake.name, "after_s": HANDSHAKE_S},
                )
                self._tell(handshake, is_loaded=True)
        self._forget_announced(now_s)

    def _forget_announced(self, now_s: float) -> None:
        """Forget connections that said that they have a model, and ended or are late."""
        self._announced = {each: due_s for each, due_s in self._announced.items() if now_s < due_s and each.is_open}

    # ---- handshakes --------------------------------------------------------------------------------------------------

    def _shake(
        self, endpoint: Endpoint, peer: Peer, sender: ZmqConnection, fields: Mapping[str, Any], frames: Sequence[Any]
    ) -> None:
        """Take in which model a connection wants, and answer once that is loaded. Raises DecodeFailed: it says none."""
        name = fields.get("model_name")
        if not isinstance(name, str) or not name:
            got = "no name" if not name else type(name).__name__
            raise DecodeFailed(f"model_name: got {got}, wanted text")
        # Only now: what asks for no model keeps the one that it has.
        self._known.pop(sender, None)
        self._announced.pop(sender, None)
        handshake = Handshake(endpoint, peer, name, self._clock.monotonic_s() + HANDSHAKE_S)
        model = self._settings.models.get(name)
        if model is None and fields.get("model_request"):
            # Never true for a name alone: it says nothing of which model the detector means.
            endpoint.send(peer.envelope, (json_codec.dumps({"model_available": False, "model_loaded": False}),))
            if len(self._announced) >= MAX_WAITING:  # by a flood of others, which is over now
                self._forget_announced(self._clock.monotonic_s())
            if self._may_receive and len(self._announced) < MAX_WAITING:
                self._announced[sender] = handshake.due_s
            return
        try:
            self._expect(handshake, sender, model, frames)
        except EdgeRuntimeError as error:
            log.warning("a detector's model was not taken", extra={"file": name, "reason": error.message})
            self._tell(handshake, error=error)

    def _expect(self, handshake: Handshake, sender: ZmqConnection, model: str | None, frames: Sequence[Any]) -> None:
        """Let a handshake wait for its model. Raises EdgeRuntimeError: it is not taken."""
        if len(self._handshakes) >= MAX_WAITING or sender in self._handshakes:
            raise QueueFull(f"{len(self._handshakes)} detectors wait for their models; connect again later")
        if model is not None:
            handshake.model = model
            self._handshakes[sender] = handshake
            self._look(handshake)
            return
        if not self._may_receive:
            raise Forbidden(self._refusal)
        if len(frames) != 2 or not len(frames[1]):
            raise DecodeFailed(f"a model comes in 2 frames, a header and its bytes; got {len(frames)}")
        handshake.held_bytes = self._infer.unanswered.hold(sender, len(frames[1]))
        handshake.data = frames[1]
        self._handshakes[sender] = handshake
        self._to_load.append(handshake)
        self._load_next()

    def _look(self, handshake: Handshake) -> None:
        """Answer a handshake whose model is loaded, or will not be."""
        try:
            self._table.resolve(handshake.model, None)
        except (NotServed, ModelNotFound) as error:
            log.error("a detector's model is not served", extra={"file": handshake.name, "reason": error.message})
            self._tell(handshake, error=error)
        except NotReady:
            pass  # it loads, or its engine is being built
        else:
            self._tell(handshake, is_loaded=True)

    def _tell(self, handshake: Handshake, *, is_loaded: bool = False, error: EdgeRuntimeError | None = None) -> None:
        """Answer a handshake; with a model from now on its connection is known, without one it is not."""
        sender = handshake.sender
        if handshake.data is None and self._handshakes.get(sender) is handshake:
            del self._handshakes[sender]
        if is_loaded:
            self._known[sender] = Binding(handshake.model)
        elif handshake.is_answered:
            self._known.pop(sender, None)  # it gets no answer from now on, and shakes hands again
        if handshake.is_answered:
            return
        handshake.is_answered = True
        is_mapped = handshake.name in self._settings.models
        is_taken = is_loaded or isinstance(error, LoadFailed)
        fields: dict[str, Any] = {"model_available": is_loaded or is_mapped, "model_loaded": is_loaded}
        if not is_mapped:
            fields["model_saved"] = is_taken
        if error is not None:
            fields["error"] = error.message
        handshake.endpoint.send(handshake.peer.envelope, (json_codec.dumps(fields),))

    # ---- models that detectors send ----------------------------------------------------------------------------------

    def _load_next(self) -> None:
        """Hand the loader one model: what an operator asks it for comes between two of them."""
        while self._to_load and self._handshakes.get(self._to_load[0].sender) is not self._to_load[0]:
            gone = self._to_load.popleft()
            self._infer.unanswered.give_back(gone.sender, gone.held_bytes)
        if self._loading is not None or not self._to_load:
            return
        handshake = self._loading = self._to_load.popleft()
        self._loader.take_in(
            partial(self._keep, handshake),
            RECEIVED,
            lambda error: self._call(partial(self._loaded, handshake, error)),
            at_once=True,
        )

    def _keep(self, handshake: Handshake) -> tuple[str, Path]:
        """Write a model. Thread: the loader's. Raises LoadFailed, StorageFailed."""
        model = self._received.keep(memoryview(handshake.data))
        handshake.model = model
        return model, self._received.place_of(model)

    def _loaded(self, handshake: Handshake, error: EdgeRuntimeError | None) -> None:
        """The loader is done with what a detector sent. handshake: `data` is None from now on."""
        self._infer.unanswered.give_back(handshake.sender, handshake.held_bytes)
        handshake.data = self._loading = None
        model, failure = handshake.model, None if isinstance(error, NotBuiltYet) else error
        if failure is None:
            self._kept.pop(model, None)
            self._kept[model] = None
            failure = self._make_room(model)
        if self._handshakes.get(handshake.sender) is handshake:
            if failure is not None:
                log.error("a detector's model is not served", extra={"file": handshake.name, "reason": failure.message})
                self._tell(handshake, error=failure)
            elif handshake.is_answered:
                self._tell(handshake, is_loaded=True)  # what it is bound to has a name now
            else:
                self._look(handshake)
        if failure is not None and model and not self._is_used(model):
            self._give_up(model)
        self._load_next()

    def _make_room(self, newest: str) -> LoadFailed | None:
        """Give up models beyond `keep_models`; the newest where detectors use all others, and then say so."""
        while len(self._kept) > self._settings.keep_models:
            idle = next((model for model in self._kept if model != newest and not self._is_used(model)), None)
            if idle is None:
                return LoadFailed(
                    f"detectors use all {self._settings.keep_models} models that are kept (frigate.keep_models)"
                )
            self._give_up(idle)
        return None

    def _is_used(self, model: str) -> bool:
        """Whether a detector is connected that uses a model, or waits for it."""
        self._forget_gone()
        users: list[Binding | Handshake] = [*self._known.values(), *self._handshakes.values()]
        return any(each.model == model for each in users)

    def _forget_gone(self) -> None:
        """Forget connections whose clients chose their identities, of whose end nothing is heard."""
        self._known = {sender: binding for sender, binding in self._known.items() if sender.is_open}

    def _give_up(self, model: str) -> None:
        self._kept.pop(model, None)
        # On the loader's thread, as `keep` is: it finds a model whole or not at all.
        self._loader.give_up(model, lambda _: self._received.remove(model))

    # ---- pictures ----------------------------------------------------------------------------------------------------

    def _known_header(self, model: str, frame: Any) -> HeaderPlan | None:
        """The meaning of a header that came before; None for a new one."""
        if self._generation != self._table.generation:
            self._generation, self._header_plans = self._table.generation, {}
        return self._header_plans.get((model, bytes(frame))) if len(frame) <= MAX_HEADER_BYTES else None

    def _ask(self, binding: Binding, fields: Mapping[str, Any], frames: Sequence[Any]) -> HeaderPlan:
        """Read a new header, and keep its meaning. Raises EdgeRuntimeError."""
        if len(frames) != 2:
            raise DecodeFailed(f"a picture comes in 2 frames, a header and its bytes; got {len(frames)}")
        if not binding.model:
            raise NotReady("the model that this detector sent is not loaded yet")
        header_plan = _read_header(self._table.resolve(binding.model, None).spec, binding.model, fields, self._settings)
        if len(self._header_plans) >= KEPT_HEADERS:
            self._header_plans.clear()
        self._header_plans[binding.model, bytes(frames[0])] = header_plan
        return header_plan

    def _detect(self, endpoint: Endpoint, peer: Peer, sender: Hashable, header_plan: HeaderPlan, frame: Any) -> None:
        """Ask the model."""
        reply = CallbackReply(partial(_answer, endpoint, peer.envelope, header_plan))
        nbytes = len(frame)
        request = Request(header_plan.header, (), nbytes, reply, sender, self._clock.monotonic_s(), self._metrics, DOOR)
        try:
            if nbytes != header_plan.nbytes:
                raise TensorMismatch(f"the header's shape and dtype are {header_plan.nbytes} bytes, got {nbytes}")
            request.hold(self._infer.unanswered, nbytes)
        except EdgeRuntimeError as error:
            request.refuse(error)
            return
        picture: Any = frame
        if header_plan.cast is not None:
            shape = header_plan.header.inputs[0].shape
            picture = np.frombuffer(frame, header_plan.datatype).reshape(shape).astype(header_plan.cast)
        request.tensors = (picture, *header_plan.others)
        header_plan.plan = self._infer.submit(request, header_plan.plan)


def _answer(
    endpoint: Endpoint, envelope: tuple[Any, ...], header_plan: HeaderPlan, ended: Request | EdgeRuntimeError
) -> None:
    """Send the detections of a picture. Raises RunFailed: the outputs are not those of its type. Thread: any."""
    if isinstance(ended, EdgeRuntimeError):
        _send_nothing(endpoint, envelope, ended)
        return
    plan = ended.plan
    specs = plan.servable.spec.outputs
    outputs = [(specs[index].name, ended.outputs[index]) for index in plan.outputs]
    table = detections(header_plan.model_type, outputs, header_plan.width, header_plan.height)
    endpoint.post(envelope, (ANSWER, table.tobytes()))


def _send_nothing(endpoint: Endpoint, envelope: tuple[Any, ...], error: EdgeRuntimeError) -> None:
    """Send that nothing was found, and why. Thread: any."""
    header = {"shape": [ROWS, 6], "dtype": "float32", "error": error.message, "code": error.code}
    endpoint.post(envelope, (json_codec.dumps(header), NOTHING))


def _fields(frames: Sequence[Any]) -> dict[str, Any]:
    """The header of a message. Raises DecodeFailed."""
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise DecodeFailed(f"the header is {len(frames[0])} bytes; at most {MAX_HEADER_BYTES} are read")
    return json_codec.loads(bytes(frames[0]))


def _read_header(spec: ModelSpec, model: str, fields: Mapping[str, Any], settings: FrigateSettings) -> HeaderPlan:
    """Read a picture's header for a model. Raises DecodeFailed, TensorMismatch."""
    shape: Any = fields.get("shape")
    dtype, model_type = fields.get("dtype"), fields.get("model_type", "yologeneric")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_AXES and all(type(each) is int for each in shape)
    if not is_shape or not all(0 < each < 1 << 31 for each in shape):
        raise DecodeFailed(f"shape: got {str(shape)[:80]}, wanted a list of lengths")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DecodeFailed(f"dtype: got {str(dtype)[:40]!r}, wanted {' or '.join(DTYPES)}")
    if not isinstance(model_type, str) or model_type not in READERS:
        raise DecodeFailed(f"model_type: got {str(model_type)[:40]!r}, wanted one of {', '.join(READERS)}")
    if len(shape) != 4 or shape[0] != 1 or 3 not in (shape[1], shape[3]):
        raise TensorMismatch(f"shape: got {shape}, wanted one picture, [1, 3, height, width] or [1, height, width, 3]")
    height, width = shape[2:] if shape[1] == 3 else shape[1:3]
    picture, others = _inputs(spec, model, (height, width))
    given, wanted = DTYPES[dtype], picture.datatype
    if given != wanted and wanted not in ("FP32", "FP16"):
        raise TensorMismatch(f"model {model} takes {wanted}, got {dtype}: set input_dtype in Frigate's model settings")
    header = RequestHeader(
        model=model,
        inputs=(
            TensorHeader(picture.name, wanted, tuple(shape)),
            *(TensorHeader(each.name, each.datatype, (1, 2)) for each, _ in others),
        ),
        timeout_ms=settings.timeout_ms,
        parameters={"raw": True},
    )
    dtype_sent = DATATYPES[given].dtype
    return HeaderPlan(
        header,
        model_type,
        element_count(shape) * dtype_sent.itemsize,
        dtype_sent,
        None if given == wanted else DATATYPES[wanted].dtype,
        width,
        height,
        [array for _, array in others],
    )


def _inputs(spec: ModelSpec, model: str, size: tuple[int, int]) -> tuple[TensorSpec, list[tuple[TensorSpec, Array]]]:
    """The input that takes the picture, and what the others take: D-FINE wants its height and width beside it."""
    pictures = [each for each in spec.inputs if len(each.shape) == 4]
    others = [each for each in spec.inputs if len(each.shape) != 4]
    sizes = [each for each in others if each.datatype in ("INT64", "INT32") and each.fits((1, 2))]
    if len(pictures) != 1 or sizes != others:
        there = ", ".join(f"{each.name} {list(each.shape)}" for each in spec.inputs)
        raise TensorMismatch(f"model {model} takes {there}; wanted one picture, and at most its height and width")
    return pictures[0], [(each, np.array([size], DATATYPES[each.datatype].dtype)) for each in others]


def _refusal(settings: FrigateSettings, *, may_receive: bool) -> str:
    """Why no model is taken."""
    mapped = ", ".join(settings.models) or "none"
    if not may_receive:
        return f"only signed releases are served here (update.require_signed); frigate.models maps {mapped}"
    return f"no models are taken here (frigate.accept_models); frigate.models maps {mapped}"


def _as_kept(model: str, place: Path) -> tuple[str, Path]:
    return model, place


def _log_unless_served(model: str, error: EdgeRuntimeError | None) -> None:
    if error is not None:
        log.warning("a detector's model that was kept is not served", extra={"model": model, "reason": error.message})
