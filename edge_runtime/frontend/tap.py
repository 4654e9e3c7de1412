"""What listens to the answers of one model, beside those who asked.

Owns: the seam only. fleet/results.py listens to publish; without a rule there is no tap, and nothing is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.tensors import Array

Outputs = Sequence[bytes | Array]
"""One answer's outputs, in the order of its plan: arrays, or their bytes as on the wire."""


class Tap(Protocol):
    """Hears what one model answers. Thread: a transport's, or a worker's: it must not block.

    What it raises is counted (`publish_failed`) and logged, and never reaches who asked.
    """

    def answered(self, plan: RequestPlan, answers: Sequence[Outputs]) -> None:
        """Requests of one plan, answered just now, in order; at least one. The outputs may be kept."""
        ...
