"""A stage of a rule between its frames' answers and what is published: as tracks, which give boxes names that last.

Owns: the contract. A capability declares its stage in its folder, which imports nothing for that; shipped.py finds it.
A rule without one has `SteadyAnswer` of steady.py. Thread: any, one at a time, mostly the I/O thread, so that a
stage must not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.pictures.drawing import Overlay
from edge_runtime.site.settings import PublishRule
from edge_runtime.steps import ModelSteps
from edge_runtime.tensors import Array


class FrameAnswer(Struct, frozen=True):
    """A model's answer for one frame.

    outputs: of one row, by name, as a host gives them (answers.py), PICTURE_SIZE among them. number: of the frame, from
    1 on; a gap is frames that were not run. captured_s: when it was taken, as `time.time`. is_shown: people look, so
    that `fields` are wanted whether it is published or not.
    """

    steps: ModelSteps
    outputs: Mapping[str, Array]
    number: int
    captured_s: float
    is_shown: bool = False


class Staged(Struct, frozen=True):
    """A frame's answer as a stage leaves it.

    outputs: to be published, in place of the frame's; empty: nothing yet. has_changed: whether `on = "change"`
    publishes it. fields: for the JSON of the result, in place of entries of the same names. events: each is published
    at once, on `<topic>/event`, with the time and the names of its result, and its picture if the rule has pictures.
    overlay: what its pictures show beside the answer.
    """

    outputs: Mapping[str, Array]
    has_changed: bool
    fields: Mapping[str, Any] = {}
    events: Sequence[Mapping[str, Any]] = ()
    overlay: Overlay | None = None


class Stage(Protocol):
    """The stage of one rule. It starts anew with another version of the model."""

    def take(self, frame: FrameAnswer) -> Staged:
        """Take the next frame's answer."""
        ...

    def entities(self, steps: ModelSteps) -> Mapping[str, Mapping[str, Any]]:
        """Return the entities that Home Assistant shows beside label, score and count: components by key.

        A component has `platform` and `name`; the rule's name is put before it, topic and availability are filled in.
        Thread: any.
        """
        ...


class StageDeclaration(Struct, frozen=True):
    """A stage as its folder declares it. name: the key of `[[publish]]` that asks for it.

    opens: "module:function", (rule, the daemon's state folder or None) -> `Stage`; raises ConfigError where the rule
    cannot be.
    """

    name: str
    opens: str


def open_stage(rule: PublishRule, state: Path | None = None) -> Stage | None:
    """Make the stage that a rule asks for; None without one. state: the daemon's state folder. Raises ConfigError."""
    for name in plugins.names("stages"):
        if getattr(rule, name, None):
            stage: Stage = plugins.named(plugins.declared("stages", name).opens)(rule, state)
            return stage
    return None
