"""The client over MQTT: arrays in, arrays out, through a broker to one device; and who is there.

Owns: what a call means (topics, defaults, checks before sending); mqtt_link.py carries requests, frames.py packs them.
The public names are `MqttClient` and `Device`. Needs the `mqtt` extra.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from edge_runtime.client import frames
from edge_runtime.client.device_listing import DeviceListing
from edge_runtime.client.devices import AWAY, Device
from edge_runtime.client.frames import Frame, Options
from edge_runtime.client.mqtt_in_flight import InFlight
from edge_runtime.client.mqtt_link import MqttLink
from edge_runtime.client.mqtt_requests import MAX_EXPIRY_S, Request
from edge_runtime.config.broker import BrokerAccess, broker_access
from edge_runtime.config.settings import MqttSettings
from edge_runtime.errors import ConfigError, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import InferResult
from edge_runtime.repository.names import check_model_name
from edge_runtime.wire.topics import DEFAULT_PREFIX, ID_RULE, DeviceTopics, check_prefix, check_reply_topic, is_id

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Device", "MqttClient"]

DEFAULT_WAIT_S = 30.0
"""How long a call without a timeout waits for its reply, as over ZeroMQ."""

SLACK_S = 1.0
"""How much longer than the request's own timeout a client waits for the daemon's word on it (DESIGN 3)."""

MAX_IN_FLIGHT = 256
"""As over ZeroMQ."""

READY_POLL_S = 0.05
"""How often `wait_ready` asks, as over ZeroMQ."""

READY_ASK_S = 0.25
"""How long its first question waits, each further one twice as long: a broker drops what nobody listens to yet."""

RETAINED_LIMIT_S = 10.0
"""How long `devices` waits for each answer of the broker; those of a thousand devices take milliseconds."""


class MqttClient:
    """A connection to a broker and a device behind it; thread-safe, one for all threads. Not to be used after a fork.

    url: `mqtt[s]://[user@]host[:port][/device]`. device: its id, where the URL names none; only `devices` does without.
    prefix: what the site's topics begin with. username, password_file, ca_file, cert_file, key_file: as in `[mqtt]`;
    where the broker takes the user from the certificate, username is the certificate's CN. timeout_ms: for requests
    that name none; None: the model's default. max_in_flight: requests on their way at once. qos: 0, or 1 to have the
    broker and the device acknowledge each message. reply_topic: None for `reply/<username or client id>/<random>`.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError when
    nothing came within timeout_ms + 1 s (30 s when there is no timeout at all); ConnectionError when there is no
    broker, or the connection to it is lost before the answer. What a device did not answer before it went is sent again
    when it comes back within that time. There is no load or unload: that is the device's own.

        with MqttClient("mqtt://broker.site/dev1") as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=200)["scores"]
    """

    def __init__(
        self,
        url: str,
        device: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        username: str | None = None,
        password_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        qos: int = 0,
        reply_topic: str | None = None,
    ) -> None:
        access = _access(
            url,
            username=username,
            password_file=password_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        self._prefix = check_prefix("prefix", prefix)
        self._topics = _device_topics(access.address.device_id, device, self._prefix)
        self.endpoint = f"{access.address.url}/{self._topics.device_id}" if self._topics else access.address.url
        self.device_id = self._topics.device_id if self._topics else None
        self._timeout_ms = timeout_ms
        if qos not in (0, 1):
            raise ConfigError(f"qos: got {qos}, wanted 0 or 1")
        client_id = f"edge-client-{secrets.token_hex(8)}"
        self._link = MqttLink(
            access,
            client_id,
            _reply_topic(reply_topic, access.address.username or access.username or client_id, self._prefix),
            self._topics,
            qos=qos,
            in_flight=InFlight(max_in_flight),
        )
        self._listing = DeviceListing(lambda filters: self._link.retained(filters, RETAINED_LIMIT_S), self._prefix)
        self._encoder = frames.RequestEncoder()
        self._decoder = frames.ReplyDecoder()
        self._metadata: dict[str, Mapping[str, Any]] = {}
        self._max_message_bytes: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is pending with ConnectionError, say goodbye to the broker, end the thread. Idempotent, any thread.

        Waits for an attempt to connect that is under way, at most seconds.
        """
        self._link.close()

    # ---- inference --------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> InferResult:
        """Run a model once and wait for the answer, as `Client.infer`. Thread: any but a future's callback.

        Raises as the class says; TensorMismatch already before sending when the broker or the device takes no such
        size; RuntimeError inside a future's callback, which cannot wait.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        request = self._encode(model, inputs, options, parameters)
        return self._decoder.result(self._link.ask(request, _wait_s(options)))

    def submit(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> Future[InferResult]:
        """Send a request and return at once; the future gets what `infer` would return or raise. Thread: any.

        Blocks while `max_in_flight` requests are pending (TimeoutError after this one's own wait), and for the first
        connection. Callbacks run on the client's thread and should be short; there a full client raises QueueFull
        instead of blocking. Cancelling a future discards its answer; the daemon still runs it.
        """
        options = self._options(version, outputs, timeout_ms, priority, timing)
        request = self._encode(model, inputs, options, parameters)
        return self._link.submit(request, _wait_s(options), self._decoder.result)

    # ---- the device and its models ----------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Whether the device answers; False when it, or the broker, does not: at once where its status says so."""
        return self._says("live")

    def is_ready(self, model: str = "") -> bool:
        """Whether the device can answer inference, or one model can; False when nobody answers."""
        return self._says("ready", model)

    def wait_ready(self, limit_s: float = DEFAULT_WAIT_S, model: str = "") -> None:
        """Return when the device, or one model, is ready. Raises TimeoutError after `limit_s` seconds."""
        end_s = time.monotonic() + limit_s
        ask_s = READY_ASK_S
        while not self._says("ready", model, min(ask_s, max(end_s - time.monotonic(), READY_POLL_S))):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{model or 'the device'} at {self.endpoint} was not ready within {limit_s:.1f} s")
            ask_s *= 2
            time.sleep(READY_POLL_S)

    def models(self) -> list[dict[str, Any]]:
        """Every version known: name, version, state, reason, backend, device, precision, mode, memory_bytes."""
        return cast("list[dict[str, Any]]", self._ask("models"))

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """What a model takes and gives (Open Inference Protocol), with `max_batch_rows` and `max_frame_bytes`.

        Over MQTT the latter is the bound of a whole message.
        """
        return cast("dict[str, Any]", self._ask("metadata", model, version))

    def stats(self) -> dict[str, Any]:
        """Counters, latencies by model, memory and uptime, as the daemon tells them."""
        return cast("dict[str, Any]", self._ask("stats"))

    def update_status(self) -> dict[str, Any]:
        """What runs by updates, what is under way, what was refused and why; Unsupported where none are configured."""
        return cast("dict[str, Any]", self._ask("update_status"))

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last things that happened, newest first: at_utc, model, counter, what, reason. count: 50 when None."""
        return cast("list[dict[str, Any]]", self._ask("update_history", parameters={"count": count}))

    def device_status(self) -> str:
        """What the broker keeps as the device's status: "online", "stopped", "offline"; "" when it has or shows none.

        Asks the device nothing. Raises as `devices`.
        """
        status_topic = self._device_topics().status
        if not self._link.device_status:
            # The same topic under another filter: the end of this one must not be the end of the link's own.
            self._link.retained((f"{status_topic}/#",), RETAINED_LIMIT_S)
        return self._link.device_status

    def devices(self) -> list[Device]:
        """Every device that the broker has a status of, by id. Needs no device to be named.

        One listing runs at a time, and threads that ask meanwhile share the next. The broker sends all statuses at
        once; what neither the connection's buffers (on one machine some 4 MB) nor its queue (mosquitto's
        `max_queued_messages`) has room for it drops without a word. 60 000 devices of a mosquitto on the same machine,
        with 200 of these, were listed whole. States are asked for a hundred at a time: two round trips each.

        Raises ConnectionError, also when the broker forbids looking, and when each look shows other devices, as they do
        where it drops some; TimeoutError after 10 s of silence.
        """
        return self._listing.devices()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _options(
        self, version: int | None, outputs: Sequence[str] | None, timeout_ms: float | None, priority: int, timing: bool
    ) -> Options:
        if timeout_ms is None:
            timeout_ms = self._timeout_ms
        return Options(version, None if outputs is None else tuple(outputs), timeout_ms, priority, timing)

    def _encode(
        self, model: str, inputs: Mapping[str, npt.ArrayLike], options: Options, parameters: Mapping[str, Any] | None
    ) -> Request:
        topic = self._device_topics().infer(check_model_name(model), options.version)
        tensors, guessed = frames.arrays(inputs)
        if guessed:
            frames.fit_datatypes(tensors, guessed, self._known_metadata(model))
        header, data = self._encoder.encode(model, tensors, options, parameters)
        self._check_size(model, header, data)
        return Request(topic, header, data, _expiry_s(options.timeout_ms))

    def _device_topics(self) -> DeviceTopics:
        if self._topics is None:
            raise ConfigError(
                f"{self.endpoint} names no device; wanted {self.endpoint}/DEVICE, or device=; devices() lists them"
            )
        return self._topics

    def _check_size(self, model: str, header: bytes, data: Sequence[Frame]) -> None:
        """Raise TensorMismatch for what the broker would not hand to the device; it would do so without a word."""
        nbytes = len(header) + sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in data)
        if nbytes < frames.SIZE_CHECK_BYTES:
            return
        limit = self._message_limit(model)
        if nbytes > limit:
            raise TensorMismatch(
                f"the request to model {model!r} is {nbytes} bytes and {self.endpoint} takes at most {limit} in one "
                "message; send fewer rows at once, use ZeroMQ, or raise [mqtt] max_packet_bytes and the broker's limit"
            )

    def _known_metadata(self, model: str) -> Mapping[str, Any]:
        """A model's metadata, asked for once; a reload that changes datatypes is a new model in all but name."""
        found = self._metadata.get(model)
        if found is None:
            found = self._metadata[model] = self.metadata(model)
        return found

    def _message_limit(self, model: str) -> int:
        if self._max_message_bytes is None:
            try:
                found = self._known_metadata(model)
            except EdgeRuntimeError:
                return frames.NO_LIMIT  # the model is not there or not ready: its own refusal says so better
            self._max_message_bytes = int(found.get("max_frame_bytes", frames.NO_LIMIT))
        return self._max_message_bytes

    def _says(self, op: str, model: str = "", limit_s: float = math.inf) -> bool:
        self._device_topics()  # to ask nobody is an error, not an answer
        try:
            return self.device_status() not in AWAY and bool(self._ask(op, model, limit_s=limit_s))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _ask(
        self,
        op: str,
        model: str = "",
        version: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        limit_s: float = math.inf,
    ) -> Any:
        # The model stands in the header alone: what is no model name may not be a topic either.
        request = Request(self._device_topics().infer(), frames.pack_op(op, model, version, parameters))
        wait_s = min(frames.wait_s(self._timeout_ms, DEFAULT_WAIT_S, SLACK_S), limit_s)
        return self._decoder.value(self._link.ask(request, wait_s))


def _access(url: str, **shown: str | None) -> BrokerAccess:
    """The broker and what is shown to it, by the rules of `[mqtt]`. Raises ConfigError."""
    try:
        settings = MqttSettings(url=url, **shown)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"mqtt: {error}") from None
    return broker_access(settings)


def _device_topics(in_url: str | None, given: str | None, prefix: str) -> DeviceTopics | None:
    if in_url is not None and given is not None and in_url != given:
        raise ConfigError(f"device: got {given!r}, and the URL says {in_url!r}; name one device")
    device = given if given is not None else in_url
    if device is None:
        return None
    if not is_id(device):
        raise ConfigError(f"device: got {device!r}, wanted {ID_RULE}")
    return DeviceTopics(device, prefix)


def _reply_topic(given: str | None, owner: str, prefix: str) -> str:
    """Where replies go. Raises Forbidden for what no device would reply to, ConfigError where no topic can be made."""
    if given is not None:
        check_reply_topic(given, ("",), prefix)
        return given
    topic = f"reply/{owner}/{secrets.token_hex(8)}"
    try:
        check_reply_topic(topic, ("reply/",), prefix)
    except EdgeRuntimeError as error:
        raise ConfigError(f"username: got {owner!r}, which cannot be part of a topic; give reply_topic=") from error
    return topic


def _wait_s(options: Options) -> float:
    return frames.wait_s(options.timeout_ms, DEFAULT_WAIT_S, SLACK_S)


def _expiry_s(timeout_ms: float | None) -> int | None:
    """Whole seconds that hold a timeout; None where there is none, or none that the daemon will take."""
    if timeout_ms is None or not 0 < timeout_ms <= MAX_EXPIRY_S * 1e3:
        return None
    return math.ceil(timeout_ms / 1e3)
