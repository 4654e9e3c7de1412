"""Every kind of file dropped into a running daemon at once: what can be served is, and only the rest is named."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models
from tests.models.dropped_files import SILENT, STEADY, check, drop_in, write_dropped

BAR_S = 3 * 60.0
"""Of a processor, until all is decided, without the imports of torch: three times what `bench --only drop_in` holds."""


def ended_cpu_s() -> float:
    """What the children of this process, and theirs, took of a processor until they ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_each_kind_whose_library_is_here_is_served_and_only_the_rest_is_named_with_its_reason(tmp_path: Path) -> None:
    models, files = tmp_path / "models", tmp_path / "files"
    (models / STEADY / "1").mkdir(parents=True)
    onnx_models.mlp(models / STEADY / "1")
    wanted = write_dropped(files)
    before_s = ended_cpu_s()
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        dropped = drop_in(daemon.endpoint, models, files, wanted)
        log = daemon.messages()
        assert daemon.stop() == 0
    check(dropped, wanted)
    assert len(wanted) >= 20
    assert ended_cpu_s() - before_s <= BAR_S
    assert not [line for line in log for name in SILENT if f"/{name}" in line]
