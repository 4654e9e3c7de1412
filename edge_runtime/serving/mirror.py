"""Copies of live requests, run by a release that does not answer yet, beside what the incumbent answered (shadow).

Owns: one copy at a time, its comparison, and the share of the device that this may take. A copy is taken when a request
was answered, and run on the loader's thread when a core is free and nobody waits; what does not fit in is dropped and
counted, so no request ever waits for a copy. The thread keeps its priority: a thread of a lower one that holds the
interpreter's lock would hold up all others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.repository.golden import differences, float_values
from edge_runtime.repository.manifest import TensorForm, Tolerance
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.serving.servable import Servable
from edge_runtime.telemetry.metrics import Histogram
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

MAX_COPY_BYTES = 16 << 20
"""Tensors of one request, in and out, above which it is not copied: a batch of 25 images of 600 KB."""


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What copies have shown so far.

    requests: copies that were run. failures: of them, those that the newcomer could not run. different: those whose
    outputs were too far from the incumbent's. top1_rows: rows of scores (float outputs of two columns or more), and
    top1_agreements how many of them have the same highest one. p95 of the run times, None where there is none: the
    incumbent's of those that ran alone, as a copy does. dropped: answers of which no copy was run.
    """

    requests: int = 0
    failures: int = 0
    different: int = 0
    top1_rows: int = 0
    top1_agreements: int = 0
    dropped: int = 0
    incumbent_p95_s: float | None = None
    newcomer_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One answered request, in arrays of its own where somebody could change them. run_s None: it ran with others."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    run_s: float | None


class Mirror:
    """The newcomer beside the incumbent, on the incumbent's requests.

    share: of one core's time that copies may take, 0 to 1. run_soon: has a function called on the loader's thread.
    """

    def __init__(
        self,
        incumbent: Servable,
        newcomer: Servable,
        *,
        share: float,
        tolerance: Tolerance,
        dispatcher: Dispatcher,
        clock: Clock,
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share: got {share}; wanted a part of one core's time, above 0 and at most 1")
        self._newcomer = newcomer
        self._rest = (1 - share) / share
        self._tolerance = tolerance
        self._dispatcher = dispatcher
        self._clock = clock
        self._run_soon = run_soon
        self._forms = [TensorForm(spec.name, spec.datatype, spec.shape) for spec in incumbent.spec.outputs]
        self._lock = threading.Lock()
        self._counts = Mirrored()
        self._incumbent_times = Histogram()
        self._newcomer_times = Histogram()
        self._has_copy = False
        self._due_s = 0.0
        self._is_open = True

    def read(self) -> Mirrored:
        """What was found so far; also after the end. Thread: any."""
        with self._lock:
            return replace(
                self._counts,
                incumbent_p95_s=self._incumbent_times.quantile(0.95),
                newcomer_p95_s=self._newcomer_times.quantile(0.95),
            )

    def close(self) -> None:
        """Take no copy any more. Thread: the loader's, so that none runs when this returns."""
        with self._lock:
            self._is_open = False

    def follow(self, request: Pending) -> None:
        """Hear what becomes of a request that the incumbent is about to admit. Thread: any."""
        settle = request.settle

        def settle_and_copy(answered: Pending, outcome: Outcome) -> None:
            copy = self._copy(answered, outcome) if isinstance(outcome, Answer) else None
            settle(answered, outcome)
            if copy is not None:
                self._run_soon(lambda: self._run(copy))

        request.settle = settle_and_copy

    # ---- private ----------------------------------------------------------------------------------------------------

    def _copy(self, request: Pending, answer: Answer) -> Copy | None:
        """The request as it is now, if it is one to be run: once answered, its arrays are the caller's again."""
        with self._lock:
            if not self._is_open:
                return None
            nbytes = request.nbytes + sum(array.nbytes for array in answer.outputs)
            if self._has_copy or self._clock.monotonic_s() < self._due_s or nbytes > MAX_COPY_BYTES:
                self._drop()
                return None
            self._has_copy = True
        run_s = answer.run_s if answer.batch_rows == request.rows else None
        return Copy([_own(array) for array in request.inputs], [_own(array) for array in answer.outputs], run_s)

    def _run(self, copy: Copy) -> None:
        """Run one copy and compare. Thread: the loader's."""
        started_s = self._clock.monotonic_s()
        if not self._is_open or not self._dispatcher.has_spare_core():
            with self._lock:
                self._drop()
                self._has_copy = False
            return
        outputs: Sequence[Array] | None = None
        try:
            outputs = self._newcomer.scheduled.layout.run(copy.inputs)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what would have been answered)
            log.info("a copy failed", extra={"model": self._newcomer.model, "reason": str(error)})
        run_s = self._clock.monotonic_s() - started_s
        is_different, rows, agreements = self._compare(copy, outputs)
        with self._lock:
            known = self._counts
            self._counts = replace(
                known,
                requests=known.requests + 1,
                failures=known.failures + (outputs is None),
                different=known.different + is_different,
                top1_rows=known.top1_rows + rows,
                top1_agreements=known.top1_agreements + agreements,
            )
            if outputs is not None:
                self._newcomer_times.record(run_s)
            if copy.run_s is not None:
                self._incumbent_times.record(copy.run_s)
            now_s = self._clock.monotonic_s()
            # Comparing takes time too: the rest is as long for both.
            self._due_s = now_s + (now_s - started_s) * self._rest
            self._has_copy = False

    def _compare(self, copy: Copy, outputs: Sequence[Array] | None) -> tuple[bool, int, int]:
        """Whether they differ, rows of scores, and how many of these agree on the highest."""
        if outputs is None:
            return False, 0, 0
        names = [form.name for form in self._forms]
        wanted, got = dict(zip(names, copy.outputs, strict=True)), dict(zip(names, outputs, strict=True))
        is_different = bool(differences(self._forms, wanted, got, self._tolerance))
        pairs = [_top1(form, wanted[form.name], got[form.name]) for form in self._forms]
        return is_different, sum(rows for rows, _ in pairs), sum(agreements for _, agreements in pairs)

    def _drop(self) -> None:
        """Under the lock."""
        self._counts = replace(self._counts, dropped=self._counts.dropped + 1)


def _top1(form: TensorForm, wanted: Array, got: Array) -> tuple[int, int]:
    """Rows of scores in an output, and in how many both have the same highest one; none where it holds no scores."""
    first, second = float_values(form.datatype, wanted), float_values(form.datatype, got)
    if first is None or second is None or first.ndim < 2 or first.shape[-1] < 2 or first.shape != second.shape:
        return 0, 0
    equal = np.argmax(first, axis=-1) == np.argmax(second, axis=-1)
    return int(equal.size), int(np.count_nonzero(equal))


def _own(array: Array) -> Array:
    """An array that nobody changes: itself where it is read-only, else a copy."""
    return array.copy() if array.flags.writeable else array
