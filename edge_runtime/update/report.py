"""What the updater tells of itself: to operators, to the state on MQTT, to whoever asked for a check. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_runtime.update.journal_tables import Entry, Refused, Release
from edge_runtime.update.states import State

RUNS, AVAILABLE, PASSED_OVER, REFUSED_BEFORE = "runs", "available", "passed over", "refused before"
"""What becomes of an assignment without a rollout: it serves already; `apply` brings it; it is not for this device; it
is for this device, which refused it once and for all."""

SHOWN_REFUSALS = 20
"""The last ones; all are in the history."""

SHOWN_HISTORY = 1_000
"""All that the journal keeps."""


@dataclass(frozen=True, slots=True)
class Offered:
    """What became of one assignment. action: one of the words above, or how its rollout ended.

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
class Checked:
    """How a check ended. reason: why not, where it did not go well."""

    at_utc: str
    is_ok: bool
    reason: str = ""
    source: str = ""
    offers: tuple[Offered, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the wire."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Step:
    """Where a release stands now. done and total: bytes, while there are bytes to be fetched."""

    release: Release
    state: State
    detail: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """For the wire."""
        return {
            "model": self.release.model,
            "release": self.release.counter,
            "version": self.release.version,
            "state": self.state.value,
            "detail": self.detail,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the journal holds, as it was when somebody wrote to it last. not_served: by model, why not."""

    active: Mapping[str, Release] = field(default_factory=dict)
    previous: Mapping[str, Release] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()
    not_served: Mapping[str, str] = field(default_factory=dict)
    is_state_lost: bool = False
    history: tuple[Entry, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the wire, but for the history."""
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
