"""Which settings a release may bring: those of `model.toml` that say nothing in a library's own words.

Pure. Owns: the rule, so that the publisher and the device hold to the same one. The publisher's is for mistakes, the
device's for a publisher whose key was stolen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build

REFUSED_SETTINGS = {
    "options": "they are in a library's own words, which may name code",
    "device": "a device's profile says it",
    "versions": "a group is assigned one version",
}
"""Keys of `model.toml` that are not published, and why."""


def read_release_settings(settings: Mapping[str, Any], source: str) -> ModelSettings:
    """The settings of a release, typed. source: for the message.

    Raises ConfigError: a key is not known, has a wrong value, or is none that a release may bring.
    """
    typed = build(ModelSettings, settings, source)
    for key, why in REFUSED_SETTINGS.items():
        if key in settings:
            raise ConfigError(f"{source}: {key} is not published: {why}; take it out")
    return typed
