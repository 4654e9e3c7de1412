"""Which MQTT broker is meant and what is shown to it: a URL's parts, or host and port, and the files of TLS.

Owns: the URL form `mqtt[s]://[user@]host[:port][/device]` that the daemon, the client and the command line share. Reads
the password file; connects to nothing.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edge_runtime.config.settings import MqttSettings
from edge_runtime.errors import ConfigError

PORT, TLS_PORT = 1883, 8883
"""IANA's for MQTT without and with TLS."""

SCHEMES = {"mqtt": False, "mqtts": True}
URL_FORM = "mqtt[s]://[user@]host[:port][/device]"
MAX_PASSWORD_BYTES = 65_535
"""What an MQTT packet can carry."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker is, and what a URL said beside it: a user's name, a device."""

    host: str
    port: int
    is_tls: bool
    username: str | None = None
    device_id: str | None = None

    @property
    def url(self) -> str:
        """Without user and device: for messages and logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.is_tls else 'mqtt'}://{host}:{self.port}"

    @property
    def is_this_machine(self) -> bool:
        """Whether nothing leaves this machine on the way there."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """A broker with all that it may ask for. Paths: PEM files; `ca_file` None trusts the system's authorities."""

    address: BrokerAddress
    username: str | None = None
    """Where the address names no user."""

    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def password(self) -> str | None:
        """The first line of the password file, read anew for each connection. Raises ConfigError."""
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
    """The parts of `mqtt[s]://[user@]host[:port][/device]`. Raises ConfigError; a password has no place in it."""
    wanted = f"wanted {URL_FORM}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{key}: got {url!r}: {error}; {wanted}") from None
    if parts.password is not None:
        # Never echoed: it would end up in logs and process listings.
        raise ConfigError(f"{key}: a password in a URL is seen by everybody who lists processes; use password_file")
    # A mark with nothing behind it leaves an empty part, as no mark does.
    if parts.scheme not in SCHEMES or not parts.hostname or set("?#") & set(url) or port == 0:
        raise ConfigError(f"{key}: got {url!r}, {wanted}")
    device = unquote(parts.path.strip("/"))
    if "/" in device:
        raise ConfigError(f"{key}: got the path {parts.path!r}; at most a device's id stands there; {wanted}")
    is_tls = SCHEMES[parts.scheme]
    return BrokerAddress(
        parts.hostname,
        port if port is not None else (TLS_PORT if is_tls else PORT),
        is_tls,
        username=unquote(parts.username) if parts.username else None,
        device_id=device or None,
    )


def broker_access(settings: MqttSettings) -> BrokerAccess:
    """The broker that `[mqtt]` means. Raises ConfigError when it names none, or a file that is not there."""
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
