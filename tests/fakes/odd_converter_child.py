"""The function that converts in a child, in the real one's place: makes an adder, or misbehaves as the source asks.

A source is XGBoost's JSON by its first bytes, with a list of words under `odd`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.serving.conversions import ConvertTask
from tests.contract.release_kits import adder


def write_source(path: Path, *words: object) -> Path:
    """A source that the child below converts, or misbehaves at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"learner": {"odd": words}}))
    return part.rename(path)


def convert_oddly(task: ConvertTask, progress: ShowProgress) -> dict[str, Any]:
    source, work = Path(task.plan.artifact), Path(task.work)
    word, *more = json.loads(source.read_text())["learner"]["odd"]
    progress("odd phase", 0.5)
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
        case "differing":
            raise ConversionFailed("answers otherwise than its source: y: largest error 0.5; allowed 0.001")
        case "linking":
            (made / "model.onnx").unlink()
            (made / "model.onnx").symlink_to("/etc/passwd")
        case "filling":
            (made / "model.onnx").write_bytes(bytes(1 << 20))
        case "rewriting":  # as a person would meanwhile
            (work / "begun").touch()
            while _can_read(source) and "rewriting" in source.read_text():  # what replaces it is another file
                time.sleep(0.01)
        case "looking":
            report["seen"] = [path for path in more[1:] if _can_read(Path(path))]
            report["written"] = [str(path) for path in (source.parent, work.parent, Path("/tmp")) if _can_write(path)]
    return report


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
