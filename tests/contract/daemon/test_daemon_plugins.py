"""A daemon whose configuration names plug-ins: it serves, whatever becomes of them, and tells their states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client, plugins
from edge_runtime.cli.main import main
from edge_runtime.config.loading import load_config
from edge_runtime.daemon.assemble import assemble_daemon
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


BROKEN_DOOR = """
    from msgspec import Struct
    from edge_runtime.doors.door import DoorDeclaration

    class Settings(Struct, frozen=True):
        fails: str = ""

    DOOR = DoorDeclaration("odd", "odd_door:OddDoor", Settings)

    class OddDoor:
        def __init__(self, context):
            self.fails = context.settings("odd").fails
            self.call("__init__")

        def call(self, name):
            if name == self.fails:
                raise RuntimeError(f"no luck in {name}")

        def start(self): self.call("start")
        def ready(self): self.call("ready")
        def reload(self): self.call("reload")
        def stop_admitting(self, limit_s): self.call("stop_admitting")
        def close(self): self.call("close")
        def status(self):
            self.call("status")
            return {"odd": "is open"}
"""


@pytest.mark.parametrize("fails", ["__init__", "start", "ready", "reload", "stop_admitting", "close", "status", ""])
def test_a_door_of_a_plugin_that_raises_ends_no_daemon(site: PluginSite, tmp_path: Path, fails: str) -> None:
    site.put("odd-door", BROKEN_DOOR, {"doors.odd": "odd_door:DOOR"})
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    plugins.use(["odd-door"])
    with running_daemon(tmp_path / "models", tmp_path / "run", plugins=("odd-door",), odd={"fails": fails}) as daemon:
        daemon.reload(daemon.status._core.config)
        with Client(daemon.endpoints[1]) as client:
            assert client.infer("mlp", {"x": np.zeros((1, 16), np.float32)})
            stats = client.stats()
            told = client.stats()["plugins"][0]
    if fails == "":
        assert (stats["odd"], told["state"]) == ("is open", "ready")
    elif fails not in ("stop_admitting", "close"):
        assert (told["state"], told["reason"]) == ("failed", f"RuntimeError: no luck in {fails}")


def test_a_configuration_of_a_plugin_that_is_missing_starts_without_it(tmp_path: Path) -> None:
    """Its table and its backend are not known, and may be the plug-in's."""
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    file = tmp_path / "config.toml"
    file.write_text(
        f'models = "{tmp_path}/models"\nstate = "{tmp_path}/state"\nplugins = ["absent-one"]\n'
        f'zmq.endpoints = ["ipc://{tmp_path}/i.sock"]\nabsent.port = 3\n'
        '[[backends]]\nname = "absent"\n[[backends]]\nname = "onnxruntime"\n'
    )
    daemon = assemble_daemon(load_config(file, {}))
    try:
        daemon.start()
        with Client(daemon.endpoints[1]) as client:
            assert client.infer("mlp", {"x": np.zeros((1, 16), np.float32)})
    finally:
        daemon.stop()
        plugins.use(())
