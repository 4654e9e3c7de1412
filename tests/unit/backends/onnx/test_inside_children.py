"""Every operator that may run inside the daemon, run with edge values by each library, in children of a child."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.backends.onnx.rule import OPERATORS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("library", "each", "chains"), [("onnxruntime", 2, 40), ("openvino", 1, 10)])
def test_no_model_that_may_run_inside_crashes_hangs_or_takes_memory_without_bound(library, each, chains):
    command = [sys.executable, "-m", "bench.single_operators", "--library", library]
    done = subprocess.run(
        [*command, "--each", str(each), "--chains", str(chains)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["harm_inside"] == []
    assert done.returncode == 0
    assert report["inside"]["by_operator"] == {**dict.fromkeys(OPERATORS, each), "chain": chains}
    assert report["inside"]["endings"].get("run_failed", 0) == 0, "what loads answers all that it is sent"
