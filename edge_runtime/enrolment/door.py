"""Renews the certificate of a device before its end, without a restart: the MQTT door reads it for each connection.

A door without an address: it is what the daemon opens and closes with `[enrolment]`. One thread, which waits most of
its life. A renewal that fails is tried again, and told in `stats` and as a metric.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_runtime.addresses import Proxy, read_proxy
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.enrolment.device import AuthorityLink, Identity, renew, renewal_due_s
from edge_runtime.enrolment.settings import EnrolmentSettings
from edge_runtime.errors import EdgeRuntimeError

log = logging.getLogger(__name__)

SPREAD = 0.2
"""Share by which a wait after a failure is longer or shorter, so that a fleet spreads."""

MOST_WAIT_S = 3600.0
"""Between two looks at the certificate: a wall clock may be set meanwhile."""

MOST_RETRY_S = 86_400.0
"""Between two tries, which wait twice as long each time: an authority may be away for weeks."""

LEAST_TRIES = 16
"""So many are left at least before the certificate's end, where there is time for them."""

CLOSE_S = 2.0
"""How long the end of a renewal is waited for: its connection is ended first."""


def open_door(context: DoorContext) -> EnrolmentDoor:
    """Return the door of `[enrolment]`. Raises ConfigError: the device has no certificate."""
    config = context.config
    proxy = read_proxy(config.proxy, config.no_proxy)
    door = EnrolmentDoor(context.settings("enrolment"), context.core.clock, proxy=proxy)
    context.core.metrics.watch("certificate_left_seconds", door.left_s)
    return door


class EnrolmentDoor:
    """Renews one device's certificate."""

    def __init__(
        self,
        settings: EnrolmentSettings,
        clock: Clock | None = None,
        *,
        now_utc: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        proxy: Proxy | None = None,
    ) -> None:
        """now_utc: the device's wall clock, which may be wrong. proxy: to the authority.

        Raises ConfigError: there is no certificate.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._now_utc = now_utc
        self._link = AuthorityLink(proxy)
        self._failures = 0
        self._next_s = -math.inf
        self._identity = Identity(Path(settings.identity))
        self._certificate = self._identity.certificate()
        self._stop = threading.Event()
        self._reason = ""
        self._renewals = 0
        self._thread = threading.Thread(target=self._run, name="edge-enrolment", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def ready(self) -> None:
        """Nothing: a certificate may be needed before the models are there."""

    def reload(self) -> None:
        """Nothing: the certificate's file is read again before each renewal."""

    def stop_admitting(self, limit_s: float) -> None:  # noqa: ARG002 (nothing is asked here)
        """Renew nothing more."""
        self._stop.set()

    def close(self) -> None:
        """End a renewal under way, and wait for it, CLOSE_S at most. Idempotent."""
        self._stop.set()
        self._link.end()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def left_s(self) -> float:
        """Return how long the certificate is good. Thread: any."""
        return renewal_due_s(self._certificate, 1.0, self._now_utc)

    def status(self) -> Mapping[str, Any]:
        """The part of `stats`."""
        return {
            "enrolment": {
                "authority": self._settings.url,
                "ends_utc": f"{self._certificate.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}",
                "renewals": self._renewals,
                "reason": self._reason,
            }
        }

    def wait_s(self) -> float:
        """Return the time until the next look or try. Thread: any."""
        wait_s = renewal_due_s(self._certificate, self._settings.renew_at, self._now_utc)
        return min(max(wait_s, self._next_s - self._clock.monotonic_s()), MOST_WAIT_S)

    def look(self) -> None:
        """Renew the certificate if that is due, and not sooner after the last try than it may be. Never raises."""
        if self.wait_s() > 0:
            return
        try:
            self._certificate = renew(self._settings.url, self._identity, self._link)
            self._renewals += 1
            ends = f"{self._certificate.not_valid_after_utc:%Y-%m-%d}"
            log.info("this device's certificate was renewed", extra={"ends": ends})
            self._note(self._why_due_again())
        except EdgeRuntimeError as error:
            self._note(error.message)
        except Exception as error:
            log.exception("a renewal failed as no code expects")
            self._note(f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._stop.wait(self.wait_s()):
            self.look()

    def _why_due_again(self) -> str:
        """Return why a new certificate is due already; "" where it is not."""
        if renewal_due_s(self._certificate, self._settings.renew_at, self._now_utc):
            return ""
        begins = f"{self._certificate.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
        return f"by this device's clock the new certificate, good from {begins}, is old already; set the clock"

    def _note(self, reason: str) -> None:
        """Note how a try ended, and when the next one may be. reason: why it must be made again; "" for none."""
        self._reason = reason
        self._failures = self._failures + 1 if reason else 0
        left_s = self.left_s()
        wait_s = retry_wait_s(self._settings.retry_s, self._failures, left_s)
        spread = random.uniform(1 - SPREAD, 1 + SPREAD)  # noqa: S311 (a wait)
        self._next_s = self._clock.monotonic_s() + wait_s * spread
        if reason and not self._stop.is_set():
            extra = {"reason": reason, "left_s": round(left_s), "again_s": round(wait_s)}
            log.warning("this device's certificate is not renewed", extra=extra)


def retry_wait_s(retry_s: float, failures: int, left_s: float) -> float:
    """Return the time between two tries after a number of failures in a row. left_s: of the certificate. Pure."""
    doubled_s = min(retry_s * 2.0 ** min(max(failures - 1, 0), 30), MOST_RETRY_S, left_s / LEAST_TRIES)
    return max(doubled_s, retry_s)
