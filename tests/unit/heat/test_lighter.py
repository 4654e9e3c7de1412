"""Lighter variants: which are asked for, and that a load that failed is tried again, both ways."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edge_runtime.errors import LoadFailed
from edge_runtime.heat.lighter import AGAIN_S, LighterVariants
from tests.fakes.clock import FakeClock


class Device:
    """Models that are there, and loads of variants that a test ends."""

    def __init__(self, *models):
        self.clock = FakeClock()
        self.models = list(models)
        self.asked = []
        self._ends = []
        table = SimpleNamespace(live=lambda: [SimpleNamespace(model=each, chain=None) for each in self.models])
        self.variants = LighterVariants(table, SimpleNamespace(load_variant=self._load), self.clock)

    def _load(self, model, precision, done):
        self.asked.append((model, precision))
        self._ends.append(done)

    def end_loads(self, error=None):
        """End the loads under way; return what was asked for since the last call."""
        ends, self._ends = self._ends, []
        for done in ends:
            done(error)
        asked, self.asked = self.asked, []
        return asked

    def switch(self, is_lighter, seconds=0.0):
        """Let this time pass a second at a time, with a reading after each."""
        self.variants.switch(is_lighter)
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.variants.switch(is_lighter)


def failed():
    return LoadFailed("no memory")


def test_variants_are_asked_for_once_while_nothing_fails():
    device = Device("a", "b")
    device.switch(False, 5)
    assert not device.asked
    device.switch(True, AGAIN_S / 2)
    assert device.end_loads() == [("a", "int8"), ("b", "int8")]
    device.switch(False, AGAIN_S / 2)
    assert device.end_loads() == [("a", ""), ("b", "")]
    device.switch(False, 5 * AGAIN_S)
    assert not device.asked


@pytest.mark.parametrize(("is_lighter", "precision"), [(True, "int8"), (False, "")])
def test_a_variant_that_failed_to_load_is_tried_again(is_lighter, precision):
    device = Device("a")
    device.switch(True)
    if not is_lighter:
        device.end_loads()
        device.switch(False)
    assert device.end_loads(failed()) == [("a", precision)]
    device.switch(is_lighter, AGAIN_S)
    assert device.end_loads() == [("a", precision)]


def test_a_model_that_came_while_it_was_hot_gets_its_variant_too():
    device = Device("a")
    device.switch(True)
    device.end_loads()
    device.models.append("late")
    device.switch(True, AGAIN_S)
    assert ("late", "int8") in device.end_loads()
    device.switch(False)
    assert device.end_loads() == [("a", ""), ("late", "")]


def test_a_load_that_takes_long_is_not_asked_for_again_meanwhile():
    device = Device("a")
    device.switch(True, 3 * AGAIN_S)
    assert device.asked == [("a", "int8")]


def test_a_model_comes_back_though_its_variant_is_still_being_loaded():
    device = Device("a")
    device.switch(True)
    device.switch(False)
    assert device.end_loads() == [("a", "int8"), ("a", "")]
    device.switch(False, 2 * AGAIN_S)
    assert not device.asked
