"""MQTT topics: those a device subscribes to and publishes on, and those a reply may go to.

Pure: text in, text out; any text raises an EdgeRuntimeError at most. Nothing here names a path or a URL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from edge_runtime.errors import ConfigError, DecodeFailed, Forbidden
from edge_runtime.wire.codec import MAX_VERSION, short

MAX_REPLY_TOPIC_BYTES = 512
"""Far above any sane topic; a topic may have 65 535 bytes, and each request in the queue keeps its own."""

DEFAULT_PREFIX = "edge"

ONLINE, STOPPED, OFFLINE = "online", "stopped", "offline"
"""The words of a device's status."""

ID_RULE = "1 to 64 letters, digits, '_' or '-'"

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f+#\ud800-\udfff]")
_RESERVED = frozenset(("infer", "command", "status", "state", "error", "result"))
"""Levels below a device that carry its own messages, or messages to it."""


def is_id(text: str) -> bool:
    """Whether a text may name a device or a group: `[A-Za-z0-9_-]{1,64}`, whole."""
    return _ID.fullmatch(text) is not None


class Address(Struct, frozen=True):
    """Model and version that a request's topic names. No model: an op of the daemon itself."""

    model: str = ""
    version: int | None = None


class DeviceTopics(Struct, frozen=True):
    """The topics of one device: `<prefix>/<device_id>/…`."""

    device_id: str
    prefix: str = DEFAULT_PREFIX

    @property
    def ready_ask_s(self) -> float:
        """How long a client's first question waits, each further one twice as long, in seconds.

        A broker drops requests without a subscriber.
        """
        return 0.25

    @property
    def size_advice(self) -> str:
        """Advice on a message that is too large, beside sending less."""
        return "use ZeroMQ, or raise [mqtt] max_packet_bytes and the broker's limit"

    @property
    def base(self) -> str:
        """The beginning of all topics of this device."""
        return f"{self.prefix}/{self.device_id}"

    @property
    def requests(self) -> str:
        """The filter of all requests."""
        return f"{self.base}/infer/#"

    @property
    def status(self) -> str:
        """Retained `online`, `stopped` or, as last will, `offline`."""
        return f"{self.base}/status"

    @property
    def state(self) -> str:
        """Retained JSON of the device's identity and work."""
        return f"{self.base}/state"

    def state_part(self, number: int) -> str:
        """Retained JSON of some of the models, where the state of all is too large (device_state.py)."""
        return f"{self.state}/models/{number}"

    @property
    def errors(self) -> str:
        """Refusals that have no other address: a request without a reply topic, or with one that is not allowed."""
        return f"{self.base}/error"

    @property
    def check_update(self) -> str:
        """The command that makes this device alone look for updates."""
        return f"{self.base}/command/check-update"

    def infer(self, model: str = "", version: int | None = None) -> str:
        """Where a request is sent; without a model, for an op of the daemon itself."""
        return "/".join([f"{self.base}/infer", *([model] if model else []), *([str(version)] if version else [])])

    def result(self, model: str) -> str:
        """Where a model's results are published when a rule names no topic."""
        return f"{self.base}/result/{model}"

    def reply(self, model: str) -> str:
        """Where the answer to a picture goes that names no topic: cameras with MQTT 3.1.1 cannot."""
        return f"{self.base}/reply/{model}"

    def reply_prefixes(self) -> tuple[str, ...]:
        """Where replies may go when nothing is configured."""
        return (f"{self.base}/reply/", "reply/")

    def address(self, topic: str) -> Address:
        """Return the address in a topic: `infer`, `infer/<model>` or `infer/<model>/<version>` below this device.

        Raises DecodeFailed for any other topic. Whether there is such a model is not known here.
        """
        levels = topic.removeprefix(f"{self.base}/").split("/")
        if not topic.startswith(f"{self.base}/infer") or levels[0] != "infer" or len(levels) > 3:
            raise DecodeFailed(f"topic {short(topic)}: wanted {self.base}/infer/<model>[/<version>]")
        if len(levels) == 1:
            return Address()
        if not levels[1]:
            raise DecodeFailed(f"topic {short(topic)} names no model; wanted {self.base}/infer/<model>[/<version>]")
        if len(levels) == 2:
            return Address(levels[1])
        if not _VERSION.fullmatch(levels[2]) or int(levels[2]) > MAX_VERSION:
            raise DecodeFailed(f"topic {short(topic)}: version {short(levels[2])}, wanted a positive integer")
        return Address(levels[1], int(levels[2]))


def wake_topic(group: str) -> str:
    """The command that makes a group of devices look for updates."""
    return f"fleet/{group}/wake"


def check_reply_topic(topic: str, prefixes: Sequence[str], device_prefix: str = DEFAULT_PREFIX) -> None:
    """Raise Forbidden for a topic that a request may not have its reply sent to.

    An allowed one lies under one of `prefixes`, has no wildcard or control character, and is not a device's topic for
    requests, commands, status, state or results, no wake and no `$` topic.
    """
    length = len(topic.encode("utf-8", "surrogatepass"))
    if length > MAX_REPLY_TOPIC_BYTES:
        raise Forbidden(f"the reply topic has {length} bytes; at most {MAX_REPLY_TOPIC_BYTES} are used")
    if _FORBIDDEN_CHARACTERS.search(topic):
        raise Forbidden(f"reply topic {short(topic)}: a wildcard or control character cannot be published to")
    if not any(topic.startswith(prefix) and len(topic) > len(prefix) for prefix in prefixes):
        raise Forbidden(
            f"reply topic {short(topic)} is not allowed; wanted one that begins with {' or '.join(prefixes)} "
            "(mqtt.reply_prefixes)"
        )
    if _is_reserved(topic, device_prefix):
        raise Forbidden(f"reply topic {short(topic)}: devices listen to it or speak on it, so no reply goes there")


def reply_owner(topic: str, prefixes: Sequence[str]) -> str:
    """The client that an allowed reply topic belongs to: its prefix and the one level below, `reply/<client>`.

    A broker says of no message who published it, but its rules can say who reads below `reply/<client>/`.
    """
    prefix = max((each for each in prefixes if topic.startswith(each)), key=len, default="")
    return prefix + topic[len(prefix) :].partition("/")[0]


def check_result_topic(key: str, topic: str, topics: DeviceTopics) -> str:
    """A configured topic for a model's results. Raises ConfigError.

    Any topic that can be published to, but those that others take for something else: a device's requests, commands,
    status, state, errors, or another device's results, a wake, a `$` topic.
    """
    wanted = f"wanted a topic like {topics.result('digits')!r} or 'site/line1/digits'"
    if not topic or topic.startswith("/") or _FORBIDDEN_CHARACTERS.search(topic):
        raise ConfigError(f"{key}: got {topic!r}, {wanted}")
    if len(topic.encode()) > MAX_REPLY_TOPIC_BYTES:
        raise ConfigError(f"{key}: got {len(topic.encode())} bytes, wanted at most {MAX_REPLY_TOPIC_BYTES}")
    if not topic.startswith(f"{topics.base}/result/") and _is_reserved(topic, topics.prefix):
        raise ConfigError(f"{key}: got {topic!r}, which devices listen to or speak on; {wanted}")
    return topic


def _is_reserved(topic: str, device_prefix: str) -> bool:
    """Whether a topic carries a device's own messages, or messages to one."""
    below = topic.removeprefix(f"{device_prefix}/").split("/")
    is_devices = topic.startswith(f"{device_prefix}/") and len(below) > 1 and below[1] in _RESERVED
    return is_devices or topic.startswith(("$", "fleet/"))


def check_prefix(key: str, prefix: str) -> str:
    """A configured beginning of topics, without a slash at its end. Raises ConfigError."""
    bare = prefix.rstrip("/")
    if not bare or bare.startswith(("/", "$")) or "//" in bare or _FORBIDDEN_CHARACTERS.search(bare):
        raise ConfigError(f"{key}: got {prefix!r}, wanted levels of a topic like {DEFAULT_PREFIX!r} or 'site/line1'")
    if len(bare.encode()) > MAX_REPLY_TOPIC_BYTES // 2:
        raise ConfigError(f"{key}: got {len(bare.encode())} bytes, wanted at most {MAX_REPLY_TOPIC_BYTES // 2}")
    return bare
