"""What the demonstration measures is what it says: in turn, the warm-up left out, percentiles over all answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from demo.daemon import DemoFailed
from demo.digits import load_held_out
from demo.latency import Flood, Images, Raw, Round, measure
from demo.run_demo import told_of_others
from demo.screen import Screen
from demo.train_digits import MODEL_FILE

IMAGES = np.zeros((4, 64), np.float32)


class Recorded:
    """A way whose rounds are known beforehand; notes when it was asked."""

    def __init__(self, title: str, rounds: list[Round], asked: list[str]) -> None:
        self.title = title
        self.in_flight = 1
        self._rounds = iter(rounds)
        self._asked = asked

    def round(self, images: Images, seconds: float) -> Round:
        self._asked.append(self.title)
        return next(self._rounds)


def test_ways_are_measured_in_turn_and_the_first_round_is_not_counted() -> None:
    asked: list[str] = []
    slow_start = Round([1000.0], 1.0, 1)
    first = Recorded("first", [slow_start, Round([1.0] * 4, 2.0, 2), Round([3.0] * 4, 1.0, 2)], asked)
    second = Recorded("second", [slow_start, Round([5.0], 1.0, 1), Round([5.0], 1.0, 1)], asked)
    figures, _ = measure([first, second], IMAGES, rounds=2, seconds=1.0, progress=lambda _: None)
    assert asked == ["first", "second"] * 3
    assert figures.p50_ms == 2.0
    assert figures.p99_ms == 3.0
    assert figures.per_s == 3.0
    assert figures.batch_rows == 2.0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_raw_backend_answers_from_as_many_threads_as_asked(in_flight: int) -> None:
    images = load_held_out().images.astype(np.float32)
    raw, seconds = Raw(MODEL_FILE, in_flight), 0.05
    while (found := raw.round(images, seconds)).runs < in_flight:  # others had the cores
        seconds *= 2
    assert found.runs == len(found.latencies_ms)
    assert found.seconds > 0
    assert sum(found.latencies_ms) / 1e3 <= found.seconds * in_flight


def test_the_raw_backend_gives_the_models_own_answers() -> None:
    images = load_held_out().images.astype(np.float32)
    scores, digit = Raw(Path(MODEL_FILE), 1).answer(images)
    wanted = onnxruntime.InferenceSession(MODEL_FILE).run(None, {"image": images})
    np.testing.assert_allclose(scores, wanted[0], atol=1e-5)
    np.testing.assert_array_equal(digit, wanted[1])


def test_late_replies_fail_the_demonstration_where_the_cores_were_its_own() -> None:
    late = Flood(answered_ms=[1.0], given_up_ms=[1250.0], others=0.1)
    with pytest.raises(DemoFailed, match=r"^1 replies were late, though other programs took 10% of the cores' time"):
        told_of_others(late)
    assert told_of_others(Flood(answered_ms=[1.0], others=0.1)) == []


def test_late_replies_are_laid_to_other_programs_where_these_had_the_cores() -> None:
    lines = told_of_others(Flood(answered_ms=[1.0], given_up_ms=[1250.0], others=0.6))
    assert lines[0].startswith("other programs took 60% of the cores' time")


def test_a_table_lines_words_up_to_the_left_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table(["model", "p50 ms"], [["digits", "0.1"], ["mobilenetv2", "12.5"]])
    assert capsys.readouterr().out.splitlines() == [
        "  model        p50 ms",
        "  digits          0.1",
        "  mobilenetv2    12.5",
    ]


def test_a_pipe_gets_no_colours_and_no_changing_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.progress("loading")
    screen.end_progress()
    screen.line(screen.paint("99 %", "green"))
    assert capsys.readouterr().out == "99 %\n"
