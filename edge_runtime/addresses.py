"""Addresses of servers beyond this device, and the HTTP proxy by which they are reached.

Owns: which hosts are this one, which are reached without the proxy, and the proxy's tunnel. Used by all that a device
asks of its own accord: updates, enrolment, telemetry. Pure, but for what `open_tunnel` says and hears.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from edge_runtime import __version__
from edge_runtime.errors import ConfigError

MAX_TUNNEL_HEAD_BYTES = 16_384
"""Of a proxy's answer, as http.client bounds one line of a head four times over."""

WITHOUT_RULE = 'a host, a suffix such as ".site", an address, a network such as "10.0.0.0/8", or "*"'


class Proxy(NamedTuple):
    """An HTTP proxy. without: hosts that are reached without it, as the setting `no_proxy` has them."""

    host: str
    port: int
    without: tuple[str, ...] = ()

    def leads_to(self, host: str, port: int) -> bool:
        """Return whether a server is reached by the proxy."""
        name = host.strip("[]").rstrip(".").lower()
        return not is_this_host(name) and not any(_names(rule.lower(), name, port) for rule in self.without)


def read_proxy(url: str | None, without: Sequence[str] = (), key: str = "proxy") -> Proxy | None:
    """Return the proxy of a setting, of which `key` is the name; None: there is none. Raises ConfigError."""
    for rule in without:
        _check_rule(rule)
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme != "http" or "@" in parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{key}: got {url.rpartition('@')[2][:200]!r}; wanted http://HOST:PORT, without a user")
    return Proxy(host, port or 80, tuple(without))


def is_this_host(host: str) -> bool:
    """Return whether a server's name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_tunnel(there: socket.socket, host: str, port: int, receive_into: Callable[[bytearray], int]) -> None:
    """Have the proxy at the other end connect to a server (RFC 9110, CONNECT). Raises OSError: it does not.

    receive_into: fills one byte, within the caller's time; returns 0 at the connection's end.
    """
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    there.sendall(f"CONNECT {at} HTTP/1.1\r\nHost: {at}\r\nUser-Agent: edge-runtime/{__version__}\r\n\r\n".encode())
    head, byte = bytearray(), bytearray(1)
    while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows is TLS
        if not receive_into(byte) or len(head) > MAX_TUNNEL_HEAD_BYTES:
            raise OSError("the proxy ended the connection, or did not answer in HTTP")
        head += byte
    status = bytes(head).partition(b"\r\n")[0].decode("ascii", "replace")
    if status.split(" ")[1:2] != ["200"]:
        raise OSError(f"the proxy leads to no {at}: {status[:200]}")


# ---- private --------------------------------------------------------------------------------------------------------


def _check_rule(rule: str) -> None:
    try:
        if "/" in rule:
            ipaddress.ip_network(rule, strict=False)
        if not rule.strip(".*") and rule != "*":
            raise ValueError("it names nothing")
        if any(letter.isspace() or letter in ",;@" for letter in rule):
            raise ValueError("it has letters that no host has")
    except ValueError as error:
        raise ConfigError(f"no_proxy: got {rule!r}: {error}; wanted {WITHOUT_RULE}") from None


def _names(rule: str, host: str, port: int) -> bool:
    """Whether one rule of `no_proxy` names a server. host: without brackets, in small letters."""
    if rule == "*":
        return True
    if "/" in rule:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(rule, strict=False)
        except ValueError:
            return False
    name, colon, said = rule.rpartition(":")
    if colon and said.isascii() and said.isdigit() and (":" not in name or name.endswith("]")):
        if int(said) != port:
            return False
        rule = name
    rule = rule.strip("[]").removeprefix("*").strip(".")
    return host == rule or host.endswith(f".{rule}")
