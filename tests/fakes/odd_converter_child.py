"""The function that converts in a child, in the real one's place: makes an adder, or misbehaves as the source asks.

A source is XGBoost's JSON by its first bytes, with a list of words under `odd`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

from edge_runtime.builds.conversions import ConversionReport, ConvertTask
from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.ending import ShowProgress
from tests.contract.models.release_kits import adder


def write_source(path: Path, *words: object) -> Path:
    """A source that the child below converts, or misbehaves at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"learner": {"odd": words}}))
    return part.rename(path)


def convert_oddly(task: ConvertTask, progress: ShowProgress) -> ConversionReport:
    source, work = Path(task.plan.artifact), Path(task.work)
    word, *more = json.loads(source.read_text())["learner"]["odd"]
    progress("odd phase", 0.5)
    (work / "begun").touch()
    made = work / "out"
    adder(made, float(more[0]) if more else 0.0)
    report: dict[str, Any] = {
        "source": str(source),
        "source_format": "an odd one",
        "compared_with": "Odd 1.0",
        "compared_on": "64 made-up rows",
        "tolerance": "largest error 0.001",
        "outputs": [{"name": "y", "max_error": 0.00025, "mean_error": None, "agreement": 1.0, "distinct": 1200}],
        "unjudged": ["z: cannot be judged"],
    }
    match word:
        case "crashing":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hanging":
            (work / "hangs").touch()
            time.sleep(600)
        case "hungry":
            memory = bytearray(600 << 20)
            memory[::4096] = b"x" * len(memory[::4096])
            time.sleep(600)
        case "aborting":
            os.abort()
        case "silent":
            os._exit(0)
        case "stopping":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "crowding":
            _fork(100)
            time.sleep(600)
        case "leaving":
            _fork(3)
        case "spreading":
            _fork(4, b"x" * (100 << 20))
            time.sleep(600)
        case "chattering":
            line = b'{"type": "stage", "stage": "%s", "share": 0.5}\n' % (b"x" * 500)
            while True:
                _report(line * 100)
                os.write(1, b"y" * 60 + b"\n")
        case "nesting":
            _report(b'{"type": "result", "result": ' + b"[" * 100_000 + b"\n")
        case "nesting-result":
            return {"source": [[[{"deep": [[]]}]]]}
        case "counting":
            return {"source": 1 << 80}
        case "scattering":
            for number in itertools.count():
                (work / f"{number}.tmp").write_bytes(b"x" * (8 << 20))
        case "littering":
            for number in itertools.count():
                (work / f"{number}.tmp").touch()
        case "digging":
            os.chdir(work)
            for _ in range(1500):
                os.mkdir("d")  # noqa: PTH102 (no path is that long)
                os.chdir("d")
            os._exit(1)
        case "describing":
            (made / "conversion.json").write_text("{}")
        case "many":
            for number in range(5_000):
                (made / f"{number}.txt").touch()
        case "empty":
            (made / "model.onnx").unlink()
        case "piping":
            (made / "model.onnx").unlink()
            os.mkfifo(made / "model.onnx")
        case "socket":
            (made / "model.onnx").unlink()
            with socket.socket(socket.AF_UNIX) as listener:
                os.chdir(made)
                listener.bind("model.onnx")
        case "folding":
            (made / "model.onnx").unlink()
            (made / "model.onnx").mkdir()
        case "leading-out":
            made.rename(work / "was")
            made.symlink_to("/etc")
        case "weights-outside":
            _point_outside(made / "model.onnx")
        case "differing":
            raise ConversionFailed("answers otherwise than its source: y: largest error 0.5; allowed 0.001")
        case "linking":
            (made / "model.onnx").unlink()
            (made / "model.onnx").symlink_to("/etc/passwd")
        case "filling":
            (made / "model.onnx").write_bytes(bytes(1 << 20))
        case "rewriting":  # as a person would meanwhile
            while _can_read(source) and "rewriting" in source.read_text():  # what replaces it is another file
                time.sleep(0.01)
        case "looking":
            report["seen"] = [path for path in more[1:] if _can_read(Path(path))]
            report["written"] = [str(path) for path in (source.parent, work.parent, Path("/tmp")) if _can_write(path)]
    return report


def _fork(count: int, content: bytes = b"") -> None:
    """Start processes that stay, each with memory of its own."""
    for _ in range(count):
        if os.fork() == 0:
            held = bytearray(content)
            time.sleep(600)
            os._exit(len(held) & 1)


def _report(data: bytes) -> None:
    """Write what is not a report of ours to where reports go: every pipe that is open."""
    for descriptor in (int(path.name) for path in Path("/proc/self/fd").iterdir()):
        if descriptor > 2:
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, data)


def _point_outside(model: Path) -> None:
    """Have a model's weights lie in a file that is not its own."""
    import onnx

    graph = onnx.load(model)
    weight = graph.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../../secret")
    model.write_bytes(graph.SerializeToString())


def _can_read(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def _can_write(folder: Path) -> bool:
    try:
        (folder / "written-by-a-converter").touch()
    except OSError:
        return False
    return True
