"""Where a client finds a server of the Open Inference Protocol, and how it is admitted there.

Owns: the forms `http[s]://host:port`, `http+unix:///path`, `grpc[s]://host:port` and `grpc+unix:///path`, and
the token's file. Connects to nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from edge_runtime.errors import ConfigError

TOKEN_VARIABLE = "EDGE_RUNTIME_TOKEN"  # noqa: S105 (the variable's name)
URL_FORM = "http[s]://host[:port], grpc[s]://host[:port], http+unix:///path or grpc+unix:///path"
MAX_TOKEN_BYTES = 8192
"""The longest header line that servers take."""

PORTS = {"http": 8000, "grpc": 8001, "https": 443, "grpcs": 443}
"""Triton's ports; with TLS that of the web."""

_SCHEMES: dict[str, Literal["http", "grpc"]] = {
    "http": "http", "https": "http", "http+unix": "http", "grpc": "grpc", "grpcs": "grpc", "grpc+unix": "grpc",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OipAddress:
    """A server's address: host and port, or the path of a Unix socket. url: for messages and logs."""

    protocol: Literal["http", "grpc"]
    url: str
    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False


@dataclass(frozen=True, slots=True)
class OipAccess:
    """A server and the credentials it is shown. Paths: PEM files; `ca_file` None trusts the system's authorities."""

    address: OipAddress
    token: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


def is_oip_url(text: str) -> bool:
    """Whether a text means a server of the Open Inference Protocol."""
    return "://" in text and text.split("://", 1)[0] in _SCHEMES


def parse_oip_url(url: str) -> OipAddress:
    """The parts of a URL. Raises ConfigError, also for a user or password in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}; wanted {URL_FORM}") from None
    protocol = _SCHEMES.get(parts.scheme)
    if protocol is None or "@" in parts.netloc or parts.query or parts.fragment or set("?#") & set(url):
        shown = url if "@" not in parts.netloc else f"{parts.scheme}://…@…"
        raise ConfigError(f"got {shown!r}, wanted {URL_FORM}; a token comes from a file or ${TOKEN_VARIABLE}")
    if parts.scheme.endswith("+unix"):
        if parts.netloc or not parts.path.strip("/"):
            raise ConfigError(f"got {url!r}, wanted {parts.scheme}:///path of a Unix socket")
        return OipAddress(protocol, url, path=unquote(parts.path))
    if not parts.hostname or port == 0 or parts.path.strip("/"):
        raise ConfigError(f"got {url!r}, wanted {URL_FORM}")
    host, port = parts.hostname, port or PORTS[parts.scheme]
    shown_host = f"[{host}]" if ":" in host else host
    return OipAddress(protocol, f"{parts.scheme}://{shown_host}:{port}", host, port, is_tls=parts.scheme.endswith("s"))


def oip_access(
    url: str,
    *,
    token_file: str | None = None,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
) -> OipAccess:
    """A URL, the files for it, and the token: of its file, else of `$EDGE_RUNTIME_TOKEN`. Raises ConfigError."""
    address = parse_oip_url(url)
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    for name, path in files.items():
        if path is None:
            continue
        if not address.is_tls:
            raise ConfigError(f"{name}: got {path!r}, and {url} is not encrypted; use {address.protocol}s://")
        if not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path!r}")
    if (cert_file is None) != (key_file is None):
        raise ConfigError("got one of cert_file and key_file; a client certificate needs both")
    return OipAccess(address, _token(token_file), ca_file, cert_file, key_file)


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        text, where = os.environ.get(TOKEN_VARIABLE, ""), f"${TOKEN_VARIABLE}"
    else:
        where = f"token_file: {token_file}"
        try:
            lines = Path(token_file).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
        text = lines[0] if lines else ""
        if not text.strip():
            raise ConfigError(f"{where}: wanted a token on its first line")
    token = text.strip()
    if not token.isascii() or not token.isprintable() or " " in token or len(token) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{where}: wanted a token of printable characters without spaces")
    return token or None
