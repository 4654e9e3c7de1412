"""Renews the certificate of a device before its end, without a restart: the MQTT door reads it for each connection.

A door without an address: it is what the daemon opens and closes with `[enrolment]`. One thread, which waits most of
its life. A renewal that fails is tried again, and told in `stats` and as a metric.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.enrolment.device import Identity, renew, renewal_due_s
from edge_runtime.enrolment.settings import EnrolmentSettings
from edge_runtime.errors import EdgeRuntimeError

log = logging.getLogger(__name__)

SPREAD = 0.2
"""Share by which a wait after a failure is longer or shorter, so that a fleet spreads."""

MOST_WAIT_S = 86_400.0
"""Between two looks at the certificate: a wall clock may be set meanwhile."""


def open_door(context: DoorContext) -> EnrolmentDoor:
    """Return the door of `[enrolment]`. Raises ConfigError: the device has no certificate."""
    door = EnrolmentDoor(context.settings("enrolment"))
    context.core.metrics.watch("certificate_left_seconds", door.left_s)
    return door


class EnrolmentDoor:
    """Renews one device's certificate."""

    def __init__(self, settings: EnrolmentSettings) -> None:
        self._settings = settings
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
        """Wait for the end of a renewal under way. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def left_s(self) -> float:
        """Return how long the certificate is good. Thread: any."""
        return renewal_due_s(self._certificate, 1.0)

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

    def _run(self) -> None:
        while not self._stop.wait(min(self._wait_s(), MOST_WAIT_S)):
            if renewal_due_s(self._certificate, self._settings.renew_at) > 0:
                continue
            try:
                self._certificate = renew(self._settings.url, self._identity)
                self._renewals += 1
                self._reason = ""
                ends = f"{self._certificate.not_valid_after_utc:%Y-%m-%d}"
                log.info("this device's certificate was renewed", extra={"ends": ends})
            except EdgeRuntimeError as error:
                self._tell(error.message)
            except Exception as error:
                log.exception("a renewal failed as no code expects")
                self._reason = f"{type(error).__name__}: {error}"

    def _wait_s(self) -> float:
        if self._reason:
            return self._settings.retry_s * random.uniform(1 - SPREAD, 1 + SPREAD)  # noqa: S311 (a wait)
        return renewal_due_s(self._certificate, self._settings.renew_at)

    def _tell(self, reason: str) -> None:
        self._reason = reason
        left_s = round(self.left_s())
        log.warning("this device's certificate was not renewed", extra={"reason": reason, "left_s": left_s})
