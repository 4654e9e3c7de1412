"""Every kind of file dropped into a running daemon at once: what can be served is, and only the rest is named."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models
from tests.models.dropped_files import SILENT, STEADY, check, drop_in, write_dropped

BAR_S = 3 * 60.0
"""Until all is decided, without the imports of torch: three times what `python -m bench --only drop_in` holds."""


def test_each_kind_whose_library_is_here_is_served_and_only_the_rest_is_named_with_its_reason(tmp_path: Path) -> None:
    models, files = tmp_path / "models", tmp_path / "files"
    (models / STEADY / "1").mkdir(parents=True)
    onnx_models.mlp(models / STEADY / "1")
    wanted = write_dropped(files)
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        dropped = drop_in(daemon.endpoint, models, files, wanted)
        log = daemon.messages()
    check(dropped, wanted)
    assert len(wanted) >= 20
    assert dropped.took_s <= BAR_S
    assert not [line for line in log for name in SILENT if f"/{name}" in line]
