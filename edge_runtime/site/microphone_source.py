"""Windows of a microphone as a model takes them, for camera_source.py: each is run, and has an answer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge_runtime.errors import TensorMismatch
from edge_runtime.messages import TensorHeader
from edge_runtime.models.servable import Servable
from edge_runtime.site.microphone import Cut, Sound
from edge_runtime.site.settings import PublishRule
from edge_runtime.tensors import Array

if TYPE_CHECKING:  # a site with cameras alone needs nothing of series
    from edge_runtime.series.series_steps import SeriesSteps


class WindowTaking:
    """Windows by the model's own rate, window and hop. Of a rule with `every_s` the newest are run, else all."""

    source = "audio"
    counted = "audio_windows"

    def __init__(self, rule: PublishRule) -> None:
        self._is_newest_only = rule.every_s is not None
        self._window_s = 0.0

    def period_s(self, rule: PublishRule) -> float:
        """Return the time between two windows that are run; 0: each is."""
        return rule.every_s or 0.0

    def wanted(self, servable: Servable) -> Cut:
        """Return the windows that a model declares."""
        steps = _declared(servable)[1]
        self._window_s = steps.window / steps.rate
        return Cut(steps.rate, steps.window, steps.hop_samples)

    def tensor(self, servable: Servable, taken: Sound) -> tuple[TensorHeader, Array]:
        """Return the window as samples, FP32 [1, window]."""
        samples = taken.samples[None]
        return TensorHeader(_declared(servable)[0], "FP32", samples.shape), samples

    def row(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return outputs of one window, [1, 1, …], as those of one row, [1, …]."""
        return [each[:, 0] for each in outputs]

    def fields(self, taken: Sound) -> Mapping[str, Any]:
        """Return the window's number, and how long it is; `captured` is when it ended."""
        return {"window": taken.number, "window_s": round(self._window_s, 6)}

    def missed(self, before: Sound | None, taken: Sound) -> int:
        """Return how many windows came between, whose model was too slow for them."""
        return 0 if before is None or self._is_newest_only else max(taken.number - before.number - 1, 0)


def _declared(servable: Servable) -> tuple[str, SeriesSteps]:
    """The input that takes series, and its table. Raises TensorMismatch: there is none."""
    from edge_runtime.series.series_steps import SeriesSteps

    name, declared = next(iter(servable.steps.inputs.items()), ("", None)) if servable.steps is not None else ("", None)
    if servable.chain is not None or not isinstance(declared, SeriesSteps):
        raise TensorMismatch(
            f"model {servable.model!r} declares no windows of sound; write [input.NAME] with rate, window and hop into "
            "its model.toml (docs/sound.md)"
        )
    return name, declared
