"""Signed releases: fetched, verified, tried, swapped in, observed, committed or rolled back."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb(
    "update",
    "install signed releases, go back to the one before, see what runs",
    "edge_runtime.updates.command",
    status_fields="edge_runtime.updates.command_report:status_fields",
)
