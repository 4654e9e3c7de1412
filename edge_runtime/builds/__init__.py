"""Builds on this device: what a backend has built of a model, and conversions of files that no backend reads."""

from __future__ import annotations

from edge_runtime.daemon.parts import PartDeclaration

PART = PartDeclaration("builds", "edge_runtime.builds.promotions:open_builds", extra="")
