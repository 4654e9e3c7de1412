"""Who may do what through the HTTP and gRPC doors: their addresses, TLS, tokens, and web pages.

Owns: the forms of an address, the rules of `[http]` and `[grpc]` that keep strangers out, and what each caller may do.
Reads certificates and tokens; binds nothing. The doors ask `DoorAccess` for each connection and request.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.config.endpoints import MAX_IPC_PATH_BYTES
from edge_runtime.doors.access.settings import DoorSettings
from edge_runtime.doors.access.tokens import Rights, TokenFile, read_tokens
from edge_runtime.errors import ConfigError, Forbidden, Unauthenticated

if TYPE_CHECKING:
    import ssl

    from edge_runtime.doors.access.logins import Logins

ADDRESS_FORMS = "host:port, such as 127.0.0.1:8000 or [::1]:8000, or unix:/path"

ANY_ORIGIN = "*"
"""In `allowed_origins`: every web page may call."""

PAGE_MARK = "x-edge-page"
"""A header that no form, and no page of another origin, can send unless its browser asked first and was allowed to."""

_LOCAL = "localhost"


class DoorAddress(Struct, frozen=True):
    """Where a door listens: host and port (0: any free one), or the path of a Unix socket.

    is_control: every caller of this address may load, unload and change settings. is_tls: it speaks TLS only.
    """

    host: str = ""
    port: int = 0
    path: str | None = None
    is_control: bool = False
    is_tls: bool = False

    def __str__(self) -> str:
        """As in settings: `host:port` or `unix:/path`."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def endpoint(self, scheme: str) -> str:
        """As a client writes it: `unix:/path`, or a URL. scheme: of the URL without TLS; with TLS it ends in "s"."""
        return str(self) if self.path is not None else f"{scheme}{'s' if self.is_tls else ''}://{self}"

    @property
    def is_this_machine(self) -> bool:
        """Whether only this machine reaches it: a Unix socket, or loopback."""
        return self.path is not None or _is_loopback(self.host)


def parse_door_address(text: str, key: str) -> DoorAddress:
    """The address in `host:port`, `[v6]:port` or `unix:/path`. Raises ConfigError; key: the setting, for its text."""
    if text.startswith("unix:"):
        return DoorAddress(path=_unix_path(text, key))
    host, colon, port = text.rpartition(":")
    if "://" in text or not colon:
        raise ConfigError(f"{key}: got {text!r}, wanted {ADDRESS_FORMS}")
    if not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise ConfigError(f"{key}: got {text!r} with the port {port[:20]!r}; wanted 0 to 65535, 0 for any free one")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if bare != host or ":" in host:
        if not _is_ip(bare) or bare == host:
            raise ConfigError(f"{key}: got {text!r}; an IPv6 address stands in brackets, as in [::1]:8000")
    elif not host or set(host) & set(" /\\@?#*,[]"):
        raise ConfigError(f"{key}: got {text!r} with the host {host!r}; wanted a name or an address; 0.0.0.0 is all")
    return DoorAddress(bare, int(port))


class DoorAccess:
    """The rules of one door, made by `door_access`. Thread: any; `reload_tokens` beside others.

    logins: of browsers, where a page of this door lets them log in. on_change: called when one has ended.
    """

    def __init__(self, key: str, settings: DoorSettings, addresses: Sequence[DoorAddress]) -> None:
        self.key = key
        self.addresses = tuple(addresses)
        self._settings = settings
        self._tokens = self._read_tokens()
        self.logins: Logins | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._origins = frozenset(_origin(each, f"{key}.allowed_origins") for each in settings.allowed_origins)
        self._origin_hosts = frozenset(_host_of(each.partition("://")[2]) for each in self._origins)

    @property
    def has_tokens(self) -> bool:
        """Whether callers need a token."""
        return self._tokens is not None

    def is_known(self, token: str) -> bool:
        """Whether a token, by its SHA-256, is one of this door's."""
        return self._tokens is not None and self._tokens.rights_of_digest(token) is not None

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS 1.2 and newer with the door's certificate, for its addresses with `is_tls`; None where it has none.

        With `client_ca_file` a client must show a certificate. Raises ConfigError for files that TLS cannot use.
        """
        settings = self._settings
        if settings.cert_file is None:
            return None
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A client that renegotiates without end would keep the door busy.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.key}.cert_file, {self.key}.key_file: {settings.cert_file} and {settings.key_file} cannot be "
                f"used: {error.strerror or error}; wanted a PEM certificate and its PEM key"
            ) from None
        if settings.client_ca_file is not None:
            try:
                context.load_verify_locations(settings.client_ca_file)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"{self.key}.client_ca_file: {settings.client_ca_file} cannot be used: {error.strerror or error}; "
                    "wanted PEM certificates"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def login(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Return the SHA-256 of the token that the sender's browser is logged in with; None where it is not.

        A browser adds its cookie to the requests of other pages too: one that changes something needs the page's own
        header.
        """
        if self.logins is None or "cookie" not in headers or (method != "GET" and headers.get(PAGE_MARK) != "1"):
            return None
        return self.logins.token_of(headers["cookie"])

    def caller(self, address: DoorAddress, authorization: str | None, login: str | None = None) -> Rights:
        """Return the rights of a request's sender. authorization: the header or metadata of that name.

        login: as of the method of that name; an authorization counts before it.
        On a control address of its own everyone may do everything; elsewhere a token's rights decide where there are
        tokens, else `control = true`. Raises Unauthenticated for a token that is missing or unknown.
        """
        tokens = self._tokens
        is_own_control = address.is_control and self._settings.control is not True
        if tokens is None or (authorization is None and is_own_control):
            return Rights(may_infer=True, may_control=address.is_control, may_view=address.is_this_machine)
        if authorization is None and login is not None and (found := tokens.rights_of_digest(login)) is not None:
            return found
        if authorization is None:
            raise Unauthenticated("this door wants a token: send the header Authorization: Bearer TOKEN")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            # What came is not repeated: it may be a token without its scheme.
            raise Unauthenticated("authorization: wanted Bearer and a token, got another scheme")
        rights = tokens.rights_of(token.strip())
        if rights is None:
            raise Unauthenticated(
                "authorization: this token is unknown here; `edge-runtime token list` names those known"
            )
        return replace(rights, may_infer=True, may_control=True, may_view=True) if is_own_control else rights

    def check_browser(self, address: DoorAddress, origin: str | None, host: str | None) -> None:
        """Raise Forbidden for a request that a strange web page may have made. origin, host: headers; None: absent.

        A browser sends the page's `Origin` with every request that changes something, and a page whose name DNS turned
        to this machine has that name as `Host`. On loopback `Host` is therefore an address of ours. Off the machine
        any is accepted: a proxy or a cluster gives names that this machine does not know, and a page has no token.
        """
        name = _host_of(host) if host is not None else None
        is_here = address.path is None and address.is_this_machine
        if is_here and name is not None and not self._is_ours(address, name) and ANY_ORIGIN not in self._origins:
            raise Forbidden(
                f"Host: got {_brief(host)}, which is not an address of this door; wanted {address} or localhost. "
                f"Behind a proxy, list its address in {self.key}.allowed_origins"
            )
        if origin is None or self.is_listed(origin):
            return
        own = f"{'https' if address.is_tls else 'http'}://{(host or '').lower()}"
        if origin.lower() != own or name is None or not self._is_ours(address, name):
            raise Forbidden(
                f"Origin: web pages of {_brief(origin)} may not call this door; list it in {self.key}.allowed_origins"
            )

    def is_own_host(self, address: DoorAddress, host: str) -> bool:
        """Whether `Host` is this machine by its address, its name, or a name in `allowed_origins`.

        A page whose name DNS turned to this machine has that name there.
        """
        return self._is_ours(address, _host_of(host))

    def is_listed(self, origin: str) -> bool:
        """Whether web pages of this `Origin` may call, and read the answers."""
        return ANY_ORIGIN in self._origins or origin.lower() in self._origins

    def reload_tokens(self) -> None:
        """Read the tokens again. Raises ConfigError for a broken file; the tokens are as before then."""
        self._tokens = self._read_tokens()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _read_tokens(self) -> TokenFile | None:
        path = self._settings.tokens_file
        return None if path is None else read_tokens(Path(path), f"{self.key}.tokens_file")

    def _is_ours(self, address: DoorAddress, name: str) -> bool:
        if name in (_LOCAL, address.host.lower()) or name in self._origin_hosts or _is_loopback(name):
            return True
        # A numeric address is not a name that DNS could turn to this machine.
        return not address.is_this_machine and (_is_ip(name) or name == socket.gethostname().lower())


def door_access(settings: DoorSettings, key: str) -> DoorAccess | None:
    """The rules of `[http]` or `[grpc]` (key); None when it names no address. Raises ConfigError: key and why."""
    addresses = []
    _check_files(settings, key)
    if settings.endpoint is not None:
        endpoint = parse_door_address(settings.endpoint, f"{key}.endpoint")
        is_tls = settings.cert_file is not None and endpoint.path is None
        _check_exposure(endpoint, settings, key)
        addresses.append(replace(endpoint, is_control=settings.control is True, is_tls=is_tls))
    if isinstance(settings.control, str):
        control = parse_door_address(settings.control, f"{key}.control")
        if not control.is_this_machine:
            raise ConfigError(
                f"{key}.control: got {settings.control!r}, which other machines reach; wanted a loopback address, such "
                f"as 127.0.0.1:8010, or unix:/path; from other machines, use a token with control"
            )
        is_fixed = control.path is not None or control.port != 0
        if is_fixed and control in [replace(each, is_tls=False) for each in addresses]:
            raise ConfigError(f"{key}.control: got the address of {key}.endpoint; write control = true instead")
        addresses.append(replace(control, is_control=True))
    return DoorAccess(key, settings, addresses) if addresses else None


# ---- private --------------------------------------------------------------------------------------------------------


def _check_files(settings: DoorSettings, key: str) -> None:
    if (settings.cert_file is None) != (settings.key_file is None):
        got, missing = ("cert_file", "key_file") if settings.key_file is None else ("key_file", "cert_file")
        raise ConfigError(f"{key}.{got}: is given without {key}.{missing}; TLS needs both")
    if settings.client_ca_file is not None and settings.cert_file is None:
        raise ConfigError(f"{key}.client_ca_file: is given without {key}.cert_file and {key}.key_file; it needs TLS")
    for name in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{key}.{name}: there is no file {path!r}")


def _check_exposure(endpoint: DoorAddress, settings: DoorSettings, key: str) -> None:
    if endpoint.is_this_machine:
        return
    missing = [name for name in ("cert_file", "key_file", "tokens_file") if getattr(settings, name) is None]
    if missing and not settings.insecure:
        raise ConfigError(
            f"{key}.endpoint: {endpoint} can be reached from other machines: set "
            f"{', '.join(f'{key}.{name}' for name in missing)}, listen on 127.0.0.1, or accept the risk with "
            f"{key}.insecure = true"
        )
    if settings.control is True and settings.tokens_file is None:
        raise ConfigError(
            f"{key}.control: got true, and {endpoint} can be reached from other machines: set {key}.tokens_file, or "
            f"give control an address of its own on this machine"
        )


def _unix_path(text: str, key: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("///"):
        path = path[2:]
    if not path.startswith("/") or path.startswith("//") or path.endswith("/") or "\0" in path:
        raise ConfigError(
            f"{key}: got {text!r}, wanted unix: and the whole path of a socket, as in unix:/run/http.sock"
        )
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"{key}: the path of {text!r} has {length} bytes and a socket's path may have {MAX_IPC_PATH_BYTES}; choose "
            "a shorter folder, for example below /run"
        )
    return path


def _origin(text: str, key: str) -> str:
    origin = text.lower().rstrip("/")
    scheme, _, host = origin.partition("://")
    if text != ANY_ORIGIN and (scheme not in ("http", "https") or not host or set(host) & set("/?#@ ")):
        raise ConfigError(
            f"{key}: got {text!r}, wanted the page's origin, as in https://example.com:8443, or {ANY_ORIGIN!r}"
        )
    return origin


def _host_of(authority: str) -> str:
    """The host in `host[:port]`, in lower case, without brackets and the dot of a full name."""
    text = authority.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == _LOCAL or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _brief(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 80 else text[:80] + "…")
