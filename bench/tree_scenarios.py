"""Trees: a model of XGBoost, converted and served one row a request, beside the library's own predict in process.

XGBoost is in the converters' environment alone (`make test-converters` makes it), so a child of that Python trains,
converts and measures; the daemon is this one's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import raw_trees
from bench.makers import BenchModel
from bench.scenarios import HERE, Bench
from bench.servers import REPOSITORY, BenchError

IN_FLIGHT = 64
MAKING_S = 120.0


def trees(bench: Bench) -> None:
    """500 trees, 64 in flight, against XGBoost's predict on batches of 32: the better of one thread and of all."""
    figures = bench.figures
    python = _python_with_xgboost()
    if python is None:
        figures.note("trees", "not measured: xgboost is not installed; make test-converters makes an environment of it")
        return
    folder = bench.children.folder / "trees"
    folder.mkdir()
    _asked(python, "make", str(folder), limit_s=MAKING_S)
    model = BenchModel("trees", folder / "model.onnx", (raw_trees.FEATURES,), 3)
    request, daemon = bench.request(model), bench.daemon(model)
    daemon.start_and_settle(request)
    for number in bench.rounds("trees"):
        loads, raw = None, {}
        for what in ("served", "raw")[:: -1 if number % 2 else 1]:
            if what == "served":
                loads = bench.rate(daemon.endpoint, request, IN_FLIGHT)
            else:
                seconds = max(0.2, bench.seconds / 3)
                said = _asked(python, "measure", str(folder), f"{seconds}", limit_s=seconds * 10 + 60)
                raw = json.loads(said)
        assert loads is not None
        best = max(raw["one"], raw["all"], raw["matrix"])
        figures.add("trees.ratio", loads.rate / best)
        figures.add("trees.rate", loads.rate)
        figures.add("trees.raw", best)
        figures.add("trees.callers_ratio", loads.rate / raw["callers"])
        figures.add("trees.operator_ratio", raw["unlike_onnx"] / raw["unlike"])
        figures.add("trees.p99_ms", loads.p99_ms)
    mode = daemon.control("models")[0]["mode"]
    joins = f", joins {daemon.calibrated_rows('trees')} rows at most" if mode == "workers" else ""
    figures.note("trees", f"runs {mode}{joins}")
    daemon.stop()


SCENARIOS = {"trees": trees}


# ---- private --------------------------------------------------------------------------------------------------------


def _python_with_xgboost() -> Path | None:
    """This Python, or the converters'; the first that has XGBoost."""
    for python in (Path(sys.executable), REPOSITORY / "build" / "convert" / "venv" / "bin" / "python"):
        command = [str(python), "-c", "import xgboost, edge_runtime_converters"]
        if python.exists() and not subprocess.run(command, capture_output=True, check=False).returncode:
            return python
    return None


def _asked(python: Path, *words: str, limit_s: float) -> str:
    command = [str(python), str(HERE / "raw_trees.py"), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if found.returncode:
        raise BenchError(f"raw_trees.py {words[0]} failed: {found.stderr.strip()[-500:]}")
    return found.stdout
