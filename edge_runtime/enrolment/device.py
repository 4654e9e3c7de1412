"""The device's side: it asks an authority for its certificate and all else, and later for another certificate.

Owns: whom it believes (the fingerprint in the token, then the authorities that it was given), and the files of its
identity: `device.pem`, certificate and key in one file so that no power cut parts them, and `ca.crt`. Thread: one
owner.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import ssl
from collections.abc import Callable
from datetime import datetime, timezone
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edge_runtime.durable import make_folder, read_kept, write_atomically
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

PATIENCE_S = 30.0
"""For each wait of a connection."""

KEY_MODE = 0o600
MAX_IDENTITY_BYTES = 1 << 18

PLACES = ("@DEVICE@", "@GROUP@", "@IDENTITY@", "@ROOT_FILE@", "@ENROLMENT_URL@")
"""What a configuration's template may name."""


class Identity:
    """The files of a device's identity, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device, self.trusted, self.root = folder / "device.pem", folder / "ca.crt", folder / "1.root.json"

    def certificate(self) -> Certificate:
        """Return the device's certificate. Raises ConfigError: there is none."""
        return read_certificate(self._read(self.device), str(self.device))

    def write(self, certificate: str, key: bytes, trusted: str) -> None:
        """Write the certificate with its key, and whom the device trusts. Raises ConfigError, StorageFailed."""
        read_certificate(certificate.encode(), "the authority's answer")
        _trusting(trusted.encode())
        make_folder(self.folder)
        owner = self.folder.parent.stat()
        write_atomically(self.trusted, trusted.encode())
        write_atomically(self.device, certificate.encode() + key, mode=KEY_MODE)
        self.give(owner.st_uid, owner.st_gid)

    def give(self, user: int, group: int) -> None:
        """Let who owns the state read it, where root has made it."""
        if os.geteuid() == 0 and user:
            for path in (self.folder, self.device, self.trusted, self.root):
                with contextlib.suppress(FileNotFoundError):
                    os.chown(path, user, group)

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
            return read_kept(file, MAX_IDENTITY_BYTES)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; `edge-runtime enroll` makes it") from None


def enrol(url: str, token: Token, device: str, identity: Identity) -> Enrolled:
    """Ask an authority for all that a new device needs, and write its identity. Returns the answer.

    Raises ConfigError: the address makes no sense; DownloadError: it cannot be reached, or refuses; TrustError: it is
    another authority, or has another root, than the token says; StorageFailed.
    """
    authority = read_certificate(_ask(url, CA_PATH, None, _trusting_nobody()), url)
    if hashlib.sha256(der(authority)).digest() != token.authority:
        raise TrustError(
            f"{url} is not the authority that made this token: its certificate has another fingerprint; "
            "nothing was said to it"
        )
    key = new_key()
    asked = Enrol(token.secret, device, signing_request(device, key).decode())
    # Invariant: only the certificate whose fingerprint was compared is trusted, whatever else came with it.
    answer: Enrolled = _decoded(_ask(url, ENROL_PATH, asked, _trusting(pem(authority))), Enrolled, url)
    try:
        root = base64.b64decode(answer.root, validate=True)
    except binascii.Error:
        root = b""
    if hashlib.sha256(root).digest() != token.root:
        raise TrustError(f"{url} gives another root file than the token says; make tokens anew after root changed")
    if answer.device != device or not _is_for(read_certificate(answer.certificate.encode(), url), device, key):
        raise TrustError(f"{url} gives a certificate for another device than {device}, or for another key")
    make_folder(identity.folder)
    write_atomically(identity.root, root)
    identity.write(answer.certificate, key_pem(key), answer.trusted)
    return answer


def renew(url: str, identity: Identity) -> Certificate:
    """Replace the device's certificate and key by new ones. Returns the certificate.

    Raises as `enrol`; the old ones are untouched then.
    """
    key, asked = identity.renewal()
    trusted = identity._read(identity.trusted)  # noqa: SLF001 (of this module)
    answer: Renewed = _decoded(_ask(url, RENEW_PATH, asked, _trusting(trusted)), Renewed, url)
    new = read_certificate(answer.certificate.encode(), url)
    if not _is_for(new, device_of(identity.certificate()), key):
        raise TrustError(f"{url} gives a certificate for another device, or for another key")
    identity.write(answer.certificate, key_pem(key), answer.trusted)
    return new


def filled(template: str, enrolled: Enrolled, identity: Identity, url: str) -> str:
    """Return a device's configuration: the authority's template with what only the device knows."""
    values = (enrolled.device, enrolled.group, str(identity.folder), str(identity.root), url)
    for place, value in zip(PLACES, values, strict=True):
        template = template.replace(place, json.dumps(value)[1:-1])
    return template


def renewal_due_s(certificate: Certificate, share: float, now: Callable[[], datetime] | None = None) -> float:
    """Return the seconds until a share of a certificate's life is over; 0 when it is."""
    now_utc = datetime.now(timezone.utc) if now is None else now()
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return max((begins + (ends - begins) * share - now_utc).total_seconds(), 0.0)


# ---- private --------------------------------------------------------------------------------------------------------


def _ask(url: str, path: str, body: Any, tls: ssl.SSLContext) -> bytes:
    """Return the answer to one request. Raises DownloadError, which has the server's reason."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 443
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if parts.scheme != "https" or not host or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{url[:200]!r} is not an authority's address; wanted https://HOST[:PORT]")
    connection = HTTPSConnection(host, port, timeout=PATIENCE_S, context=tls)
    try:
        where = parts.path.rstrip("/") + path
        data = None if body is None else msgspec.json.encode(body)
        connection.request("GET" if data is None else "POST", where, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = reply.read(MAX_ANSWER_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise DownloadError(f"{url}: {error}") from error
    finally:
        connection.close()
    if len(answer) > MAX_ANSWER_BYTES:
        raise DownloadError(f"{url}: answers more than {MAX_ANSWER_BYTES} bytes; it is not an authority's server")
    if reply.status != 200:
        raise DownloadError(f"{url}: {_reason(answer, reply.status)}")
    return answer


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
