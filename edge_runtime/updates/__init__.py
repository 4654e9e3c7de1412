"""Signed releases: fetched, verified, tried, swapped in, observed, committed or rolled back."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb
from edge_runtime.daemon.parts import PartDeclaration

VERB = Verb(
    "update",
    "install signed releases, go back to the one before, see what runs",
    "edge_runtime.updates.command",
    status_fields="edge_runtime.updates.command_report:status_fields",
)

PART = PartDeclaration(
    "update",
    "edge_runtime.updates.opening:open_updates",
    extra="update",
    lays_over="edge_runtime.updates.kept_configuration:lay_over",
    takes_back="edge_runtime.updates.kept_configuration:take_back",
)
