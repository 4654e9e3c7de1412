"""A fleet of devices behind one broker: which there are, what they run, who is slow. Signs nothing and holds no key."""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb("fleet", "see all devices of a broker: health, releases, who is slow, a page", "edge_runtime.fleet.command")
