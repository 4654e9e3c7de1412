"""Files over HTTP(S), with the standard library: every wait ends at the deadline, headers and handshake included.

Owns: connections (one for each file, always closed), redirects, ranges, and which addresses are allowed. Never verifies
bytes: TUF does, so that plain HTTP is safe to install from; it is still refused to other hosts unless the settings
allow it, since every listener would see what a device runs.

Not by urllib3 (2.8), which bounds each wait and not their sum: with `Timeout(total=1)`, headers that dripped were read
for 11 s, and a name with four silent addresses was tried for 4 s.
"""

from __future__ import annotations

import io
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from edge_runtime import __version__
from edge_runtime.addresses import Proxy, is_this_host, open_tunnel
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import ConfigError, DownloadError, NotPublished
from edge_runtime.updates.fetch import FetchedBody

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STALL_S = 30.0
"""No byte for this long ends a transfer before its deadline; a packet lost three times costs some 7 s (RFC 6298)."""

HEAD_S = 30.0
"""Connecting, the handshake and the headers may take this long together, however steadily bytes drip."""

LOOK_S = 1.0
"""How often a wait looks whether the daemon stops."""

SPARE_BYTES = 256 << 10
"""Of a reply beside the file, and once more as many bytes as came of the file: headers, lengths of chunks, read-ahead.
Otherwise a server could send interim replies, extensions of chunks or trailers until the deadline, at full speed."""

MAX_REDIRECTS = 3
"""A bucket's region and one more; a loop ends soon."""

PATH_SAFE = "/%!$&'()*+,;=:@~"
"""Not quoted in a path (RFC 3986, pchar); "%" because TUF's paths are URL paths already."""

_OK, _PARTIAL, _BAD_RANGE = 200, 206, 416
_WHO_ASKS = 401
_FORBIDDEN = 403
_MISSING = (_FORBIDDEN, 404)
"""Buckets reply 403 for a file that is not there to those who may not list it."""
_REDIRECTS = (301, 302, 303, 307, 308)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]+/(?:[0-9]+|\*)")


class LoginAsked(DownloadError):
    """The server answers only who logs in. challenges: the values of its `WWW-Authenticate` headers."""

    def __init__(self, message: str, challenges: Sequence[str]) -> None:
        super().__init__(message)
        self.challenges = tuple(challenges)


class HttpFetcher:
    """Files below one address, by GET. `open` as the Fetcher protocol says."""

    def __init__(
        self,
        base_url: str,
        *,
        clock: Clock | None = None,
        tls: ssl.SSLContext | None = None,
        stall_s: float = STALL_S,
        allow_plain: bool = False,
        redirect_hosts: Sequence[str] = (),
        hosts_key: str = "update.redirect_hosts",
        proxy: Proxy | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Check the address, without a connection.

        tls: None takes the system's certificate authorities. allow_plain: http also to other hosts than this one.
        redirect_hosts: other servers, `host` or `host:port`, that redirects may lead to. hosts_key: the setting that
        names them. proxy: by which all that it leads to is reached. stop: ends a transfer once it is set.
        Raises ConfigError: not http or https, no host, a user in it, or http where it is not allowed.
        """
        self._base_url = base_url if base_url.endswith("/") else f"{base_url}/"
        self._clock = clock or SystemClock()
        self._stall_s = stall_s
        self._allow_plain = allow_plain
        self._redirect_hosts = redirect_hosts
        self._hosts_key = hosts_key
        self._stop = stop or threading.Event()
        self._proxy = proxy
        complaint = self._complaint(self._base_url)
        if "?" in base_url or "#" in base_url:
            complaint = "files are found by adding their names to it; wanted an address without ? and #"
        if complaint is not None:
            raise ConfigError(f"{base_url!r}: {complaint}")
        if tls is None and urlsplit(self._base_url).scheme == "https":
            # Once: it reads every authority of the system, which takes longer than a handshake.
            tls = ssl.create_default_context()
        self._tls = tls

    @contextmanager
    def open(
        self, path: str, *, start_bytes: int = 0, deadline_s: float, headers: Mapping[str, str] | None = None
    ) -> Iterator[FetchedBody]:
        """Start to fetch a file; follows redirects of the same scheme. Raises as the Fetcher protocol says.

        headers: more of them for this server; another one that it leads to does not get them. Raises LoginAsked too.
        """
        if any(part in (".", "..") for part in path.split("/")):
            raise NotPublished(f"{self._base_url}: {path!r} is not a path within a repository")
        with self._fetch(self._base_url + quote(path, safe=PATH_SAFE), start_bytes, deadline_s, headers or {}) as body:
            yield body

    @contextmanager
    def open_named(self, url: str, *, deadline_s: float, headers: Mapping[str, str]) -> Iterator[FetchedBody]:
        """Start to fetch an address that the server named, on it or on one of `redirect_hosts`. Raises as `open`."""
        with self._fetch(self._led(self._base_url, url), 0, deadline_s, headers) as body:
            yield body

    # ---- private ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _fetch(
        self, url: str, start_bytes: int, deadline_s: float, headers: Mapping[str, str]
    ) -> Iterator[FetchedBody]:
        began = url
        for _ in range(MAX_REDIRECTS + 2):
            with closing(
                _HttpConnection(self._clock, self._stall_s, deadline_s, self._stop, self._proxy)
            ) as connection:
                reply = connection.get(urlsplit(url), start_bytes, self._tls, headers)
                if reply.status in _REDIRECTS:
                    to = self._led(url, reply.headers.get("Location"))
                    # A login is for one server. The store of a registry refuses a request with two, too.
                    headers = headers if urlsplit(to).netloc == urlsplit(url).netloc else {}
                    url = to
                elif reply.status == _BAD_RANGE and start_bytes:
                    start_bytes = 0
                else:
                    yield _HttpBody(url, connection, reply, _start_of(url, reply, start_bytes))
                    return
        raise DownloadError(f"{began}: more than {MAX_REDIRECTS} redirects, the last to {url}; give the last address")

    def _led(self, url: str, location: str | None) -> str:
        """Return the address that a server leads to from `url`. Raises DownloadError: it may not lead there."""
        try:
            to = urljoin(url, location or "")
        except ValueError as error:
            raise DownloadError(f"{url} leads to {location!r}: {error}") from error
        if not location or urlsplit(to).scheme != urlsplit(url).scheme:
            raise DownloadError(f"{url} leads to {location!r}; wanted an address of the same scheme")
        complaint = self._complaint(to)
        if complaint is not None:
            raise DownloadError(f"{url} leads to {to!r}: {complaint}")
        known, new = urlsplit(self._base_url), urlsplit(to)
        is_known = (new.hostname, _port_of(new)) == (known.hostname, _port_of(known))
        if not (is_known or is_listed(new, self._redirect_hosts)):
            raise DownloadError(
                f"{url} leads to another server, {new.netloc}; name it in {self._hosts_key}, or give its address"
            )
        return to

    def _complaint(self, url: str) -> str | None:
        """Return the fault of an address; None: it has none."""
        try:
            parts = urlsplit(url)
            host, _port = parts.hostname, parts.port
        except ValueError as error:
            return str(error)
        if parts.scheme not in ("http", "https") or not host:
            return "not an address of a server; wanted https://HOST/PATH (http only for this host)"
        if "@" in parts.netloc:
            return "a user in the address would be in every log; wanted https://HOST/PATH"
        if parts.scheme == "http" and not self._allow_plain and not is_this_host(host):
            return "http tells every listener what is fetched; wanted https, or http allowed in the settings"
        return None


def is_listed(url: SplitResult, hosts: Sequence[str]) -> bool:
    """Whether the server of an address is one of `host` or `host:port`."""
    return url.hostname is not None and bool({url.hostname, f"{url.hostname}:{_port_of(url)}"} & set(hosts))


class _HttpConnection:
    """One connection with one request and its reply. `close` ends it in any state."""

    def __init__(
        self,
        clock: Clock,
        stall_s: float,
        deadline_s: float,
        stop: threading.Event,
        proxy: Proxy | None = None,
    ) -> None:
        self._proxy = proxy
        self._clock = clock
        self._stall_s = stall_s
        self._deadline_s = deadline_s
        self._head_end_s: float | None = clock.monotonic_s() + HEAD_S
        self._stop = stop
        self._socket: socket.socket | None = None
        self._spare_bytes = SPARE_BYTES

    def get(
        self, url: SplitResult, start_bytes: int, tls: ssl.SSLContext | None, more: Mapping[str, str]
    ) -> HTTPResponse:
        """Connect, send the request and read the headers. more: headers of the request. Raises DownloadError."""
        assert url.hostname is not None
        headers = {**more, "User-Agent": f"edge-runtime/{__version__}", "Connection": "close"}
        if start_bytes:
            headers["Range"] = f"bytes={start_bytes}-"
        try:
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            port = _port_of(url)
            proxy = self._proxy if self._proxy is not None and self._proxy.leads_to(url.hostname, port) else None
            self._socket = self._connect(*((url.hostname, port) if proxy is None else proxy[:2]))
            if proxy is not None and url.scheme == "http":
                target = f"http://{url.netloc}{target}"
            if url.scheme == "https":
                assert tls is not None
                if proxy is not None:
                    self._socket.settimeout(self.patience_s())
                    receive = partial(self.receive_into, self._socket)
                    open_tunnel(self._socket, url.hostname, port, receive)
                self._socket.settimeout(self.patience_s())
                self._socket = tls.wrap_socket(self._socket, server_hostname=url.hostname)
            connection = HTTPConnection(url.hostname, url.port)
            connection.sock = _TimedSocket(self._socket, self)
            connection.request("GET", target, headers=headers)
            reply = connection.getresponse()
            self._head_end_s = None
            return reply
        except (OSError, HTTPException, ValueError) as error:
            raise DownloadError(f"{url.geturl()}: {_reason(error)}") from error

    def patience_s(self) -> float:
        """Return how long the next wait may be. Raises TimeoutError: the deadline passed; OSError: the daemon stops."""
        if self._stop.is_set():
            raise OSError("the daemon stops")
        now_s = self._clock.monotonic_s()
        left_s = self._deadline_s - now_s
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        if self._head_end_s is not None:
            left_s = min(left_s, self._head_end_s - now_s)
            if left_s <= 0:
                raise TimeoutError(f"no headers within {HEAD_S:.0f} s; the deadline for them passed")
        return min(left_s, self._stall_s)

    def receive_into(self, source: socket.socket, buffer: WriteableBuffer) -> int:
        """Read the bytes there, looking now and then whether the daemon stops. Raises OSError, TimeoutError."""
        left_s = self.patience_s()
        while True:
            source.settimeout(min(left_s, LOOK_S))
            try:
                nbytes = source.recv_into(buffer)
            except TimeoutError:
                left_s = min(left_s - LOOK_S, self.patience_s())
                if left_s <= 0:
                    raise
                continue
            self.count_received(nbytes)
            return nbytes

    def count_received(self, nbytes: int) -> None:
        """Count received bytes of any kind. Raises OSError: too many of them are not the file's."""
        self._spare_bytes -= nbytes
        if self._spare_bytes < 0:
            raise OSError("the server sends much else than the file; the rest was not read")

    def count_body(self, nbytes: int) -> None:
        """Count received bytes of the file."""
        self._spare_bytes += 2 * nbytes

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self, host: str, port: int) -> socket.socket:
        """Connect as socket.create_connection does, with one deadline over all addresses of a name."""
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            candidate = socket.socket(family, kind, protocol)
            try:
                candidate.settimeout(self.patience_s())
                candidate.connect(address)
            except OSError as error:
                candidate.close()
                failure = error
            except BaseException:
                candidate.close()
                raise
            else:
                return candidate
        raise failure


class _TimedSocket:
    """The part of a socket that http.client needs; `_HttpConnection` limits each wait and closes the real one."""

    def __init__(self, real: socket.socket, connection: _HttpConnection) -> None:
        self._real = real
        self._connection = connection

    def sendall(self, data: bytes) -> None:
        self._real.settimeout(self._connection.patience_s())
        self._real.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._real, self._connection))

    def close(self) -> None:
        """Do nothing: http.client closes it after the headers, and the body is still to come."""


class _TimedReader(io.RawIOBase):
    def __init__(self, real: socket.socket, connection: _HttpConnection) -> None:
        self._real = real
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._connection.receive_into(self._real, buffer)


class _HttpBody:
    def __init__(self, url: str, connection: _HttpConnection, reply: HTTPResponse, start_bytes: int) -> None:
        self._url = url
        self._connection = connection
        self._reply = reply
        self._start_bytes = start_bytes
        self._missing_bytes = reply.length
        """None: the server did not say how long the file is."""

    @property
    def start_bytes(self) -> int:
        return self._start_bytes

    def read(self, limit: int) -> bytes:
        try:
            self._connection.patience_s()
            piece = self._reply.read1(limit)
        except (OSError, HTTPException, ValueError) as error:
            raise DownloadError(f"{self._url}: {_reason(error)}") from error
        self._connection.count_body(len(piece))
        if self._missing_bytes is not None:
            self._missing_bytes -= len(piece)
            if not piece and self._missing_bytes > 0:
                raise DownloadError(f"{self._url}: the connection ended {self._missing_bytes} bytes before the file")
        return piece


def _start_of(url: str, reply: HTTPResponse, asked_bytes: int) -> int:
    """Return the offset of a reply's first byte. Raises NotPublished and DownloadError."""
    if reply.status in _MISSING:
        or_closed = ", or the server lets nobody read it" if reply.status == _FORBIDDEN else ""
        raise NotPublished(f"{url}: {reply.status} {reply.reason}; the repository does not have it{or_closed}")
    if reply.status == _WHO_ASKS:
        raise LoginAsked(
            f"{url}: {reply.status} {reply.reason}; the server wants a login",
            reply.headers.get_all("WWW-Authenticate") or (),
        )
    if reply.status not in (_OK, _PARTIAL):
        raise DownloadError(f"{url}: {reply.status} {reply.reason}; wanted 200 or 206")
    if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise DownloadError(f"{url}: the server packed the file, which was not asked for; turn that off there")
    if reply.status == _OK:
        return 0
    given = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
    if given is None or int(given[1]) != asked_bytes or not asked_bytes:
        raise DownloadError(
            f"{url}: got the part {reply.headers.get('Content-Range')!r}, wanted the bytes from {asked_bytes} on"
        )
    return asked_bytes


def _port_of(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came in time ({error}); look at the link"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was not accepted: {error.verify_message}; look at this device's clock and authorities"
    return str(error) or type(error).__name__
