"""Which answers are copied, how much of a core they take, and that a copy is nobody else's to change."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.updates.golden import TOLERANCES
from edge_runtime.updates.mirror import MAX_COPY_BYTES, Mirror
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of
from tests.fakes.runs import FunctionRunner

SPEC = ModelSpec((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))


class Kit:
    """A mirror whose candidate takes `run_s` by a clock that stands still otherwise."""

    def __init__(self, share=1.0, run_s=1.0, cores=1):
        self.clock = FakeClock()
        self.dispatcher = Dispatcher(self.clock, cores)
        self.seen = []
        self.soon = []

        def run(inputs):
            self.clock.advance(run_s)
            self.seen.append(inputs[0].copy())
            return [inputs[0].copy()]

        candidate = SimpleNamespace(model="m", spec=SPEC, scheduled=SimpleNamespace(layout=Layout(FunctionRunner(run))))
        context = SimpleNamespace(
            dispatcher=self.dispatcher, clock=self.clock, executor=SimpleNamespace(submit=self.soon.append)
        )
        self.mirror = Mirror(candidate, context, share=share, tolerance=TOLERANCES["f32"])

    def answer(self, x=None, y=None, run_s=0.5, batch_rows=1):
        """One request is answered; whoever asked may change its arrays from then on."""
        x = np.zeros((1, 2), np.float32) if x is None else x
        reply = KeptReply()
        request = request_of([x], reply, nbytes=x.nbytes)
        self.mirror.follow(request)
        request.outputs, request.queue_s = [x.copy() if y is None else y], 0.0
        request.run_s, request.batch_rows = run_s, batch_rows
        request.complete()
        assert reply.end is request
        return self

    def run_copies(self):
        while self.soon:
            self.soon.pop(0)()
        return self.mirror.read()


def test_one_copy_is_taken_at_a_time():
    kit = Kit()
    for _ in range(3):
        kit.answer()
    assert len(kit.soon) == 1
    found = kit.run_copies()
    assert (found.requests, found.dropped) == (1, 2)


def test_after_a_copy_its_time_is_rested_so_that_the_share_is_kept():
    kit = Kit(share=0.25, run_s=1.0)
    kit.answer().run_copies()
    kit.clock.advance(2.99)
    assert kit.answer().run_copies().requests == 1
    kit.clock.advance(0.02)
    assert kit.answer().run_copies().requests == 2


def test_no_copy_is_run_while_requests_wait_or_no_core_is_free():
    kit = Kit()
    model = ScheduledModel("other", Layout(FunctionRunner(list)))
    kit.answer()
    kit.dispatcher.admit(model, request_of([np.zeros((1, 2), np.float32)]))
    found = kit.run_copies()
    assert (found.requests, found.dropped) == (0, 1)
    job, _ = kit.dispatcher.next_job()
    assert kit.answer().run_copies().requests == 0
    kit.dispatcher.finish(job, 0.1)
    assert kit.answer().run_copies().requests == 1


def test_arrays_that_the_caller_changes_after_its_answer_are_compared_as_they_were():
    kit = Kit()
    x, y = np.ones((1, 2), np.float32), np.ones((1, 2), np.float32)
    kit.answer(x, y)
    x[:], y[:] = 7, 9
    assert kit.run_copies().different == 0
    assert kit.seen[0].tolist() == [[1, 1]]


def test_a_request_that_is_too_large_is_not_copied():
    kit = Kit()
    found = kit.answer(np.zeros((MAX_COPY_BYTES // 8 + 1, 2), np.float32)).run_copies()
    assert (found.requests, found.dropped) == (0, 1)


def test_a_run_with_others_says_nothing_of_the_current_versions_time_alone():
    kit = Kit()
    assert kit.answer(batch_rows=8).run_copies().current_p95_s is None
    assert kit.answer(run_s=0.5).run_copies().current_p95_s == pytest.approx(0.5, rel=0.2)


def test_other_values_are_different_and_a_nan_always_is():
    kit = Kit()
    kit.answer(y=np.full((1, 2), 5, np.float32))
    assert kit.run_copies().different == 1
    kit.answer(y=np.full((1, 2), np.nan, np.float32))
    assert kit.run_copies().different == 2


def test_after_its_end_nothing_is_taken_run_or_counted():
    kit = Kit()
    kit.answer()
    kit.mirror.close()
    found = kit.run_copies()
    assert (found.requests, kit.seen) == (0, [])
    assert kit.answer().run_copies() == found


class StreamedReply(KeptReply):
    """A reply that may have several parts."""

    user_id = "a name"

    def part(self, request):
        pass


def test_a_request_whose_responses_are_sent_as_they_come_is_left_as_it_is():
    reply = StreamedReply()
    request = request_of([np.zeros((1, 2), np.float32)], reply)
    Kit().mirror.follow(request)
    assert request.reply is reply


def test_a_request_that_is_followed_keeps_its_callers_name_for_it():
    reply = KeptReply()
    reply.user_id = "a name"
    request = request_of([np.zeros((1, 2), np.float32)], reply)
    Kit().mirror.follow(request)
    assert request.reply.user_id == "a name"
