"""One inference request and its answer, as the library's callers see them. Values only; no wire, no threads."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.tensors import Array


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went, and how many rows its batch had."""

    queue_ms: float
    run_ms: float
    batch_rows: int


@dataclass(frozen=True, slots=True)
class InferResult:
    """An answer: output arrays by name in the order asked for, and the version that gave it.

    `result["scores"]` is `result.outputs["scores"]`. Shapes: axis 0 is rows for a model that batches.
    """

    model: str
    version: int
    outputs: dict[str, Array]
    timing: Timing | None = None

    def __getitem__(self, name: str) -> Array:
        """One output by name. Raises KeyError naming the outputs that are there."""
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output {name!r}; got {', '.join(self.outputs)}") from None
