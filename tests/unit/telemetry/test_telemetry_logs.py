"""How records look, and that repeating warnings are held back."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from edge_runtime.config.settings import LogSettings
from edge_runtime.telemetry.logs import DIFFERENT, REMEMBERED, REPEAT_S, configure_logging
from tests.fakes.clock import FakeClock

log = logging.getLogger("edge_runtime.test")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class Written:
    """A configured stream and the clock that repeats are judged by."""

    stream: io.StringIO
    clock: FakeClock

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("edge_runtime")
    handlers, level = list(root.handlers), package.level
    yield
    root.handlers[:] = handlers
    package.setLevel(level)


def written(settings: LogSettings | None = None, stream: io.StringIO | None = None) -> Written:
    clock = FakeClock()
    stream = stream or io.StringIO()
    settings = settings or LogSettings()
    configure_logging(settings.level, settings.format, stream, clock)
    return Written(stream, clock)


def test_a_file_gets_one_json_object_a_line_with_the_fields() -> None:
    out = written()
    log.info("loaded", extra={"model": "digits", "took_s": 0.25, "path": __import__("pathlib").Path("/x")})
    (record,) = out.records()
    assert record.pop("time")
    assert record == {
        "level": "info", "logger": "edge_runtime.test", "message": "loaded", "model": "digits", "took_s": 0.25,
        "path": "/x",
    }  # fmt: skip


def test_a_terminal_gets_coloured_text() -> None:
    out = written(stream=Terminal())
    log.warning("slow", extra={"model": "digits", "note": "two words"})
    (line,) = out.lines()
    assert "\x1b[33mwarning" in line
    assert "slow" in line
    assert 'model=digits note="two words"' in line


def test_text_without_a_terminal_has_no_colour() -> None:
    out = written(LogSettings(format="text"))
    log.info("plain")
    assert "\x1b" not in out.stream.getvalue()


def test_the_configuration_may_ask_for_json_on_a_terminal() -> None:
    out = written(LogSettings(format="json"), Terminal())
    log.info("loaded")
    assert out.records()[0]["message"] == "loaded"


def test_a_record_below_the_level_is_not_written() -> None:
    out = written(LogSettings(level="warning"))
    log.info("quiet")
    log.warning("loud")
    assert [record["message"] for record in out.records()] == ["loud"]


def test_control_characters_of_a_client_cannot_reach_the_terminal() -> None:
    out = written(LogSettings(format="text"))
    log.info("refused %s", "\x1b[2J", extra={"model": "a\nb\x1b[2J"})
    (line,) = out.lines()
    assert "\x1b" not in line


def test_a_line_break_in_a_message_makes_no_second_record() -> None:
    out = written(LogSettings(format="text"))
    log.warning("not served: %s", "/models/new\n12:00:00.000 info    all is well\r\u2028")
    (line,) = out.lines()
    assert r"new\n12:00:00.000 info    all is well\r\u2028" in line


def test_json_has_no_line_breaks_of_other_alphabets_and_no_control_characters() -> None:
    out = written()
    said = "a\u2028b\u2029c\x85d\x9b2J\x7f\u202e\U000e0001 \u00e4\u4e2d"
    log.warning("not served: %s", said, extra={"model": said})
    (line,) = out.lines()
    assert line.isprintable()
    assert "\u00e4\u4e2d" in line
    assert out.records()[0]["model"] == said


def test_an_exception_is_kept_with_its_record() -> None:
    out = written()
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    assert "ValueError: broken" in str(out.records()[0]["exception"])


def test_a_field_named_like_ours_does_not_hide_ours() -> None:
    out = written()
    log.info("loaded", extra={"level": "high"})
    assert (out.records()[0]["level"], out.records()[0]["level_"]) == ("info", "high")


def warn(model: str = "digits") -> None:
    log.warning("reply dropped", extra={"model": model})


def test_a_repeating_warning_is_written_once_and_then_with_its_count() -> None:
    out = written()
    for _ in range(5):
        warn()
    assert len(out.lines()) == 1
    out.clock.advance(REPEAT_S)
    warn()
    assert [record.get("repeated") for record in out.records()] == [None, 4]


def test_the_same_warning_of_another_model_is_written() -> None:
    out = written()
    warn("digits")
    warn("vision")
    assert len(out.lines()) == 2


def test_each_of_several_files_that_one_line_warns_of_is_named() -> None:
    out = written()
    for name in ("a.onnx", "b.onnx", "a.onnx"):
        log.warning("not served: %s", name)
        log.warning("a file could not be used", extra={"model": "digits", "file": name})
    assert [record["message"] for record in out.records()] == [
        "not served: a.onnx", "a file could not be used", "not served: b.onnx", "a file could not be used",
    ]  # fmt: skip
    assert [record["file"] for record in out.records() if "file" in record] == ["a.onnx", "b.onnx"]


def test_a_flood_of_different_files_is_held_back_and_counted() -> None:
    out = written()
    for number in range(DIFFERENT + 5):
        log.warning("not served: %s", f"{number}.onnx")
        if number == DIFFERENT + 3:
            out.clock.advance(REPEAT_S)
    assert len(out.lines()) == DIFFERENT + 1
    assert out.records()[-1]["repeated"] == 4


def test_repeated_information_is_never_held_back() -> None:
    out = written()
    for _ in range(3):
        log.info("loaded")
    assert len(out.lines()) == 3


def test_endless_different_warnings_do_not_fill_the_memory() -> None:
    out = written()
    for number in range(REMEMBERED * 3):
        warn(f"model-{number}")
    assert len(out.lines()) == REMEMBERED * 3
    warn(f"model-{REMEMBERED * 3 - 1}")
    assert len(out.lines()) == REMEMBERED * 3


def test_configuring_again_replaces_the_stream() -> None:
    first, second = written(), written()
    log.info("once")
    assert (len(first.lines()), len(second.lines())) == (0, 1)


def test_the_journal_gets_each_line_with_its_priority(tmp_path, monkeypatch) -> None:
    with (tmp_path / "journal").open("w+", encoding="utf-8") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        configure_logging("debug", "text", stream, FakeClock())
        log.debug("looked")
        log.info("loaded")
        log.warning("slow")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
        stream.seek(0)
        priorities = [line[:3] for line in stream]
    assert priorities[:4] == ["<7>", "<6>", "<4>", "<3>"]
    assert len(priorities) > 5  # the traceback's
    assert set(priorities[4:]) == {"<3>"}


def test_a_stream_that_is_not_the_journal_gets_no_priorities(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")  # of a shell's parent, and stderr was redirected since
    with (tmp_path / "file").open("w+", encoding="utf-8") as stream:
        configure_logging("info", "json", stream, FakeClock())
        log.info("loaded")
        stream.seek(0)
        assert json.loads(stream.read())["message"] == "loaded"
