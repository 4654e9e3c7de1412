"""A daemon whose configuration names plug-ins: it serves, whatever becomes of them, and tells their states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client
from edge_runtime.cli.main import main
from tests.contract.running_daemon import put_model, running_daemon
from tests.fakes.plugin_site import PluginSite, plugin_site
from tests.models import onnx_models


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PluginSite]:
    with plugin_site(tmp_path / "site") as made:
        yield made


def test_broken_plugins_end_no_daemon_and_its_status_says_why(
    site: PluginSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.put("crash-one", "import os; os.abort()", {"backends.crash": "crash_one:BACKEND"})
    site.put("wrong-one", "VERB = 3", {"verbs.wrong": "wrong_one:VERB"})
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    named = ("crash-one", "wrong-one", "absent-one")
    with running_daemon(tmp_path / "models", tmp_path / "run", plugins=named) as daemon:
        with Client(daemon.endpoints[0]) as client:
            assert client.infer("mlp", {"x": np.zeros((1, 16), np.float32)})
            told = client.stats()["plugins"]
        assert [(each["distribution"], each["state"]) for each in told] == [
            ("crash-one", "failed"),
            ("wrong-one", "failed"),
            ("absent-one", "missing"),
        ]
        assert "SIGABRT" in told[0]["reason"]
        assert "is of type int" in told[1]["reason"]
        assert main(["status", "--connect", daemon.endpoints[0]]) == 0
    assert "plug-in crash-one crash" in capsys.readouterr().out


def test_a_daemon_without_plugins_reports_nothing_of_them(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Client(daemon.endpoints[0]) as client:
        assert "plugins" not in client.stats()
