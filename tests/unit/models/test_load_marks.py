"""The marks that a daemon leaves behind when it ends during a load, and what the next one makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.durable import PART_SUFFIX
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.load_marks import LoadMarks
from edge_runtime.models.walk import scan

DYING = """
import contextlib, os, signal, sys, threading
from pathlib import Path
from edge_runtime.durable import PART_SUFFIX
from edge_runtime.models.walk import scan
from edge_runtime.models.load_marks import LoadMarks

state, models, boot, end, *names = sys.argv[1:]
marks = LoadMarks(Path(state), boot)
marks.open()
found = scan(Path(models)).models
for name in names[:-1]:
    with marks.loading(found[name], found[name].versions[1]):
        pass
with contextlib.ExitStack() as side_by_side:
    for name in names[-1].split("+"):
        side_by_side.enter_context(marks.loading(found[name], found[name].versions[1]))
    match end:
        case "crash":
            os.abort()
        case "crash beside":
            begun = threading.Event()

            def load(name: str) -> None:
                with marks.loading(found[name], found[name].versions[1]):
                    begun.set()
                    threading.Event().wait()

            threading.Thread(target=load, args=("b",), daemon=True).start()
            begun.wait()
            os.abort()
        case "crash elsewhere":
            other = threading.Thread(target=os.abort)
            other.start()
            other.join()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill in calibration":
            side_by_side.close()
            with marks.calibrating(names[-1], 1):
                os.kill(os.getpid(), signal.SIGKILL)
        case "crash in calibration":
            side_by_side.close()
            with marks.calibrating(names[-1], 1):
                os.abort()
        case "stop":
            marks.close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Device:
    """A state folder and a models folder with the models a and b, and daemons that end while they load."""

    def __init__(self, folder: Path) -> None:
        self.state, self.models = folder / "state", folder / "models"
        for name in ("a", "b"):
            (self.models / name / "1").mkdir(parents=True)
            (self.models / name / "1" / "model.onnx").write_bytes(b"bytes")

    def dies(self, end: str, *loaded: str, boot: str = "one") -> None:
        """A daemon loads these, one after another, and ends in the last; `a+b`: side by side."""
        command = [sys.executable, "-c", DYING, str(self.state), str(self.models), boot, end, *loaded]
        ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert ended.returncode < 0, ended.stderr

    def starts(self, boot: str = "one") -> LoadMarks:
        marks = LoadMarks(self.state, boot)
        marks.open()
        return marks

    def folder(self, model: str = "a") -> ModelFolder:
        return scan(self.models).models[model]

    def why_left_out(self, marks: LoadMarks, model: str = "a") -> str | None:
        folder = self.folder(model)
        return marks.why_left_out(folder, folder.versions[1])


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def test_one_crash_makes_a_suspect_and_two_leave_a_version_out(device: Device) -> None:
    device.dies("crash", "a")
    marks = device.starts()
    assert marks.is_suspect(device.folder())
    assert device.why_left_out(marks) is None
    device.dies("crash", "a")
    marks = device.starts()
    assert not marks.is_suspect(device.folder()), "it is not loaded at all"
    reason = device.why_left_out(marks)
    assert reason is not None
    assert "2 times" in reason
    assert "Aborted" in reason
    assert "edge-runtime models load a --version 1" in reason


def test_only_what_was_being_loaded_is_blamed(device: Device) -> None:
    device.dies("crash", "b", "a")
    marks = device.starts()
    assert marks.is_suspect(device.folder("a"))
    assert not marks.is_suspect(device.folder("b"))


def test_loads_side_by_side_are_all_suspected(device: Device) -> None:
    device.dies("crash", "a+b")
    marks = device.starts()
    assert marks.is_suspect(device.folder("a"))
    assert marks.is_suspect(device.folder("b"))
    device.dies("crash", "a", "b")
    marks = device.starts()
    assert not marks.is_suspect(device.folder("a")), "it was loaded meanwhile"


def test_a_crash_is_the_death_of_the_load_whose_thread_it_was(device: Device) -> None:
    for _ in range(2):
        device.dies("crash beside", "a")
    marks = device.starts()
    assert "2 times in a row" in str(device.why_left_out(marks, "a"))
    assert "Aborted" in str(device.why_left_out(marks, "a"))
    assert marks.is_suspect(device.folder("b"))
    assert device.why_left_out(marks, "b") is None


@pytest.mark.parametrize("end", ["crash elsewhere", "kill in calibration"])
def test_a_process_ended_by_others_leaves_a_suspect_however_often(device: Device, end: str) -> None:
    for _ in range(4):
        device.dies(end, "a")
    marks = device.starts()
    assert marks.is_suspect(device.folder())
    assert device.why_left_out(marks) is None


@pytest.mark.parametrize(
    ("end", "said"), [("kill", "was killed"), ("crash", "Aborted"), ("crash in calibration", "Aborted")]
)
def test_two_deaths_in_a_row_leave_the_version_out(device: Device, end: str, said: str) -> None:
    for _ in range(2):
        assert device.why_left_out(device.starts()) is None
        device.dies(end, "a")
    assert said in str(device.why_left_out(device.starts()))


def test_power_cuts_leave_a_suspect_however_many(device: Device) -> None:
    for number in range(4):
        device.dies("kill", "a", boot=f"boot {number}")
    marks = device.starts("boot 4")
    assert marks.is_suspect(device.folder())
    assert device.why_left_out(marks) is None


def test_a_daemon_that_was_asked_to_stop_blames_nothing(device: Device) -> None:
    device.dies("stop", "a")
    assert not device.starts().is_suspect(device.folder())


def test_a_load_that_ends_well_or_not_clears_its_version(device: Device) -> None:
    device.dies("crash", "a")
    marks, folder = device.starts(), device.folder()
    with pytest.raises(ValueError, match="not loaded"), marks.loading(folder, folder.versions[1]):
        raise ValueError("not loaded")
    assert not marks.is_suspect(folder)
    assert not device.starts().is_suspect(folder)
    assert not list(device.state.iterdir())


def test_changed_files_clear_a_version(device: Device) -> None:
    for _ in range(2):
        device.dies("crash", "a")
    marks = device.starts()
    (device.models / "a" / "1" / "model.onnx").write_bytes(b"others")
    assert device.why_left_out(marks) is None


def test_another_model_toml_clears_a_version(device: Device) -> None:
    for _ in range(2):
        device.dies("crash", "a")
    marks = device.starts()
    (device.models / "a" / "model.toml").write_text('mode = "workers"\n')
    assert device.why_left_out(marks) is None


def test_another_version_of_the_daemon_clears_a_version(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        device.dies("crash", "a")
    monkeypatch.setattr("edge_runtime.models.load_marks.__version__", "999")
    assert device.why_left_out(device.starts()) is None


def test_a_damaged_mark_is_removed(device: Device) -> None:
    device.state.mkdir()
    (device.state / "a-1.json").write_bytes(b"{")
    assert not device.starts().is_suspect(device.folder())
    assert not list(device.state.iterdir())


def test_without_a_folder_or_before_it_is_opened_nothing_is_marked(device: Device) -> None:
    folder = device.folder()
    for marks in (LoadMarks(None), LoadMarks(device.state)):
        with marks.loading(folder, folder.versions[1]):
            assert not device.state.exists()
    opened = LoadMarks(None)
    opened.open()
    assert opened.why_left_out(folder, folder.versions[1]) is None


def test_a_folder_that_cannot_be_written_costs_no_load(device: Device) -> None:
    device.state.write_bytes(b"a file where a folder is wanted")
    marks, folder = device.starts(), device.folder()
    with marks.loading(folder, folder.versions[1]):
        assert not marks.is_suspect(folder)


def test_a_mark_that_a_load_beside_the_one_that_crashed_was_writing_is_removed(device: Device) -> None:
    device.dies("crash", "a")
    (device.state / f"b-1.json.1-2{PART_SUFFIX}").write_bytes(b"{")
    marks = device.starts()
    assert [path.name for path in device.state.iterdir()] == ["a-1.json"]
    assert marks.is_suspect(device.folder("a"))
    assert not marks.is_suspect(device.folder("b"))
