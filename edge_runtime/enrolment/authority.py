"""The authority of a fleet: a folder with its key, what new devices get, its tokens, and the devices that it knows.

Owns: who gets a certificate. A token's secret is kept as its hash; each use is counted in the transaction that notes
the device. A device's id that was given is not given again by a token for anybody, but a device that asks again with
the same token and the same key gets the same answer: the first may have been lost. Thread: any; one lock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from edge_runtime.durable import make_folder, read_kept, write_atomically
from edge_runtime.enrolment.certificates import (
    Certificate,
    Issuer,
    der,
    device_of,
    is_proved,
    key_hash,
    key_pem,
    new_authority,
    new_key,
    pem,
    read_certificate,
    read_key,
    read_request,
)
from edge_runtime.enrolment.messages import (
    DEVICE_RULE,
    SECRET_BYTES,
    Enrol,
    Enrolled,
    Renew,
    Renewed,
    Token,
    is_device_name,
    new_secret,
    secret_hash,
)
from edge_runtime.errors import ConfigError, Forbidden

MAX_FILE_BYTES = 1 << 20

GRACE = timedelta(days=30)
"""A device that was switched off may renew so long after its certificate ended."""

SERVER_DAYS = 825
"""What the strictest of the common TLS libraries takes from a private authority."""

_SCHEMA = """
create table if not exists tokens (
  hash text primary key, name text not null, grp text not null, device text not null, expires real not null,
  uses integer not null
);
create table if not exists devices (
  id text primary key, grp text not null, serial text not null, serial_before text not null, expires real not null,
  enrolled real not null, is_revoked integer not null
);
create table if not exists answers (
  id text primary key, token text not null, key text not null, certificate text not null
);
"""
"""answers: of each device the last one to `enrol`, for a device to which it did not come."""


class KnownDevice(NamedTuple):
    """A device that was enrolled. expires_utc: when its certificate ends."""

    device: str
    group: str
    expires_utc: datetime
    enrolled_utc: datetime
    is_revoked: bool


class AuthorityFolder:
    """The files of an authority."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.certificate, self.key = path / "authority.crt", path / "authority.key"
        self.server, self.server_key = path / "server.crt", path / "server.key"
        self.trusted, self.root, self.configuration = path / "trusted.crt", path / "1.root.json", path / "device.toml"
        self.devices = path / "devices.sqlite"

    def make(
        self,
        *,
        names: Sequence[str],
        root: bytes,
        configuration: str,
        issuer: tuple[bytes, bytes] | None,
        trusted: bytes | None,
        now_utc: datetime,
    ) -> None:
        """Make the folder. names: of the server. issuer: an authority's certificate and key that are there, in PEM.

        trusted: PEM of those that devices trust beside it, such as the broker's authority. Raises ConfigError: there is
        one already, or a file makes no sense. StorageFailed.
        """
        if self.key.exists():
            raise ConfigError(f"{self.path}: is an authority already; name another folder")
        if issuer is None:
            key = new_key()
            certificate = new_authority(key, now_utc)
        else:
            certificate, key = read_certificate(issuer[0], "--ca-cert"), read_key(issuer[1], "--ca-key")
        issues = Issuer(certificate, key)
        if trusted is not None:
            read_certificate(trusted, "--trust")
        make_folder(self.path)
        self.path.chmod(0o700)
        self._write_server(issues, names, now_utc)
        write_atomically(self.trusted, pem(certificate) + (trusted or b""))
        write_atomically(self.root, root)
        write_atomically(self.configuration, configuration.encode())
        write_atomically(self.certificate, pem(certificate))
        write_atomically(self.key, key_pem(key), mode=0o600)

    def certify_server(self, names: Sequence[str], place: Path, now_utc: datetime) -> None:
        """Write a key and a certificate for another server, such as the broker, into a folder."""
        key = new_key()
        certificate = self.issuer().for_server(names, key, now_utc, timedelta(days=SERVER_DAYS))
        write_atomically(place / "server.key", key_pem(key), mode=0o600)
        write_atomically(place / "server.crt", pem(certificate))
        write_atomically(place / "devices-ca.crt", self.read(self.certificate))

    def issuer(self) -> Issuer:
        """Return the authority's key with its certificate. Raises ConfigError: there is none."""
        return Issuer(
            read_certificate(self.read(self.certificate), str(self.certificate)),
            read_key(self.read(self.key), str(self.key)),
        )

    def read(self, file: Path) -> bytes:
        """Return a file. Raises ConfigError: this is not an authority's folder."""
        try:
            return read_kept(file, MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{file}: {error.strerror}; wanted the folder that `edge-runtime authority init DIR` made"
            ) from None

    def _write_server(self, issuer: Issuer, names: Sequence[str], now_utc: datetime) -> None:
        key = new_key()
        certificate = issuer.for_server(names, key, now_utc, timedelta(days=SERVER_DAYS))
        write_atomically(self.server_key, key_pem(key), mode=0o600)
        write_atomically(self.server, pem(certificate) + pem(issuer.certificate))


class Authority:
    """An authority at work. `close` at the end."""

    def __init__(
        self,
        folder: AuthorityFolder,
        *,
        life: timedelta = timedelta(days=90),
        now_utc: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """life: of a device's certificate. Raises ConfigError: the folder is not an authority's."""
        self.folder = folder
        self._life = life
        self._now_utc = now_utc
        self._issuer = folder.issuer()
        self._root = folder.read(folder.root)
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(folder.devices, check_same_thread=False, isolation_level=None)
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = full")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"{folder.devices}: {error}") from None

    def close(self) -> None:
        """Close the file of devices."""
        self._database.close()

    @property
    def certificate(self) -> bytes:
        """The authority's certificate as PEM."""
        return pem(self._issuer.certificate)

    def add_token(self, name: str, *, group: str, uses: int, days: float, device: str = "") -> Token:
        """Make a token. device: the only one that it is for, which may then be enrolled again; "" for any new one."""
        if device and not is_device_name(device):
            raise ConfigError(f"{device[:80]!r} cannot be a device's id; wanted {DEVICE_RULE}")
        secret = new_secret(os.urandom(SECRET_BYTES))
        expires = self._now_utc() + timedelta(days=days)
        with self._transaction() as database:
            database.execute("delete from tokens where expires < ?", (self._now_utc().timestamp(),))
            database.execute(
                "insert into tokens values (?, ?, ?, ?, ?, ?)",
                (secret_hash(secret), name, group, device, expires.timestamp(), uses),
            )
        authority = hashlib.sha256(der(self._issuer.certificate)).digest()
        return Token(secret, authority, hashlib.sha256(self._root).digest())

    def enrol(self, call: Enrol) -> Enrolled:
        """Give a new device what it needs. Raises Forbidden: not with this token. ConfigError: a bad request."""
        if not is_device_name(call.device):
            raise ConfigError(f"{call.device[:80]!r} cannot be a device's id; wanted {DEVICE_RULE}")
        now, token = self._now_utc(), secret_hash(call.secret)
        certificate = self._issuer.for_device(call.device, call.request.encode(), now, self._life)
        with self._transaction() as database:
            if (given := _given(database, call.device, token, certificate)) is not None:
                return self._enrolled(call.device, *given)
            row = database.execute("select grp, device, expires, uses from tokens where hash = ?", (token,)).fetchone()
            if row is None or row[2] < now.timestamp() or row[3] < 1:
                raise Forbidden("this token is not known here, has been used up, or has expired; make another one")
            group, bound = row[:2]
            if bound and bound != call.device:
                raise Forbidden(f"this token is for {bound} alone")
            known = database.execute("select 1 from devices where id = ?", (call.device,)).fetchone()
            if known is not None and not bound:
                raise Forbidden(
                    f"{call.device} is enrolled already; give this device another id, or make a token for it: "
                    f"`edge-runtime authority token --device {call.device}`"
                )
            database.execute("update tokens set uses = uses - 1 where hash = ?", (token,))
            database.execute(
                "insert or replace into devices values (?, ?, ?, '', ?, ?, 0)",
                (call.device, group, _serial(certificate), _ends(certificate), now.timestamp()),
            )
            text = pem(certificate).decode()
            database.execute(
                "insert or replace into answers values (?, ?, ?, ?)", (call.device, token, key_hash(certificate), text)
            )
        return self._enrolled(call.device, group, text)

    def renew(self, call: Renew) -> Renewed:
        """Give a device another certificate. Raises Forbidden: it may not have one. ConfigError: a bad request."""
        now = self._now_utc()
        old = read_certificate(call.certificate.encode(), "the certificate")
        device = device_of(old)
        request = read_request(call.request.encode(), device)
        try:
            signature = base64.b64decode(call.signature, validate=True)
        except binascii.Error:
            raise ConfigError("the signature is not in base64") from None
        if not (device and self._issuer.has_issued(old) and is_proved(old, request, signature)):
            raise Forbidden("that is not a certificate of this authority's, or not its owner who asks")
        if old.not_valid_after_utc + GRACE < now:
            raise Forbidden(f"the certificate ended more than {GRACE.days} days ago; enrol the device again")
        new = self._issuer.for_device(device, call.request.encode(), now, self._life)
        with self._transaction() as database:
            row = database.execute(
                "select serial, serial_before, is_revoked from devices where id = ?", (device,)
            ).fetchone()
            # Also the one before: the answer that brought the newest may have been lost.
            if row is None or row[2] or _serial(old) not in row[:2]:
                raise Forbidden(f"{device} was enrolled again since, or shut out; enrol it with a token of its own")
            database.execute(
                "update devices set serial = ?, serial_before = ?, expires = ? where id = ?",
                (_serial(new), _serial(old), _ends(new), device),
            )
        return Renewed(pem(new).decode(), self._trusted())

    def revoke(self, device: str) -> None:
        """Renew no certificate of a device any more. Raises ConfigError: it is not known."""
        with self._transaction() as database:
            if not database.execute("update devices set is_revoked = 1 where id = ?", (device,)).rowcount:
                raise ConfigError(f"{device[:80]!r} is not enrolled; `edge-runtime authority devices` lists those")

    def devices(self) -> list[KnownDevice]:
        """Return all devices, by id."""
        with self._lock:
            rows = self._database.execute("select id, grp, expires, enrolled, is_revoked from devices order by id")
            return [KnownDevice(row[0], row[1], _utc(row[2]), _utc(row[3]), bool(row[4])) for row in rows.fetchall()]

    # ---- private ----------------------------------------------------------------------------------------------------

    def _enrolled(self, device: str, group: str, certificate: str) -> Enrolled:
        configuration = self.folder.read(self.folder.configuration).decode()
        root = base64.b64encode(self._root).decode()
        return Enrolled(device, group, certificate, self._trusted(), configuration, root)

    def _trusted(self) -> str:
        return self.folder.read(self.folder.trusted).decode()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("begin immediate")
            try:
                yield self._database
            except BaseException:
                self._database.execute("rollback")
                raise
            self._database.execute("commit")


def _given(database: sqlite3.Connection, device: str, token: str, asked: Certificate) -> tuple[str, str] | None:
    """Return group and certificate that a device was given for the same token and key; None: nothing that still holds.

    asked: a certificate of the key that it asks with, which proved that it has it.
    """
    row = database.execute(
        "select devices.grp, answers.certificate, devices.serial from answers join devices using (id)"
        " where id = ? and token = ? and key = ? and not is_revoked",
        (device, token, key_hash(asked)),
    ).fetchone()
    if row is None or _serial(read_certificate(row[1].encode(), "a certificate that was given")) != row[2]:
        return None
    return row[0], row[1]


def _serial(certificate: Certificate) -> str:
    return f"{certificate.serial_number:x}"


def _ends(certificate: Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _utc(stamp: float) -> datetime:
    return datetime.fromtimestamp(stamp, timezone.utc)
