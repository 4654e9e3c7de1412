"""The device's side: it asks an authority for its certificate and all else, and later for another certificate.

Owns: whom it believes (the fingerprint in the token, then the authorities that it was given), and the files of its
identity: `device.pem`, certificate and key in one file so that no power cut parts them, `ca.crt`, and `enrolling.pem`,
the key that it enrols with until all is written. Thread: one owner.

Decision: whose the files are, where root enrols a device.
Context: the daemon's user owns the folder of its state, and may have made links there. Root would follow them.
Options: refuse links (each look may be outrun); write by folder descriptors; write as the user who owns the folder.
Decision: the identity is written as that user, so that a link leads nowhere that it could not write to itself. The root
file and the configuration lie beside each other in a folder of root's, since who can write them decides what is run.
Cost: the process has another user's rights for the moment of each write, so only a program of one thread may do it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edge_runtime.addresses import Proxy, open_tunnel
from edge_runtime.durable import read_kept, write_atomically
from edge_runtime.enrolment.certificates import (
    Certificate,
    PrivateKey,
    der,
    device_of,
    key_pem,
    new_key,
    pem,
    proof,
    read_certificate,
    read_key,
    signing_request,
)
from edge_runtime.enrolment.messages import (
    CA_PATH,
    ENROL_PATH,
    MAX_ANSWER_BYTES,
    RENEW_PATH,
    Enrol,
    Enrolled,
    Renew,
    Renewed,
    Token,
)
from edge_runtime.errors import ConfigError, DownloadError, TrustError
from edge_runtime.timed_answer import TimedAnswer

QUESTION_S = 30.0
"""For a question and its whole answer, however steadily bytes drip."""

KEY_MODE = 0o600
MAX_IDENTITY_BYTES = 1 << 18

PLACES = ("@DEVICE@", "@GROUP@", "@IDENTITY@", "@ROOT_FILE@", "@ENROLMENT_URL@")
"""What a configuration's template may name."""


class Identity:
    """The files of a device's identity, in one folder. as_owner: root reads and writes them as the folder's owner."""

    def __init__(self, folder: Path, *, as_owner: bool = False) -> None:
        self.folder = folder
        self.device, self.trusted, self.enrolling = folder / "device.pem", folder / "ca.crt", folder / "enrolling.pem"
        self._owner = owner_of(folder) if as_owner and os.geteuid() == 0 else (0, 0)

    def certificate(self) -> Certificate:
        """Return the device's certificate. Raises ConfigError: there is none."""
        return read_certificate(self._read(self.device), str(self.device))

    def write(self, certificate: str, key: bytes, trusted: str) -> None:
        """Write the certificate with its key, and whom the device trusts. Raises ConfigError, StorageFailed."""
        read_certificate(certificate.encode(), "the authority's answer")
        _trusting(trusted.encode())
        with self._acting():
            write_atomically(self.trusted, trusted.encode())
            write_atomically(self.device, certificate.encode() + key, mode=KEY_MODE)

    def enrolling_key(self) -> PrivateKey:
        """Return the key to enrol with: the one of a try that did not end, else a new one. Raises StorageFailed.

        Invariant: it is on the disk before the authority hears of it, so that a try whose answer was lost is repeated.
        """
        with self._acting():
            with contextlib.suppress(OSError, ConfigError):
                return read_key(read_kept(self.enrolling, MAX_IDENTITY_BYTES), str(self.enrolling))
            key = new_key()
            write_atomically(self.enrolling, key_pem(key), mode=KEY_MODE)
        return key

    def forget_enrolling(self) -> None:
        """Drop the key to enrol with: all is written. Raises OSError."""
        with self._acting():
            self.enrolling.unlink(missing_ok=True)

    def renewal(self) -> tuple[PrivateKey, Renew]:
        """Return a new key, and the request for a certificate of it."""
        data = self._read(self.device)
        old, key = read_certificate(data, str(self.device)), read_key(data, str(self.device))
        new = new_key()
        request = signing_request(device_of(old), new)
        signature = base64.b64encode(proof(old, key, request)).decode()
        certificate = data[: data.index(b"-----BEGIN PRIVATE KEY-----")].decode()
        return new, Renew(certificate, request.decode(), signature)

    def _read(self, file: Path) -> bytes:
        try:
            with self._acting():
                return read_kept(file, MAX_IDENTITY_BYTES)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; `edge-runtime enroll` makes it") from None

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """Have the rights of the folder's owner and no more, where root is to write there."""
        user, group = self._owner
        if not user:
            yield
            return
        groups = os.getgroups()
        try:
            os.setgroups([])
            os.setegid(group)
            os.seteuid(user)
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)


def owner_of(path: Path) -> tuple[int, int]:
    """Return user and group of the first part of a path that root does not own; (0, 0): root owns all that is there.

    That user decides where all below it leads. Raises ConfigError: it cannot be looked at.
    """
    absolute = path.absolute()
    for place in (*reversed(absolute.parents), absolute):
        try:
            found = (place.lstat(), place.stat())
        except FileNotFoundError:
            break
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror}; wanted a folder, or none yet") from None
        for status in found:
            if status.st_uid:
                return status.st_uid, status.st_gid
    return 0, 0


class AuthorityLink:
    """The way to an authority's server, for one question at a time. proxy: by which it leads. `end`: any thread."""

    def __init__(self, proxy: Proxy | None = None) -> None:
        self._proxy = proxy
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_ended = False
        self._end_s = 0.0

    def end(self) -> None:
        """End the question under way, and refuse all after it."""
        with self._lock:
            self._is_ended = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def ask(self, url: str, path: str, body: Any, tls: ssl.SSLContext) -> bytes:
        """Return the answer to one question, within QUESTION_S. Raises DownloadError, which has the server's reason."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 443
        except ValueError:
            host, port, parts = None, 0, urlsplit("")
        if parts.scheme != "https" or not host or "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"{url[:200]!r} is not an authority's address; wanted https://HOST[:PORT]")
        data = None if body is None else msgspec.json.encode(body)
        connection = HTTPConnection(host, port)  # over TLS of our own: HTTPSConnection reads the system's authorities
        self._end_s = time.monotonic() + QUESTION_S
        try:
            self._connect(host, port, tls)
            connection.sock = self._socket
            connection.response_class = partial(TimedAnswer, left_s=self.left_s)  # type: ignore[assignment]
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("GET" if data is None else "POST", parts.path.rstrip("/") + path, data, headers)
            reply = connection.getresponse()
            answer = reply.read(MAX_ANSWER_BYTES + 1)
        except (OSError, HTTPException, ValueError) as error:
            raise DownloadError(f"{url}: {error}") from error
        finally:
            connection.close()
            self._drop()
        if len(answer) > MAX_ANSWER_BYTES:
            raise DownloadError(f"{url}: answers more than {MAX_ANSWER_BYTES} bytes; it is not an authority's server")
        if reply.status != 200:
            raise DownloadError(f"{url}: {_reason(answer, reply.status)}")
        return answer

    def left_s(self) -> float:
        """Return how long the next wait may be. Raises OSError: none."""
        left_s = self._end_s - time.monotonic()
        if self._is_ended or left_s <= 0:
            raise OSError("the daemon stops" if self._is_ended else f"no whole answer within {QUESTION_S:.0f} s")
        return left_s

    def _connect(self, host: str, port: int, tls: ssl.SSLContext) -> None:
        """Connect, through the proxy where it leads there, and shake hands. Raises OSError."""
        proxy = self._proxy if self._proxy is not None and self._proxy.leads_to(host, port) else None
        there = self._connected(*((host, port) if proxy is None else proxy[:2]))
        if proxy is not None:
            open_tunnel(there, host, port, partial(self._receive_into, there))
        secure = tls.wrap_socket(there, server_hostname=host, do_handshake_on_connect=False)
        self._keep(secure)
        secure.do_handshake()

    def _connected(self, host: str, port: int) -> socket.socket:
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            there = socket.socket(family, kind, protocol)
            self._keep(there)
            try:
                there.connect(address)
            except OSError as error:
                self._drop()
                failure = error
            else:
                return there
        raise failure

    def _receive_into(self, there: socket.socket, buffer: bytearray) -> int:
        there.settimeout(self.left_s())
        return there.recv_into(buffer)

    def _keep(self, there: socket.socket) -> None:
        """Let `end` reach a socket."""
        with self._lock:
            self._socket = there
        there.settimeout(self.left_s())

    def _drop(self) -> None:
        with self._lock:
            there, self._socket = self._socket, None
        if there is not None:
            there.close()


def enrol(url: str, token: Token, device: str, identity: Identity, link: AuthorityLink | None = None) -> Enrolled:
    """Ask an authority for all that a new device needs, and write its identity. Returns the answer, root file included.

    A try that did not end is repeated with the same key, and so gets the same certificate, until
    `identity.forget_enrolling`. Raises ConfigError: the address makes no sense; DownloadError: it cannot be reached, or
    refuses; TrustError: it is another authority, or has another root, than the token says; StorageFailed.
    """
    link = link or AuthorityLink()
    authority = read_certificate(link.ask(url, CA_PATH, None, _trusting_nobody()), url)
    if hashlib.sha256(der(authority)).digest() != token.authority:
        raise TrustError(
            f"{url} is not the authority that made this token: its certificate has another fingerprint; "
            "nothing was said to it"
        )
    key = identity.enrolling_key()
    asked = Enrol(token.secret, device, signing_request(device, key).decode())
    # Invariant: only the certificate whose fingerprint was compared is trusted, whatever else came with it.
    answer: Enrolled = _decoded(link.ask(url, ENROL_PATH, asked, _trusting(pem(authority))), Enrolled, url)
    if hashlib.sha256(root_bytes(answer)).digest() != token.root:
        raise TrustError(f"{url} gives another root file than the token says; make tokens anew after root changed")
    if answer.device != device or not _is_for(read_certificate(answer.certificate.encode(), url), device, key):
        raise TrustError(f"{url} gives a certificate for another device than {device}, or for another key")
    identity.write(answer.certificate, key_pem(key), answer.trusted)
    return answer


def renew(url: str, identity: Identity, link: AuthorityLink | None = None) -> Certificate:
    """Replace the device's certificate and key by new ones. Returns the certificate.

    Raises as `enrol`; the old ones are untouched then.
    """
    key, asked = identity.renewal()
    trusted = identity._read(identity.trusted)  # noqa: SLF001 (of this module)
    link = link or AuthorityLink()
    answer: Renewed = _decoded(link.ask(url, RENEW_PATH, asked, _trusting(trusted)), Renewed, url)
    new = read_certificate(answer.certificate.encode(), url)
    if not _is_for(new, device_of(identity.certificate()), key):
        raise TrustError(f"{url} gives a certificate for another device, or for another key")
    identity.write(answer.certificate, key_pem(key), answer.trusted)
    return new


def root_bytes(enrolled: Enrolled) -> bytes:
    """Return the root file of an answer; b"" where it has none that can be read."""
    try:
        return base64.b64decode(enrolled.root, validate=True)
    except (binascii.Error, ValueError):
        return b""


def filled(template: str, enrolled: Enrolled, identity: Identity, root: Path, url: str) -> str:
    """Return a device's configuration: the authority's template with what only the device knows. root: the file."""
    values = (enrolled.device, enrolled.group, str(identity.folder), str(root), url)
    for place, value in zip(PLACES, values, strict=True):
        template = template.replace(place, json.dumps(value)[1:-1])
    return template


def renewal_due_s(certificate: Certificate, share: float, now: Callable[[], datetime] | None = None) -> float:
    """Return the seconds until a share of a certificate's life is over; 0 when it is."""
    now_utc = datetime.now(timezone.utc) if now is None else now()
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return max((begins + (ends - begins) * share - now_utc).total_seconds(), 0.0)


# ---- private --------------------------------------------------------------------------------------------------------


def _reason(answer: bytes, status: int) -> str:
    try:
        said = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return f"answers with status {status}; wanted the server of `edge-runtime authority serve`"
    return str(said)[:500]


def _decoded(data: bytes, kind: Any, url: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DownloadError(f"{url}: answers what makes no sense: {error}") from error


def _is_for(certificate: Certificate, device: str, key: PrivateKey) -> bool:
    return device_of(certificate) == device and certificate.public_key() == key.public_key()


def _trusting(authorities: bytes) -> ssl.SSLContext:
    """authorities: PEM, one at least: without any, the operating system's would be trusted."""
    read_certificate(authorities, "whom this device trusts")
    try:
        # Bundles have names of authorities in any letters between their certificates.
        return ssl.create_default_context(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"whom this device trusts cannot be read: {error}") from None


def _trusting_nobody() -> ssl.SSLContext:
    """For what is compared with a fingerprint afterwards, and before which no secret is said."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    return tls
