"""What alerts are made of, beside what requests count: models that serve or failed, free disk, whether updates go well.

Each is read when somebody looks, on that thread, and does not block. deploy/monitoring names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.metrics import Metrics


def watch_daemon(
    metrics: Metrics, servables: Servables, state: Path | None, updates: Callable[[], Mapping[str, Any]] | None
) -> None:
    """Register them. state: the folder that survives a restart. updates: the summary of the updater; None without one.

    `models_ready`, `models_failed`: versions. `state_free_bytes`: what the daemon may still write. `update_failing`: 1
    while the updater is out of order or the last look at the repository failed. `update_refused`: releases that this
    device took back or would not take.
    """
    metrics.watch("models_ready", lambda: _models_in(servables, "ready"))
    metrics.watch("models_failed", lambda: _models_in(servables, "failed"))
    if state is not None:
        metrics.watch("state_free_bytes", lambda: _free_bytes(state))
    if updates is not None:
        metrics.watch("update_failing", lambda: float(_is_failing(updates())))
        metrics.watch("update_refused", lambda: float(len(updates().get("refused") or ())))


def _models_in(servables: Servables, state: str) -> float:
    return float(sum(entry["state"] == state for entry in servables.listing()))


def _free_bytes(folder: Path) -> float:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0.0  # a disk that cannot be asked cannot be written
    return float(disk.f_bavail * disk.f_frsize)


def _is_failing(told: Mapping[str, Any]) -> bool:
    checked = told.get("checked")
    return told.get("state") == "broken" or (checked is not None and not checked["is_ok"])
