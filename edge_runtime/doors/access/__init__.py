"""Doors with addresses: who may do what there, their tokens, and how they are bound."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb("token", "make and withdraw tokens for callers over HTTP and gRPC", "edge_runtime.doors.access.command")
