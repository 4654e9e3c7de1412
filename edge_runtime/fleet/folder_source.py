"""The files of one folder as requests to one model, one at a time, oldest first.

Owns: which file is being run and what its outcome means for the file. Decides by instants that it is given; `step` is
called by results.py's thread, answers come from workers.
"""

from __future__ import annotations

import io
import logging
import math
import queue
from collections import deque
from collections.abc import Callable

from edge_runtime.client.input_files import tensor_from_file
from edge_runtime.clock import Clock
from edge_runtime.config.settings import PublishRule
from edge_runtime.errors import EdgeRuntimeError, ModelNotFound, NotReady, RunFailed
from edge_runtime.fleet.drop_folder import FAILED_FOLDER, Drop, DropFolder
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.serving.infer import Infer
from edge_runtime.serving.request_plan import RequestPlan
from edge_runtime.serving.servables import Servables
from edge_runtime.telemetry.counters import Counters
from edge_runtime.tensors import Array, as_tensors, datatype_name, values_to_bits
from edge_runtime.wire.codec import RequestHeader, TensorHeader

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks at a folder; a file is taken when two in a row find it the same."""

LOOK_SHARE = 0.05
"""Of the time, at most, goes into looking: a folder of many thousand files is looked at less often."""

RETRY_S = 1.0
"""A file whose model cannot answer now (loading, full, stopping) is tried again so often."""

FILE_TIMEOUT_MS = 30_000.0
"""Nobody waits for a file, so the model's own deadline, for clients, does not count; results this old are no news."""

Finished = Callable[[RequestPlan, "list[Array]", str], None]


class FolderSource:
    """One rule's folder.

    answered: told each file's plan, outputs and name, on the thread of `step`. wake: has `step` called soon, from any
    thread. is_wanted: whether results could go anywhere now; files wait until they can.
    """

    def __init__(
        self,
        rule: PublishRule,
        folder: DropFolder,
        *,
        servables: Servables,
        infer: Infer,
        clock: Clock,
        counters: Counters,
        answered: Finished,
        wake: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._rule = rule
        self._folder = folder
        self._servables = servables
        self._infer = infer
        self._clock = clock
        self._counters = counters
        self._answered = answered
        self._wake = wake
        self._is_wanted = is_wanted
        self._waiting: deque[Drop] = deque()
        self._running: Drop | None = None
        self._outcomes: queue.SimpleQueue[tuple[RequestPlan | None, Outcome]] = queue.SimpleQueue()
        self._answered_drops: list[Drop] = []
        self._look_due_s = 0.0
        self._retry_due_s = 0.0
        self._said = ""

    def step(self, now_s: float) -> float:
        """Take an outcome, look, run the next file; when to call again at the latest."""
        if self._running is not None and not self._outcomes.empty():
            drop, self._running = self._running, None
            self._conclude(drop, *self._outcomes.get(), now_s)
            return now_s  # a look before `tidy` would find the file once more
        if self._running is not None:
            return math.inf
        if not self._is_wanted():
            return now_s + LOOK_S
        if not self._waiting and now_s >= self._look_due_s:
            self._look(now_s)
        if self._waiting and now_s >= self._retry_due_s:
            self._run(self._waiting.popleft(), now_s)
            return now_s
        return self._retry_due_s if self._waiting else self._look_due_s

    def tidy(self) -> None:
        """What was told to `answered` is published now: its files are done with."""
        drops, self._answered_drops = self._answered_drops, []
        for drop in drops:
            self._let_go(drop, self._folder.remove)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        began_s = self._clock.monotonic_s()
        try:
            self._waiting.extend(self._folder.look())
        except OSError as error:
            self._say(f"{self._folder.path}: {error.strerror}")
        took_s = self._clock.monotonic_s() - began_s
        self._look_due_s = now_s + max(LOOK_S, took_s / LOOK_SHARE)

    def _run(self, drop: Drop, now_s: float) -> None:
        """Read a file and submit it; whatever goes wrong is its outcome."""
        try:
            spec = self._servables.resolve(self._rule.model, None).spec.inputs[0]
            content = self._folder.read(drop)
            if content is None:
                return  # it is written to again: a later look finds it
            array = tensor_from_file(io.BytesIO(content), drop.name, spec)
            self._running = drop
            self._infer.submit(FileInquiry(self, self._rule.model, spec.name, array, self._clock.monotonic_s()))
        except FileNotFoundError:
            self._running = None
        except EdgeRuntimeError as error:
            self._running = None
            self._conclude(drop, None, error, now_s)
        except Exception as error:  # noqa: BLE001 (content is anybody's, and its readers are not ours)
            self._running = None
            self._conclude(drop, None, RunFailed(f"{drop.name}: {type(error).__name__}: {error}"), now_s)

    def _conclude(self, drop: Drop, plan: RequestPlan | None, outcome: Outcome, now_s: float) -> None:
        if isinstance(outcome, Answer) and plan is not None:
            self._counters.count("publish_files")
            self._said = ""
            self._answered(plan, plan.select(outcome.outputs), drop.name)
            self._answered_drops.append(drop)
        elif isinstance(outcome, EdgeRuntimeError):
            if outcome.retryable or isinstance(outcome, ModelNotFound):
                self._waiting.appendleft(drop)
                self._retry_due_s = now_s + RETRY_S
                if isinstance(outcome, ModelNotFound | NotReady):
                    self._say(outcome.message)
            else:
                self._refuse(drop, outcome)

    def _refuse(self, drop: Drop, error: EdgeRuntimeError) -> None:
        """A file that no second try makes better."""
        self._counters.count("publish_files_failed")
        where = {"folder": str(self._folder.path), "file": _text(drop.name)}
        log.warning("a file could not be used", extra={**where, "reason": error.message})
        self._let_go(drop, self._folder.set_aside)

    def _let_go(self, drop: Drop, clear: Callable[[Drop], None]) -> None:
        """Done with: cleared away where the rule says so; what cannot be stays, and is remembered like the others."""
        if self._rule.remove:
            try:
                clear(drop)
            except OSError as error:
                self._say(f"{self._folder.path}: a file cannot be removed or moved to {FAILED_FOLDER}: {error}")
            else:
                return
        self._folder.remember(drop)

    def _say(self, reason: str) -> None:
        """Log what keeps files from being used, when it is news."""
        if reason != self._said:
            self._said = reason
            log.warning("files wait to be published", extra={"folder": str(self._folder.path), "reason": reason})

    # ---- for its inquiry --------------------------------------------------------------------------------------------

    def plan(self, header: RequestHeader) -> RequestPlan:
        """See serving's Inquiry."""
        return RequestPlan(self._servables.resolve(header.model, header.version), header)

    def settle(self, plan: RequestPlan | None, outcome: Outcome) -> None:
        """The running file's outcome. Thread: any."""
        self._outcomes.put((plan, outcome))
        self._wake()


class FileInquiry:
    """One file on its way in (serving's Inquiry)."""

    __slots__ = ("_array", "_source", "arrived_s", "header", "nbytes", "used_plan")

    def __init__(self, source: FolderSource, model: str, name: str, array: Array, arrived_s: float) -> None:
        """Raises TensorMismatch and Unsupported for an array that is no tensor."""
        self._source = source
        self._array = values_to_bits(as_tensors({name: array})[name])
        tensor = TensorHeader(name, datatype_name(array.dtype), self._array.shape)
        self.header = RequestHeader(model=model, inputs=(tensor,), timeout_ms=FILE_TIMEOUT_MS)
        self.nbytes = self._array.nbytes
        self.arrived_s = arrived_s
        self.used_plan: RequestPlan | None = None

    def plan(self) -> RequestPlan:
        """See Inquiry."""
        return self._source.plan(self.header)

    def request(self, plan: RequestPlan) -> Pending:
        """See Inquiry."""
        self.used_plan = plan
        return Pending(
            [self._array], plan.rows, self.nbytes, plan.shape, plan.priority, self.arrived_s, plan.timeout_s,
            _settle, self,
        )  # fmt: skip

    def refuse(self, error: EdgeRuntimeError) -> None:
        """See Inquiry."""
        self._source.settle(None, error)

    def resume(self, enter: Callable[[], None]) -> None:
        """See Inquiry."""
        enter()

    def settle(self, outcome: Outcome) -> None:
        """Its one end. Thread: whichever decided it."""
        plan = self.used_plan
        assert plan is not None
        metrics = plan.servable.metrics
        if isinstance(outcome, Answer):
            metrics.answered(outcome.queue_s, outcome.run_s)
        else:
            metrics.refused(outcome.code)
        self._source.settle(plan, outcome)


def _settle(request: Pending, outcome: Outcome) -> None:
    inquiry: FileInquiry = request.tag  # type: ignore[assignment]
    inquiry.settle(outcome)


def _text(name: str) -> str:
    """A file's name as text that any log or JSON can hold."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
