"""CURVE, the encryption of ZMTP, as a server speaks it: rfc.zeromq.org/spec/26, with PyNaCl (extra `curve`).

Owns: the handshake HELLO, WELCOME, INITIATE, READY, whose client is admitted by its public key, and the boxes of
messages. Imported only where an endpoint has keys. Thread: I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from nacl.bindings import (
    crypto_box,
    crypto_box_afternm,
    crypto_box_beforenm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_afternm,
    crypto_scalarmult_base,
    crypto_secretbox,
    crypto_secretbox_open,
)
from nacl.exceptions import CryptoError
from nacl.utils import random

from edge_runtime.doors.zmq.zmtp import (
    COMMAND,
    MORE,
    OURS,
    ZmtpError,
    check_peer,
    command,
    frame_head,
    read_properties,
)

KEY_BYTES = 32

_HELLO_BYTES, _INITIATE_BYTES = 194, 96 + 8 + 16 + 128
"""Without their names; INITIATE has properties behind."""

_MESSAGE = b"\x07MESSAGE"
_COMMAND_INSIDE = 2


class CurveHandshake:
    """The handshake of one connection.

    secret: the server's key. is_admitted: whether a client's public key is on the list.
    """

    name = b"CURVE"
    has_server = True

    def __init__(self, secret: bytes, is_admitted: Callable[[bytes], bool]) -> None:
        self.identity: bytes | None = None
        self.sealing: CurveSealing | None = None
        self._secret = secret
        self._is_admitted = is_admitted
        self._client = b""
        self._own_public = self._own_secret = self._cookie_key = b""

    def begin(self) -> bytes:
        """Wait for HELLO."""
        return b""

    def take(self, name: bytes, body: bytes) -> bytes:
        """Take HELLO or INITIATE."""
        try:
            if name == b"HELLO" and not self._client:
                return self._welcome(body)
            if name == b"INITIATE" and self._client:
                return self._ready(body)
        except CryptoError:
            raise ZmtpError(f"a box of {name.decode('ascii')} that does not open: another server's key?") from None
        raise ZmtpError(f"{name[:20].decode('ascii', 'replace')} at the wrong moment")

    def _welcome(self, body: bytes) -> bytes:
        if len(body) != _HELLO_BYTES or body[:2] != b"\x01\x00":
            raise ZmtpError("a HELLO of another version")
        client, nonce, box = body[74:106], body[106:114], body[114:]
        if crypto_box_open(box, b"CurveZMQHELLO---" + nonce, client, self._secret) != bytes(64):
            raise ZmtpError("a HELLO with something inside")
        self._client = client
        self._own_public, self._own_secret = crypto_box_keypair()
        self._cookie_key = random(KEY_BYTES)
        cookie_nonce, welcome_nonce = random(16), random(16)
        cookie = crypto_secretbox(client + self._own_secret, b"COOKIE--" + cookie_nonce, self._cookie_key)
        inside = self._own_public + cookie_nonce + cookie
        return command(
            b"WELCOME",
            welcome_nonce + crypto_box(inside, b"WELCOME-" + welcome_nonce, client, self._secret),
        )

    def _ready(self, body: bytes) -> bytes:
        if len(body) < _INITIATE_BYTES:
            raise ZmtpError("a short INITIATE")
        cookie_nonce, cookie, nonce, box = body[:16], body[16:96], body[96:104], body[104:]
        kept = crypto_secretbox_open(cookie, b"COOKIE--" + cookie_nonce, self._cookie_key)
        if kept != self._client + self._own_secret:
            raise ZmtpError("the cookie of another connection")
        shared = crypto_box_beforenm(self._client, self._own_secret)
        inside = crypto_box_open_afternm(box, b"CurveZMQINITIATE" + nonce, shared)
        public, vouch_nonce, vouch = inside[:32], inside[32:48], inside[48:128]
        vouched = crypto_box_open(vouch, b"VOUCH---" + vouch_nonce, public, self._own_secret)
        if vouched != self._client + crypto_scalarmult_base(self._secret):
            raise ZmtpError("a vouch for another connection")
        if not self._is_admitted(public):
            raise ZmtpError("a key that is not on the list", command(b"ERROR", b"\x03400"))
        self.sealing = CurveSealing(shared, int.from_bytes(nonce, "big"))
        self.identity = check_peer(read_properties(inside[128:]))
        count = self.sealing.count()
        return command(b"READY", count + crypto_box_afternm(OURS, b"CurveZMQREADY---" + count, shared))


class CurveSealing:
    """The boxes of one connection. Nonces count up, so that no box can be sent again or left out."""

    def __init__(self, shared: bytes, last: int) -> None:
        """last: the client's last nonce."""
        self._shared = shared
        self._last = last
        self._own = 0

    def count(self) -> bytes:
        """Return the next nonce of ours."""
        self._own += 1
        return struct.pack(">Q", self._own)

    def seal(self, frames: Sequence[Any]) -> list[Any]:
        """Return a message's parts: each frame in a box, with its flags inside."""
        *first, last = frames
        return [part for frame in first for part in self._box(MORE, frame)] + self._box(0, last)

    def seal_command(self, body: bytes) -> list[Any]:
        """Return the parts of a command: its name and the rest, in a box."""
        return self._box(_COMMAND_INSIDE, body)

    def _box(self, flags: int, frame: Any) -> list[bytes]:
        nonce = self.count()
        box = crypto_box_afternm(bytes((flags,)) + bytes(frame), b"CurveZMQMESSAGES" + nonce, self._shared)
        return [frame_head(0, len(_MESSAGE) + len(nonce) + len(box)) + _MESSAGE + nonce, box]

    def open(self, frame: bytes) -> tuple[int, bytes]:
        """Return flags and bytes of a boxed frame. Raises ZmtpError."""
        nonce = frame[8:16]
        number = int.from_bytes(nonce, "big")
        if not frame.startswith(_MESSAGE) or len(frame) < 33 or number <= self._last:
            raise ZmtpError("no box, or one that came before")
        self._last = number
        try:
            inside = crypto_box_open_afternm(frame[16:], b"CurveZMQMESSAGEC" + nonce, self._shared)
        except CryptoError:
            raise ZmtpError("a box that does not open") from None
        return (inside[0] & MORE) | (COMMAND if inside[0] & _COMMAND_INSIDE else 0), inside[1:]
