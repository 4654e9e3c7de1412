"""Sends bodies to one collector: OTLP over HTTP/1.1, by one connection that stays open.

Owns: the connection, TLS, and what each answer means for a body (OTLP 1.5, "OTLP/HTTP Response"). Thread: the
exporter's, which may wait here.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from edge_runtime import __version__
from edge_runtime.addresses import Proxy, is_this_host
from edge_runtime.config.settings import TracingSettings
from edge_runtime.errors import ConfigError
from edge_runtime.timed_answer import TimedAnswer

WAIT_S = 5.0
"""For a connection, for a body to leave, and for the whole answer: a collector that takes longer is taken for a dead
one, also where its answer comes byte by byte."""

MOST_ANSWER_BYTES = 64 << 10
"""Of an answer, which says at most why some of a body was refused."""

LONGEST_AFTER_S = 3600.0
"""A collector's `Retry-After` beyond is cut to this."""

_LATER = frozenset((429, 502, 503, 504))
"""Statuses after which the same body may be sent again."""

DEFAULT_PORTS = {"http": 4318, "https": 4318}


class CollectorAnswer(Struct, frozen=True):
    """The end of a body's way. is_taken: the collector has it. may_repeat: it may be sent again, after `after_s`.

    is_away: nothing took the connection, so no other signal's body would be taken either.
    """

    is_taken: bool
    may_repeat: bool = False
    is_away: bool = False
    after_s: float = 0.0
    reason: str = ""


class Collector:
    """One collector. proxy: by which it is reached. Raises ConfigError as it is made: the settings cannot be."""

    def __init__(self, settings: TracingSettings, proxy: Proxy | None = None) -> None:
        self.endpoint = settings.endpoint
        try:
            parts = urlsplit(settings.endpoint)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"tracing.endpoint: {settings.endpoint!r}: {error}") from None
        if parts.scheme not in DEFAULT_PORTS or not host or parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigError(
                f"tracing.endpoint: got {settings.endpoint!r}, wanted a collector's address such as "
                "https://collector.example:4318; headers such as tokens come from headers_file"
            )
        if parts.scheme == "http" and not (settings.allow_http or is_this_host(host)):
            raise ConfigError(
                f"tracing.endpoint: {settings.endpoint!r} is http beyond this machine, so everyone on the way reads it "
                "and its tokens; use https, or set tracing.allow_http = true"
            )
        self._connection: HTTPConnection
        self._path = parts.path.rstrip("/")
        self._headers = {
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
            "User-Agent": f"edge-runtime/{__version__}",
            **_read_headers(settings.headers_file),
        }
        address = there = host, port or DEFAULT_PORTS[parts.scheme]
        if proxy is not None and proxy.leads_to(*there):
            address = proxy.host, proxy.port
        if parts.scheme == "http":
            self._connection = HTTPConnection(*address, timeout=WAIT_S)
            if address != there:  # the proxy reads the whole address, and no tunnel is made (RFC 9112, 3.2.2)
                self._path = f"http://{parts.netloc}{self._path}"
        else:
            self._connection = HTTPSConnection(*address, timeout=WAIT_S, context=_context(settings))
            if address != there:
                self._connection.set_tunnel(*there)

    def send(self, signal: str, body: bytes, wait_s: float = WAIT_S) -> CollectorAnswer:
        """Send one body and wait for its answer. Never raises. wait_s: for each step of that."""
        connection = self._connection
        may_be_closed = connection.sock is not None  # one that was left alone may be by now
        while True:
            try:
                return self._ask(signal, body, wait_s)
            except (OSError, HTTPException) as error:
                is_away = connection.sock is None
                connection.close()
                if may_be_closed and not isinstance(error, TimeoutError):
                    may_be_closed = False
                    continue
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                return CollectorAnswer(is_taken=False, may_repeat=True, is_away=is_away, reason=reason)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _ask(self, signal: str, body: bytes, wait_s: float) -> CollectorAnswer:
        """Send it; return what its answer means. Raises OSError, HTTPException: there was none."""
        connection = self._connection
        connection.timeout = wait_s
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(wait_s)
        connection.request("POST", f"{self._path}/v1/{signal}", body, self._headers)
        left_s = partial(_left_s, time.monotonic() + wait_s)
        connection.response_class = partial(TimedAnswer, left_s=left_s)  # type: ignore[assignment]
        response = connection.getresponse()
        response.read(MOST_ANSWER_BYTES)
        if not response.isclosed():
            connection.close()
        return _meaning(response)


def _left_s(until_s: float) -> float:
    """Return how long to wait yet. Raises TimeoutError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("its answer took too long")
    return left_s


def _meaning(response: HTTPResponse) -> CollectorAnswer:
    status = response.status
    if 200 <= status < 300:
        return CollectorAnswer(is_taken=True)
    reason = f"it answered {status} {response.reason}"
    if status not in _LATER:
        return CollectorAnswer(is_taken=False, reason=reason)
    text = response.headers.get("Retry-After", "")
    after_s = min(float(text), LONGEST_AFTER_S) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
    return CollectorAnswer(is_taken=False, may_repeat=True, after_s=after_s, reason=reason)


def _context(settings: TracingSettings) -> ssl.SSLContext:
    """The TLS of a collector. Raises ConfigError: a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tracing: ca_file, cert_file or key_file cannot be used: {error}") from None
    return context


def _read_headers(file: str | None) -> Mapping[str, str]:
    """The headers that a file has, `Name: value` a line. Raises ConfigError."""
    if file is None:
        return {}
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tracing.headers_file: {file} cannot be read: {error}") from None
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not (name + value).isprintable():
            raise ConfigError(f"tracing.headers_file: {file}:{number}: wanted `Name: value`")
        headers[name.strip()] = value.strip()
    return headers
