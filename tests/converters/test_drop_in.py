"""The same drop as in tests/contract/models/test_drop_in.py, with the libraries that serve and convert the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.models.test_drop_in import BAR_S, ended_cpu_s
from tests.converters.sources import present
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models
from tests.models.dropped_files import NEEDS_TORCH, STEADY, check, drop_in, most_together, write_dropped
from tests.models.mutated_files import REAL


def test_trees_and_pipelines_are_converted_one_at_a_time_within_the_promised_time(tmp_path: Path) -> None:
    present("xgboost", "lightgbm", "skops")
    _drop(tmp_path, tuple(kind for kind in REAL if kind not in NEEDS_TORCH), BAR_S)


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace warns that it goes
def test_pytorchs_files_are_served_where_pytorch_is(tmp_path: Path) -> None:
    present("torch")
    _drop(tmp_path, tuple(NEEDS_TORCH), None)


def _drop(folder: Path, kinds: tuple[str, ...], bar_s: float | None) -> None:
    models, files = folder / "models", folder / "files"
    (models / STEADY / "1").mkdir(parents=True)
    onnx_models.mlp(models / STEADY / "1")
    wanted = write_dropped(files, kinds)
    before_s = ended_cpu_s()
    with DaemonProcess(folder) as daemon:
        daemon.wait_ready()
        dropped = drop_in(daemon.endpoint, models, files, wanted)
        assert most_together(daemon.log()) == 1, "conversions run, and one at a time"
        assert daemon.stop() == 0
    check(dropped, wanted)
    assert bar_s is None or ended_cpu_s() - before_s <= bar_s
