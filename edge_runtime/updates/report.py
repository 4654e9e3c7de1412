"""The updater's report: for operators, for the state on MQTT, for the caller of a check.

Owns: its shape, and the board that any thread may read without waiting for the disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_runtime.errors import StorageFailed
from edge_runtime.updates.active import ActiveReleases
from edge_runtime.updates.group_configuration import GroupConfiguration
from edge_runtime.updates.journal import KEPT_HISTORY, Entry, Journal, RefusedRelease
from edge_runtime.updates.states import Release, ReleaseState

RUNS, AVAILABLE, PASSED_OVER, REFUSED_BEFORE = "runs", "available", "passed over", "refused before"
"""The fate of an assignment without a rollout: it serves already; `apply` installs it; it is not for this device; this
device refused it once and for all."""

SHOWN_REFUSALS = 20
"""The last ones; all are in the history."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The fate of one assignment. action: one of the words above, or how its rollout ended.

    gap_s: how long nothing of the model answered, where memory holds one version only.
    """

    model: str
    release: int
    percent: float
    action: str
    reason: str = ""
    version: int | None = None
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How a check ended. reason: why it failed, where it did."""

    at_utc: str
    is_ok: bool
    reason: str = ""
    source: str = ""
    offers: tuple[Offered, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the wire."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """The state of a release under way. done_bytes, total_bytes: while bytes are fetched.

    observed: while it is observed, each figure by name, of the version before ("" without one) and of this one.
    """

    release: Release
    state: ReleaseState
    detail: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    observed: Sequence[tuple[str, str, str]] = ()

    def as_json(self) -> dict[str, Any]:
        """For the wire."""
        observed = [{"name": name, "before": before, "now": now} for name, before, now in self.observed]
        return {
            "model": self.release.model,
            "release": self.release.counter,
            "version": self.release.version,
            "state": self.state.value,
            "detail": self.detail,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            **({"observation": observed} if observed else {}),
        }


@dataclass(frozen=True, slots=True)
class JournalView:
    """The journal's content after its last change. not_served: by model, why its active release does not answer."""

    active: Mapping[str, Release] = field(default_factory=dict)
    previous: Mapping[str, Release] = field(default_factory=dict)
    refused: tuple[RefusedRelease, ...] = ()
    not_served: Mapping[str, str] = field(default_factory=dict)
    is_state_lost: bool = False
    history: tuple[Entry, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the wire, without the history."""
        return {
            "state_lost": self.is_state_lost,
            "models": {
                model: {
                    "version": release.version,
                    "release": release.counter,
                    "manifest_sha256": release.manifest_sha256,
                    "previous_release": self.previous[model].counter if model in self.previous else None,
                    "not_served": self.not_served.get(model, ""),
                }
                for model, release in sorted(self.active.items())
            },
            "refused": [
                {"model": each.model, "release": each.counter, "reason": each.reason}
                for each in self.refused[-SHOWN_REFUSALS:]
            ],
        }


class StatusBoard:
    """The latest report. Written by the updater's thread; read by any thread, without waiting for the disk."""

    def __init__(
        self, journal: Journal, active: ActiveReleases, configuration: GroupConfiguration, device_id: str
    ) -> None:
        self._journal = journal
        self._active = active
        self._configuration = configuration
        self._device_id = device_id
        self._step: RolloutStep | None = None
        self._checked: CheckResult | None = None
        self._view = JournalView()

    def show(self, step: RolloutStep) -> None:
        """Show the step of the release under way."""
        before, self._step = self._step, step
        if before is None or before.state is not step.state:
            self.read_journal()

    def end_check(self, checked: CheckResult) -> None:
        """Show how a check ended; no release is under way then."""
        self._checked = checked
        self._step = None
        self.read_journal()

    def read_journal(self) -> None:
        """Copy the journal for readers in other threads. Keeps the last copy where the journal cannot be read."""
        with contextlib.suppress(StorageFailed):
            self._view = JournalView(
                self._journal.active(),
                self._journal.previous(),
                tuple(self._journal.refused().values()),
                dict(self._active.not_served),
                self._journal.is_state_lost,
                tuple(self._journal.history(KEPT_HISTORY)),
            )

    def active(self, model: str) -> int | None:
        """Return the number of the release of a model that is active; None for none, or before the journal was read."""
        release = self._view.active.get(model)
        return None if release is None else release.counter

    def history(self, count: int) -> list[dict[str, Any]]:
        """Return the last entries of the history, newest first."""
        return [asdict(entry) for entry in self._view.history[:count]]

    def summary(self) -> dict[str, Any]:
        """Return the status without what changes with time alone: for the state on MQTT."""
        step, checked = self._step, self._checked
        return {
            "state": step.state.value if step is not None else ReleaseState.IDLE.value,
            "group": self._configuration.group,
            "device_id": self._device_id,
            "configuration": self._configuration.as_json(),
            "under_way": step.as_json() if step is not None else None,
            "checked": checked.as_json() if checked is not None else None,
            **self._view.as_json(),
        }
