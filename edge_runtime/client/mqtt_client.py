"""The client over MQTT: arrays in, arrays out, through a broker to one device; and a listing of the devices.

Owns: the topics. core.py builds the calls and decodes the replies, mqtt_link.py carries them.
The public names are `MqttClient` and `Device`. Needs the `mqtt` extra.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from edge_runtime.client.core import MAX_IN_FLIGHT, READY_POLL_S, ClientCore
from edge_runtime.client.devices import AWAY, Device, DeviceListing
from edge_runtime.client.frames import Options, arrays, check_destinations, fit_datatypes
from edge_runtime.client.in_flight import Call
from edge_runtime.client.mqtt_link import MqttLink, new_in_flight
from edge_runtime.client.near_misses import advised
from edge_runtime.client.pictures import with_pictures, with_raw
from edge_runtime.client.retries import ask_until_due
from edge_runtime.config.broker import BrokerAccess, broker_access
from edge_runtime.config.settings import MqttProtocol, MqttSettings
from edge_runtime.errors import ConfigError, EdgeRuntimeError, TensorMismatch
from edge_runtime.messages import InferResult
from edge_runtime.repository.names import check_model_name
from edge_runtime.tensors import Array
from edge_runtime.wire.operations import DEFAULT_WAIT_S, OPERATIONS
from edge_runtime.wire.topics import DEFAULT_PREFIX, ID_RULE, DeviceTopics, check_prefix, check_reply_topic, is_id

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_runtime.client.pictures import Picture

__all__ = ["Device", "MqttClient"]

READY_ASK_S = 0.25
"""How long its first question waits, each further one twice as long: a broker drops requests without a subscriber."""

RETAINED_LIMIT_S = 10.0
"""How long `devices` waits for each answer of the broker; a thousand devices take milliseconds."""


class MqttClient:
    """A connection to a broker and a device behind it; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    url: `mqtt[s]://[user@]host[:port][/device]`. device: its id, where the URL names none; only `devices` does without.
    prefix: what the site's topics begin with. username, password_file, ca_file, cert_file, key_file: as in `[mqtt]`;
    where the broker takes the user from the certificate, username is the certificate's CN. timeout_ms: for requests
    that name none; None: the model's default. max_in_flight: requests on their way at once. qos: 0, or 1 to have the
    broker and the device acknowledge each message. reply_topic: None for `reply/<username or client id>/<random>`.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError when
    nothing came within timeout_ms + 1 s (30 s when there is no timeout at all); ConnectionError when there is no
    broker, or the connection to it is lost before the answer. Requests that a device left unanswered are sent again
    when it comes back within that time. Operations with scope control are not offered over MQTT.

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
        protocol: MqttProtocol = "auto",
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
            protocol=protocol,
        )
        self._prefix = check_prefix("prefix", prefix)
        self._topics = _device_topics(access.address.device_id, device, self._prefix)
        self.endpoint = f"{access.address.url}/{self._topics.device_id}" if self._topics else access.address.url
        self.device_id = self._topics.device_id if self._topics else None
        if qos not in (0, 1):
            raise ConfigError(f"qos: got {qos}, wanted 0 or 1")
        client_id = f"edge-client-{secrets.token_hex(8)}"
        self._link = MqttLink(
            access,
            client_id,
            _reply_topic(reply_topic, access.address.username or access.username or client_id, self._prefix),
            self._topics,
            qos=qos,
            in_flight=new_in_flight(max_in_flight),
        )
        weakref.finalize(self, self._link.abandon).atexit = False
        self._listing = DeviceListing(lambda filters: self._link.retained(filters, RETAINED_LIMIT_S), self._prefix)
        self._core = ClientCore(timeout_ms, bounded_endpoint=self.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fail pending calls with ConnectionError, disconnect, end the thread. Idempotent. Thread: any.

        Waits for a running attempt to connect, at most seconds.
        """
        self._link.close()

    # ---- inference --------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
        cast: bool = False,
        retry: bool = False,
    ) -> InferResult:
        """Run a model once and wait for the answer, as `Client.infer`. Thread: any but a future's callback.

        Raises as the class says; TensorMismatch already before sending when the broker or the device takes no such
        size; RuntimeError inside a future's callback, which cannot wait.
        """
        options = self._core.options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = with_pictures(inputs, picture, pictures), with_raw(parameters, raw)

        def ask(options: Options) -> InferResult:
            call = self._packed(model, inputs, options, parameters, outputs, cast=cast)
            try:
                result: InferResult = self._link.ask(call)
            except TensorMismatch as error:
                raise self._advised(error, model, inputs) from None
            return result

        return ask_until_due(options, ask) if retry else ask(options)

    def submit(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike] | None = None,
        *,
        picture: Picture | None = None,
        pictures: Sequence[Picture] | Array | None = None,
        raw: bool | None = None,
        version: int | None = None,
        outputs: Sequence[str] | Mapping[str, Array] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
        parameters: Mapping[str, Any] | None = None,
        cast: bool = False,
    ) -> Future[InferResult]:
        """Send a request and return at once; the future gets what `infer` would return or raise. Thread: any.

        Blocks while `max_in_flight` requests are pending (TimeoutError after this one's own wait), and for the first
        connection. Callbacks run on the client's thread and should be short; there a full client raises QueueFull
        instead of blocking. Cancelling a future discards its answer; the daemon still runs it.
        """
        options = self._core.options(version, outputs, timeout_ms, priority, timing)
        inputs, parameters = with_pictures(inputs, picture, pictures), with_raw(parameters, raw)
        return self._link.submit(self._packed(model, inputs, options, parameters, outputs, cast=cast))

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make a zeroed array, as `Client.allocate`, but an ordinary one: a broker shares no memory."""
        return np.zeros(shape, dtype)

    # ---- the device and its models ----------------------------------------------------------------------------------

    def is_live(self) -> bool:
        """Return whether the device answers; False at once where its status says that it is away."""
        return self._says("live")

    def is_ready(self, model: str = "") -> bool:
        """Return whether the device, or one model, can answer inference; False when the device does not answer."""
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

    # ---- operations: begin (made by tests/architecture/operation_texts.py from wire/operations.py) -------------------

    def models(self) -> list[dict[str, Any]]:
        """List every version that the daemon knows, and each file of its models folder that it does not serve."""
        return cast("list[dict[str, Any]]", self._call("models"))

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe what a model takes and gives."""
        return cast("dict[str, Any]", self._call("metadata", model=model, version=version))

    def model_config(self, model: str, version: int | None = None) -> dict[str, Any]:
        """Describe a loaded model as Triton's ModelConfig."""
        return cast("dict[str, Any]", self._call("model_config", model=model, version=version))

    def model_statistics(self, model: str | None = None, version: int | None = None) -> list[dict[str, Any]]:
        """Tell what loaded models have done, in Triton's words."""
        return cast("list[dict[str, Any]]", self._call("model_statistics", model=model, version=version))

    def stats(self) -> dict[str, Any]:
        """Tell counters, latencies by model, memory and uptime."""
        return cast("dict[str, Any]", self._call("stats"))

    def update_status(self) -> dict[str, Any]:
        """Tell what runs by updates, what is under way, what was refused and why, and how the last check ended."""
        return cast("dict[str, Any]", self._call("update_status"))

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """List the last events of updates, newest first."""
        return cast("list[dict[str, Any]]", self._call("update_history", count=count))

    # ---- operations: end ---------------------------------------------------------------------------------------------

    def device_status(self) -> str:
        """Return the retained status of the device: "online", "stopped", "offline"; "" without one.

        Sends the device no request. Raises as `devices`.
        """
        status_topic = self._device_topics().status
        if not self._link.device_status:
            # The same topic under another filter, so that its unsubscription does not end the link's own.
            self._link.retained((f"{status_topic}/#",), RETAINED_LIMIT_S)
        return self._link.device_status

    def devices(self) -> list[Device]:
        """List every device of which the broker retains a status, by id. Works without a named device.

        One listing runs at a time, and threads that ask meanwhile share the next. The broker sends all statuses at
        once, and drops silently what fits neither the connection's buffers (on one machine some 4 MB) nor its queue
        (mosquitto's `max_queued_messages`). 60 000 devices of a mosquitto on the same machine, with a queue of 200,
        were listed completely. States are fetched a hundred at a time, in two round trips each.

        Raises ConnectionError, also when the broker forbids it or when listings differ because the broker drops
        messages; TimeoutError after 10 s of silence.
        """
        return self._listing.devices()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _packed(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        options: Options,
        parameters: Mapping[str, Any] | None,
        outputs: Sequence[str] | Mapping[str, Array] | None,
        *,
        cast: bool,
    ) -> Call:
        topic = self._device_topics().infer(check_model_name(model), options.version)
        core = self._core
        tensors, guessed = arrays(inputs)
        if guessed or cast:
            fit_datatypes(tensors, list(tensors) if cast else guessed, self._metadata(model))
        destinations = check_destinations(outputs)
        call = core.infer(model, tensors, options, parameters, destinations)
        call.topic = topic
        if core.is_large(call):
            if not core.knows_limit:
                # A model that is missing or not ready refuses the call itself, with a better message.
                with contextlib.suppress(EdgeRuntimeError):
                    core.learn_limit(self._metadata(model))
            core.check_size(model, tensors, call)
        return call

    def _device_topics(self) -> DeviceTopics:
        if self._topics is None:
            raise ConfigError(
                f"{self.endpoint} names no device; wanted {self.endpoint}/DEVICE, or device=; devices() lists them"
            )
        return self._topics

    def _advised(self, error: TensorMismatch, model: str, inputs: Mapping[str, npt.ArrayLike]) -> TensorMismatch:
        """The error, with what would fit the model as it is now."""
        self._core.metadata.pop(model, None)
        with contextlib.suppress(EdgeRuntimeError, ConnectionError, TimeoutError):
            return advised(error, arrays(inputs)[0], self._metadata(model))
        return error

    def _metadata(self, model: str) -> Mapping[str, Any]:
        """Return a model's metadata, fetched once."""
        found = self._core.metadata.get(model)
        if found is None:
            found = self._core.metadata[model] = self.metadata(model)
        return found

    def _says(self, name: str, model: str = "", limit_s: float = math.inf) -> bool:
        self._device_topics()  # a call without a device is an error, not an answer
        try:
            return self.device_status() not in AWAY and bool(self._call(name, limit_s, model=model))
        except (ConnectionError, TimeoutError, EdgeRuntimeError):
            return False

    def _call(self, name: str, limit_s: float = math.inf, **values: Any) -> Any:
        """Call an operation. limit_s: an upper bound of the wait."""
        call = self._core.operation(OPERATIONS[name], values)
        # The model is in the header alone: a bad model name may be a bad topic.
        call.topic = self._device_topics().infer()
        call.wait_s = min(call.wait_s, limit_s)
        return self._link.ask(call)


def _access(url: str, **shown: str | None) -> BrokerAccess:
    """Build the broker's address and credentials by the rules of `[mqtt]`. Raises ConfigError."""
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
    """Return the reply topic. Raises Forbidden for one that no device accepts, ConfigError where none can be made."""
    if given is not None:
        check_reply_topic(given, ("",), prefix)
        return given
    topic = f"reply/{owner}/{secrets.token_hex(8)}"
    try:
        check_reply_topic(topic, ("reply/",), prefix)
    except EdgeRuntimeError as error:
        raise ConfigError(f"username: got {owner!r}, which cannot be part of a topic; give reply_topic=") from error
    return topic
