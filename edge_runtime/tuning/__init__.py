"""Which backend, precision and layout serve a model best on this device, within its objective and its accuracy."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb("tune", "find what serves a model best on this device, and use it", "edge_runtime.tuning.command")
