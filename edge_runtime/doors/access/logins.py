"""Browsers that logged in with a token: the cookie that each has, and which token it stands for.

Owns: the cookies under way, in memory alone, so that they end with the process. A cookie is a random number that says
nothing; its login ends by time, at a logout, and when the token is withdrawn. Made by who shows a page to browsers.
"""

from __future__ import annotations

import secrets
import threading
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie

from msgspec import Struct

from edge_runtime.clock import Clock

COOKIE = "edge_page"

LOGIN_S = 8 * 3600.0
"""A working day. After it a browser has to show the token again."""

MOST_LOGINS = 256
"""At once; one more ends the oldest. Whoever logs in has a token."""

_BYTES = 32


class _Login(Struct, frozen=True):
    """One login. token: the SHA-256 of its token."""

    token: str
    until_s: float


class Logins:
    """The browsers that are logged in. Thread: any."""

    def __init__(self, clock: Clock) -> None:
        self._monotonic_s = clock.monotonic_s
        self._lock = threading.Lock()
        self._logins: dict[str, _Login] = {}  # by the SHA-256 of the cookie: a look-up tells nothing of it

    def begin(self, token: str, *, is_tls: bool) -> str:
        """Log a browser in with a token, given as its SHA-256. Return the value of `Set-Cookie`."""
        value = secrets.token_urlsafe(_BYTES)
        with self._lock:
            while len(self._logins) >= MOST_LOGINS:
                del self._logins[next(iter(self._logins))]
            self._logins[_digest(value)] = _Login(token, self._monotonic_s() + LOGIN_S)
        return _cookie(value, LOGIN_S, is_tls=is_tls)

    def token_of(self, cookies: str) -> str | None:
        """Return the SHA-256 of the token that a browser logged in with. cookies: the header `Cookie`."""
        value = _value_of(cookies)
        login = None if value is None else self._logins.get(_digest(value))
        return None if login is None or login.until_s <= self._monotonic_s() else login.token

    def end(self, cookies: str, *, is_tls: bool) -> str:
        """Log a browser out. Return the value of `Set-Cookie` that takes the cookie from it."""
        value = _value_of(cookies)
        if value is not None:
            with self._lock:
                self._logins.pop(_digest(value), None)
        return _cookie("", 0.0, is_tls=is_tls)

    def drop_expired(self) -> bool:
        """Forget the logins whose time is over; whether there were any."""
        now_s = self._monotonic_s()
        with self._lock:
            expired = [key for key, login in self._logins.items() if login.until_s <= now_s]
            for key in expired:
                del self._logins[key]
        return bool(expired)


def _cookie(value: str, age_s: float, *, is_tls: bool) -> str:
    secure = "; Secure" if is_tls else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={age_s:.0f}; HttpOnly; SameSite=Strict{secure}"


def _value_of(cookies: str) -> str | None:
    try:
        found = SimpleCookie(cookies).get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None and found.value else None


def _digest(value: str) -> str:
    return sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
