"""The MQTT broker to connect to, and the credentials for it: a URL or host and port, and the files of TLS.

Owns: the URL form `mqtt[s]://[user@]host[:port][/device]` that the daemon, the client and the command line share. Reads
the password file; connects to nothing.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edge_runtime.doors.mqtt.settings import MqttProtocol, MqttSettings
from edge_runtime.errors import ConfigError

PORT, TLS_PORT = 1883, 8883
"""IANA's ports for MQTT without and with TLS."""

SCHEMES = {"mqtt": False, "mqtts": True}
URL_FORM = "mqtt[s]://[user@]host[:port][/device]"
MAX_PASSWORD_BYTES = 65_535
"""The limit of an MQTT packet."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker's address, and the user name and device id that a URL may carry."""

    host: str
    port: int
    is_tls: bool
    username: str | None = None
    device_id: str | None = None

    @property
    def url(self) -> str:
        """The URL without user and device, for messages and logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.is_tls else 'mqtt'}://{host}:{self.port}"

    @property
    def is_this_machine(self) -> bool:
        """Whether the broker is on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """A broker and the credentials for it. Paths: PEM files; `ca_file` None trusts the system's authorities."""

    address: BrokerAddress
    username: str | None = None
    """For an address that names no user."""

    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    protocol: MqttProtocol = "auto"

    def password(self) -> str | None:
        """The first line of the password file, read for each connection. Raises ConfigError."""
        if self.password_file is None:
            return None
        try:
            raw = Path(self.password_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"mqtt.password_file: {self.password_file}: {error.strerror}") from None
        line = raw.splitlines()[0] if raw else b""
        if not line or len(line) > MAX_PASSWORD_BYTES:
            raise ConfigError(f"mqtt.password_file: {self.password_file}: wanted a password on its first line")
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"mqtt.password_file: {self.password_file}: wanted UTF-8") from None


def is_broker_url(text: str) -> bool:
    """Whether a text means a broker rather than a ZeroMQ endpoint."""
    return text.split("://", 1)[0] in SCHEMES and "://" in text


def parse_broker_url(url: str, key: str = "mqtt.url") -> BrokerAddress:
    """The parts of `mqtt[s]://[user@]host[:port][/device]`. Raises ConfigError, also for a password in it."""
    wanted = f"wanted {URL_FORM}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{key}: got {url!r}: {error}; {wanted}") from None
    if parts.password is not None:
        # The URL is not echoed: its password would reach logs.
        raise ConfigError(f"{key}: everyone who lists processes sees a password in a URL; use password_file")
    # A trailing "?" or "#" leaves an empty part, as if it were absent.
    if parts.scheme not in SCHEMES or not parts.hostname or set("?#") & set(url) or port == 0:
        raise ConfigError(f"{key}: got {url!r}, {wanted}")
    device = unquote(parts.path.strip("/"))
    if "/" in device:
        raise ConfigError(f"{key}: got the path {parts.path!r}; only a device id may stand there; {wanted}")
    is_tls = SCHEMES[parts.scheme]
    return BrokerAddress(
        parts.hostname,
        port if port is not None else (TLS_PORT if is_tls else PORT),
        is_tls,
        username=unquote(parts.username) if parts.username else None,
        device_id=device or None,
    )


def broker_access(settings: MqttSettings) -> BrokerAccess:
    """The broker of `[mqtt]`. Raises ConfigError when it names none, or a file that does not exist."""
    for key in ("password_file", "ca_file", "cert_file", "key_file"):
        path = getattr(settings, key)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"mqtt.{key}: there is no file {path!r}")
    return BrokerAccess(
        _address(settings),
        username=settings.username,
        password_file=settings.password_file,
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        protocol=settings.protocol,
    )


def _address(settings: MqttSettings) -> BrokerAddress:
    has_files = settings.ca_file is not None or settings.cert_file is not None
    if settings.url is not None:
        address = parse_broker_url(settings.url)
        if has_files and not address.is_tls:
            raise ConfigError(f"mqtt.url: got {settings.url!r} with certificates, which only mqtts:// uses")
        return address
    if settings.host is None:
        raise ConfigError(f"mqtt: got neither url nor host; wanted url = {URL_FORM!r}, or host (and port)")
    return BrokerAddress(settings.host, settings.port or (TLS_PORT if has_files else PORT), has_files)
