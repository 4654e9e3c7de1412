"""Copies of live requests, run by a release that does not answer yet, beside the current version's answers (shadow).

Owns: one copy at a time, its comparison, and the share of the device that copies may take. A copy is taken when a
request is answered, and run on the loader's thread when a core is free, no request waits, and the device is not slowed
for its heat; any other is dropped and counted, so no request ever waits for a copy. The thread keeps its priority: a
low-priority thread that holds the interpreter's lock would block all others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.models.context import ModelContext
from edge_runtime.models.servable import Servable
from edge_runtime.models.swap import Swap
from edge_runtime.request.request import CallbackReply, Reply, Request, StreamingReply
from edge_runtime.telemetry.metrics import Histogram
from edge_runtime.tensors import Array
from edge_runtime.updates.golden import DEFAULT_TOLERANCE, TOLERANCES, differences, highest_scores
from edge_runtime.updates.manifest import TensorForm, Tolerance

log = logging.getLogger(__name__)

MAX_COPY_BYTES = 16 << 20
"""Tensors of one request, in and out, above which it is not copied: a batch of 25 images of 600 KB."""


class Mirrored(Struct, frozen=True):
    """Results of the copies so far.

    requests: copies that were run. failures: of them, those that the candidate could not run. different: those whose
    outputs were too far from the current version's. top1_rows: rows of scores (float outputs of two columns or more),
    and top1_agreements how many of them have the same highest one; top1_distinct: how many different ones the current
    version's rows have, of the output with the most. p95 and median of run times, None where there is
    none: the current version's of those that ran alone, as a copy does. dropped: answers of which no copy was run.
    """

    requests: int = 0
    failures: int = 0
    different: int = 0
    top1_rows: int = 0
    top1_agreements: int = 0
    top1_distinct: int = 0
    dropped: int = 0
    current_p95_s: float | None = None
    current_median_s: float | None = None
    candidate_p95_s: float | None = None
    candidate_median_s: float | None = None


class Copy(Struct, frozen=True):
    """One answered request, in arrays of its own unless they are read-only. run_s None: it ran with others."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    rows: int
    run_s: float | None


class Mirror:
    """The candidate beside the current version, on the current version's requests.

    share: of one core's time that copies may take, above 0 and at most 1. tolerance: of outputs, None for the usual one
    at the candidate's precision.
    """

    def __init__(
        self, candidate: Servable, context: ModelContext, *, share: float, tolerance: Tolerance | None = None
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share: got {share}; wanted a part of one core's time, above 0 and at most 1")
        self._candidate = candidate
        self._rest = (1 - share) / share
        self._tolerance = tolerance or TOLERANCES.get(candidate.layouts.narrow.precision, DEFAULT_TOLERANCE)
        self._dispatcher = context.dispatcher
        self._clock = context.clock
        self._executor = context.executor
        # The current version's: `Swap.shadow` checks that both are alike.
        self._outputs = [TensorForm(spec.name, spec.datatype, spec.shape) for spec in candidate.spec.outputs]
        self._lock = threading.Lock()
        self._counts = Mirrored()
        self._answers: dict[str, set[int]] = {}
        self._current_times = Histogram()
        self._candidate_times = Histogram()
        self._has_copy = False
        self._due_s = 0.0
        self._is_open = True

    def read(self) -> Mirrored:
        """The results so far; also after the end. Thread: any."""
        with self._lock:
            return replace(
                self._counts,
                current_p95_s=self._current_times.quantile(0.95),
                current_median_s=self._current_times.quantile(0.5),
                candidate_p95_s=self._candidate_times.quantile(0.95),
                candidate_median_s=self._candidate_times.quantile(0.5),
            )

    def close(self) -> None:
        """Take no more copies. Thread: the loader's, so none runs when this returns."""
        with self._lock:
            self._is_open = False

    def follow(self, request: Request) -> None:
        """Hear what becomes of a request that the current is about to admit. Thread: any.

        Not of one whose responses are sent as they come: these have nothing beside them.
        """
        if not isinstance(request.reply, StreamingReply):
            reply = request.reply
            request.reply = CallbackReply(partial(self._ended, reply), reply.user_id, writes_text=reply.writes_text)

    def _ended(self, reply: Reply, ended: Request | EdgeRuntimeError) -> None:
        """Answer a request, and have its copy run afterwards."""
        if isinstance(ended, EdgeRuntimeError):
            reply.refuse(ended)
            return
        copy = self.copy(ended)
        reply.answer(ended)
        if copy is not None:
            self.run_copy(copy)

    def copy(self, request: Request) -> Copy | None:
        """A request that was run, if it is to be run again. Once it is answered, its arrays are the caller's again."""
        with self._lock:
            if not self._is_open:
                return None
            nbytes = request.nbytes + sum(array.nbytes for array in request.outputs)
            if self._has_copy or self._clock.monotonic_s() < self._due_s or nbytes > MAX_COPY_BYTES:
                self._drop()
                return None
            self._has_copy = True
        run_s = request.run_s if request.batch_rows == request.rows else None
        inputs, outputs = ([_own(array) for array in arrays] for arrays in (request.inputs, request.outputs))
        return Copy(inputs, outputs, request.rows, run_s)

    def run_copy(self, copy: Copy) -> None:
        """Have a copy run. Thread: any."""
        self._executor.submit(lambda: self._run(copy))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _run(self, copy: Copy) -> None:
        """Run one copy and compare. Thread: the loader's."""
        started_s = self._clock.monotonic_s()
        if not self._is_open or self._dispatcher.is_slowed or not self._dispatcher.has_spare_core():
            with self._lock:
                self._drop()
                self._has_copy = False
            return
        outputs: Sequence[Array] | None = None
        try:
            layout = self._candidate.scheduled.layout
            limit_s = layout.limit_s(copy.rows, sum(array.nbytes for array in copy.inputs))
            assert layout.runner is not None  # its concurrency is 0
            outputs = layout.runner.run_parts((copy.inputs,), limit_s, alone=False)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what would have been answered)
            log.info("a copy failed", extra={"model": self._candidate.model, "reason": str(error)})
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
                top1_distinct=max(map(len, self._answers.values()), default=0),
            )
            if not self._dispatcher.is_slowed:
                if outputs is not None:
                    self._candidate_times.record(run_s)
                if copy.run_s is not None:
                    self._current_times.record(copy.run_s)
            now_s = self._clock.monotonic_s()
            # Comparing takes time too: the rest is as long for both.
            self._due_s = now_s + (now_s - started_s) * self._rest
            self._has_copy = False

    def _compare(self, copy: Copy, outputs: Sequence[Array] | None) -> tuple[bool, int, int]:
        """Whether they differ, rows of scores, and how many of these agree on the highest."""
        if outputs is None:
            return False, 0, 0
        names = [output.name for output in self._outputs]
        wanted, got = dict(zip(names, copy.outputs, strict=True)), dict(zip(names, outputs, strict=True))
        is_different = bool(differences(self._outputs, wanted, got, self._tolerance))
        rows = agreements = 0
        for output in self._outputs:
            first = highest_scores(output, wanted[output.name])
            second = highest_scores(output, got[output.name])
            if first is not None and second is not None and first.shape == second.shape:
                rows += first.size
                agreements += int(np.count_nonzero(first == second))
                self._answers.setdefault(output.name, set()).update(np.unique(first).tolist())
        return is_different, rows, agreements

    def _drop(self) -> None:
        """Under the lock."""
        self._counts = replace(self._counts, dropped=self._counts.dropped + 1)


def begin_shadow(swap: Swap, share: float, tolerance: Tolerance | None = None) -> Mirror:
    """Have a swap's candidate run copies of the requests that the current version answers. Raises as `Swap.shadow`.

    share, tolerance: as of `Mirror`.
    """
    mirror = Mirror(swap.candidate, swap.context, share=share, tolerance=tolerance)
    swap.shadow(mirror)
    return mirror


def _own(array: Array) -> Array:
    """An array that no one else can change: itself where it is read-only, else a copy."""
    return array.copy() if array.flags.writeable else array
