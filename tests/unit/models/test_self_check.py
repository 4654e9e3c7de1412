"""A model that hangs is noticed, and one that is slow, busy, failing or gone is not taken for it."""

from __future__ import annotations

import numpy as np

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.pending_loads import PendingLoads
from edge_runtime.models.self_check import IDLE_SHARE, PATIENCE_INTERVALS, PATIENCE_RUNS, SelfCheck
from edge_runtime.models.servable import Layouts, Servable
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.infer import Infer
from edge_runtime.request.request import CHECK, Request
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.request.worker import run_job
from edge_runtime.telemetry.metrics import Metrics, ModelMetrics
from edge_runtime.wire.codec import pack_answer, pack_error, unpack_request
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner

INTERVAL_S = 10.0
PATIENCE_S = PATIENCE_INTERVALS * INTERVAL_S

SPEC = ModelSpec(
    (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("text", "BYTES", (-1, -1))), (TensorSpec("y", "FP32", (-1, 2)),)
)


class FakeInstance:
    """Only what a servable reads of one."""

    spec = SPEC
    memory_bytes = 0

    def close(self):
        pass


class FakeDoor:
    """An endpoint that decodes, admits and encodes as a transport does."""

    def __init__(self, kit):
        self.kit = kit
        self.infer = Infer(kit.table, PendingLoads(kit.dispatcher), kit.dispatcher)
        self.replies = []
        self.headers = set()
        self.is_silent = False

    def send(self, frames):
        header, request_id, *tensors = frames
        self.headers.add(header)
        decoded = unpack_request(header)
        reply = KeptReply(request_id, self.end)
        now_s = self.kit.clock.monotonic_s()
        self.infer.submit(Request(decoded, tensors, 0, reply, "client", now_s, Metrics(), CHECK))
        return True

    def end(self, request_id, end):
        header = pack_error(end) if isinstance(end, EdgeRuntimeError) else pack_answer("m", 1, ())
        if not self.is_silent:
            self.replies.append([header, request_id])

    def receive(self):
        return self.replies.pop(0) if self.replies else None


class Kit:
    """Models that run when the test says so."""

    def __init__(self, *names, run_s=0.0, warm_length=3, fails=False):
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, 1)
        self.table = ModelTable(Executor())
        self.seen = []
        self.fails = fails
        self.run_s = run_s
        for name in names or ("m",):
            self.add(name, warm_length)
        self.door = FakeDoor(self)
        self.check = SelfCheck(self.table, self.clock, INTERVAL_S, self.door)

    def add(self, name, warm_length=3, max_queue_rows=4):
        def run(inputs):
            self.clock.advance(self.run_s)
            self.seen.append((name, [array.copy() for array in inputs]))
            if self.fails:
                raise RunFailed("no")
            return [inputs[0].copy()]

        metrics = ModelMetrics()
        scheduled = ScheduledModel(name, Layout(FunctionRunner(run)), max_queue_rows=max_queue_rows, metrics=metrics)
        servable = Servable(
            name, 1, ModelSettings(), Layouts(FakeInstance()), batches=True, mode="workers", max_rows=4, inline=None,
            scheduled=scheduled, dispatcher=self.dispatcher, clock=self.clock, metrics=metrics, warm_length=warm_length,
        )  # fmt: skip
        self.table.publish(servable)
        return servable

    def servable(self, name="m"):
        return self.table.find(name, 1)

    def run_one(self):
        job, _ = self.dispatcher.next_job()
        assert job is not None
        run_job(job, self.dispatcher, self.clock)

    def after(self, seconds):
        self.clock.advance(seconds)
        return self.check.is_alive()

    def fill(self, rows):
        x, text = np.zeros((rows, 2), np.float32), np.full((rows, 3), b"0", object)
        self.servable().submit(
            request_of([x, text], rows=rows, nbytes=0, arrived_s=self.clock.monotonic_s(), timeout_s=1e6)
        )


def test_an_idle_model_is_asked_with_zeros_of_the_shape_it_was_warmed_with():
    kit = Kit()
    assert kit.after(0)
    kit.run_one()
    ((_, (x, text)),) = kit.seen
    assert (x.shape, x.any(), text.shape, text[0, 0]) == ((1, 2), False, (1, 3), b"0")


def test_a_model_that_hangs_is_noticed_when_patience_is_over():
    kit = Kit()
    assert kit.after(0)
    assert kit.after(PATIENCE_S)
    assert not kit.after(1)
    assert not kit.after(INTERVAL_S), "and stays so"


def test_it_is_alive_again_when_its_answer_comes_after_all():
    kit = Kit()
    assert kit.after(0)
    assert not kit.after(PATIENCE_S + 1)
    kit.run_one()
    assert kit.after(0)


def test_a_slow_model_that_holds_every_core_is_waited_for_by_its_own_measure():
    kit = Kit("slow", run_s=30.0)
    assert kit.after(0)
    kit.run_one()
    assert kit.after(0)
    assert kit.after(30.0 / IDLE_SHARE)
    assert kit.after(PATIENCE_S + PATIENCE_RUNS * 30.0)
    assert not kit.after(1)


def test_a_model_takes_no_more_than_its_share_of_time_for_being_asked():
    kit = Kit(run_s=1.0)
    for _ in range(1000):
        assert kit.after(INTERVAL_S / 2)
        while kit.dispatcher.queued(kit.servable().scheduled)[0]:
            kit.run_one()
    assert 2 <= len(kit.seen) <= 1000 * INTERVAL_S / 2 * IDLE_SHARE


def test_a_busy_model_is_alive_by_its_runs_though_its_queue_takes_no_more():
    kit = Kit()
    for _ in range(40):
        kit.fill(4 - kit.dispatcher.queued(kit.servable().scheduled)[0])
        assert kit.after(PATIENCE_S / 2)
        kit.run_one()


def test_a_full_queue_that_nobody_empties_is_noticed():
    kit = Kit()
    kit.fill(4)
    assert kit.after(0)
    assert not kit.after(PATIENCE_S + 1)


def test_a_model_that_answers_requests_is_not_asked():
    kit = Kit()
    kit.after(0)
    kit.run_one()
    for _ in range(20):
        kit.fill(1)
        kit.run_one()
        kit.after(INTERVAL_S)
    assert len(kit.seen) == 21, "its own and twenty of others"


def test_a_failing_model_is_alive():
    kit = Kit(fails=True)
    for _ in range(20):
        assert kit.after(INTERVAL_S)
        if kit.dispatcher.queued(kit.servable().scheduled)[0]:
            kit.run_one()
    assert len(kit.seen) >= 5


def test_every_model_has_its_turn_so_that_one_that_hangs_is_found_among_others():
    kit = Kit("a", "b", "c")
    asked = set()
    for _ in range(6):
        assert kit.after(INTERVAL_S)
        asked.update(name for name in "abc" if kit.dispatcher.queued(kit.servable(name).scheduled)[0])
        kit.run_one()
        assert kit.after(0)
    assert asked == {"a", "b", "c"}


def test_a_model_that_leaves_while_it_is_asked_is_forgotten():
    kit = Kit("a", "b")
    kit.after(0)
    gone = next(name for name in "ab" if kit.dispatcher.queued(kit.servable(name).scheduled)[0])
    kit.table.withdraw(gone, 1, VersionState.UNLOADED)
    assert kit.after(PATIENCE_S + 1)


def test_a_model_that_no_input_could_be_made_for_is_not_asked():
    kit = Kit(warm_length=None)
    assert kit.after(0)
    assert kit.after(10 * PATIENCE_S)
    assert kit.dispatcher.is_idle()


def test_without_a_model_the_loop_alone_is_the_sign_of_life():
    kit = Kit()
    kit.table.withdraw("m", 1, VersionState.UNLOADED)
    assert kit.after(0)
    assert kit.after(10 * PATIENCE_S)


def test_being_asked_is_not_use_that_keeps_a_model_loaded():
    kit = Kit()
    used_s = kit.servable().used_s
    kit.after(5 * INTERVAL_S)
    kit.run_one()
    assert kit.servable().used_s == used_s
    assert kit.servable().metrics.requests == 0


def test_a_question_is_always_the_same_header_so_that_it_becomes_a_known_one():
    kit = Kit()
    for _ in range(5):
        kit.after(INTERVAL_S)
        while kit.dispatcher.queued(kit.servable().scheduled)[0]:
            kit.run_one()
    assert len(kit.seen) >= 2
    assert len(kit.door.headers) == 1


def test_a_reply_that_is_lost_on_its_way_is_noticed():
    kit = Kit()
    kit.fails = kit.door.is_silent = True
    assert kit.after(0)
    kit.run_one()
    assert kit.after(PATIENCE_S)
    assert not kit.after(1)
