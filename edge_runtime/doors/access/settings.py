"""The settings that doors with addresses share, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from edge_runtime.config.settings import Positive, PositiveFloat


class DoorSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that all doors with addresses have. Addresses: `host:port` or `unix:/path`."""

    rules: ClassVar[str] = "edge_runtime.doors.access.rules:door_access"

    endpoint: str | None = None
    """Where it listens. When absent: nowhere. Off this machine it needs `cert_file`, `key_file` and `tokens_file`."""

    control: bool | str = False
    """Where load, unload and settings are allowed: `true`, on `endpoint`, which is then loopback or a Unix socket, or
    has tokens, whose rights decide; an address, on that one, which is loopback or a Unix socket and wants no token;
    `false`, for tokens with `control`."""

    cert_file: str | None = None
    """PEM file of the certificate and those that signed it: the door then speaks TLS."""

    key_file: str | None = None
    """PEM file of the certificate's key."""

    client_ca_file: str | None = None
    """PEM file of who signs clients' certificates. When absent: clients need none."""

    tokens_file: str | None = None
    """File of tokens, which `edge-runtime token` writes; SIGHUP reads it again. When absent: no caller needs one."""

    insecure: bool = False
    """Allow an address off this machine without TLS and tokens: everyone who can connect may use every model."""

    server_name: Annotated[str, Meta(min_length=1, max_length=64)] = "edge-runtime"
    """The name in the server's metadata. `"triton"` satisfies scripts that look for it there."""

    max_body_bytes: Positive = 64 << 20
    """Largest body of a request, before and after it is inflated."""

    body_timeout_s: PositiveFloat = 30.0
    """How long a request may take to arrive, from its first byte."""

    max_connections: Positive = 1024
    """Connections at once; over HTTP the one that is idle for longest is closed for a new one. A door never has more
    than a quarter of the descriptors that the process may open."""

    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call, as their `Origin` header says: `"https://example.com"`, or `"*"` for all; others get
    `forbidden`. On loopback their hosts are allowed as `Host` too, for a proxy that keeps it."""
