"""The settings of `[mqtt]`, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_runtime.config.settings import PositiveFloat

MqttProtocol = Literal["auto", "5", "3.1.1"]


class MqttSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The MQTT broker to connect to, named by `url` or `host`. Without this table the daemon uses no MQTT."""

    url: str | None = None
    """The broker (`--mqtt`): `mqtt[s]://[user@]host[:port][/device]`. It overrides `host`, `port`, `username` and
    `device_id`."""

    host: str | None = None
    """The broker's name or address when there is no `url`; TLS when `ca_file` or `cert_file` is given."""

    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """The broker's port. When absent: 1883, with TLS 8883."""

    device_id: str | None = None
    """This device in topics, `<prefix>/<device_id>/…`. When absent: the host's name."""

    prefix: str = "edge"
    """The beginning of the topics of all devices."""

    protocol: MqttProtocol = "auto"
    """MQTT's version. `"auto"`: 5, and 3.1.1 where a broker refuses 5, or closes or says nothing twice; then both by
    turns until one answers."""

    username: str | None = None
    """User name. When absent: the one in `url`, else none."""

    password_file: str | None = None
    """File with the password on its first line."""

    ca_file: str | None = None
    """PEM certificates of the authorities that may sign the broker's. When absent: the system's."""

    cert_file: str | None = None
    """This device's PEM certificate, for brokers that ask for one."""

    key_file: str | None = None
    """The key of `cert_file`."""

    keepalive_s: Annotated[int, Meta(ge=1, le=65535)] = 20
    """After this much silence the daemon pings the broker, and gives the connection up after as much again: a
    half-open connection is noticed after about twice this."""

    session_expiry_s: Annotated[int, Meta(ge=0, le=0xFFFFFFFE)] = 60
    """How long the broker keeps QoS 1 requests while the device is away: longer than a broker's restart, shorter than
    a caller's patience."""

    receive_maximum: Annotated[int, Meta(ge=1, le=65535)] = 1024
    """QoS 1 messages that the broker may send before it must wait for an acknowledgement."""

    max_packet_bytes: Annotated[int, Meta(ge=1024, le=268_435_455)] = 64 << 20
    """Largest request; the broker drops larger ones. The default equals `zmq.max_frame_bytes`."""

    reconnect_min_s: PositiveFloat = 0.5
    """About the first wait after a lost connection; it doubles with each failed try. A broker that restarts is found
    again within seconds."""

    reconnect_max_s: PositiveFloat = 60.0
    """About the longest wait. Waits are jittered, so that ten thousand devices do not return in one second."""

    reply_prefixes: tuple[str, ...] = ()
    """Where replies may go. When empty: `<prefix>/<device_id>/reply/` and `reply/`."""

    groups: tuple[str, ...] = ()
    """Groups of devices that this one belongs to; it obeys `fleet/<group>/wake`."""

    state_interval_s: PositiveFloat = 15.0
    """Time between two publications of the retained state; a change of models is published at once."""

    home_assistant: str | None = None
    """Discovery prefix of Home Assistant, usually `"homeassistant"`. When absent: nothing is published for it."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("got one of cert_file and key_file; a client certificate needs both")
        if self.reconnect_min_s > self.reconnect_max_s:
            raise ValueError(f"reconnect_min_s = {self.reconnect_min_s} is above reconnect_max_s")
