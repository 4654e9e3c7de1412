"""A door that nobody here knows: declared, configured and opened without one edit in the core."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from msgspec import Struct

from edge_runtime import plugins
from edge_runtime.config.loading import load_config
from edge_runtime.daemon.assemble import assemble_daemon
from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.errors import ConfigError

CALLS = []


class BellSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of `[bell]`."""

    rings: int
    is_silent: bool = False


class BellDoor:
    """Notes what it is told."""

    def __init__(self, context):
        self.context = context
        self.settings = context.settings("bell")
        self.frontend = context.new_frontend("bell")

    def start(self):
        CALLS.append("start")

    def ready(self):
        CALLS.append(f"ready: {self.context.status.is_ready}")

    def reload(self):
        CALLS.append("reload")

    def stop_admitting(self, limit_s):
        self.context.loop.call(self.frontend.drain)
        CALLS.append("stop_admitting")

    def close(self):
        CALLS.append("close")

    def status(self):
        return {"bell": {"rings": self.settings.rings}}


def serve(tmp_path, text):
    (tmp_path / "models").mkdir(exist_ok=True)
    file = tmp_path / "config.toml"
    head = f'models = "{tmp_path}/models"\nstate = "{tmp_path}/state"\nzmq.endpoints = ["ipc://{tmp_path}/i.sock"]\n'
    file.write_text(f"{head}{text}")
    config = load_config(file, {})
    return config, assemble_daemon(config)


@pytest.fixture
def bell(monkeypatch):
    """The door's module, as its distribution would bring it, found among the plug-ins in use."""
    module = ModuleType("stranger_bell")
    module.DOOR = DoorDeclaration("bell", "stranger_bell:open_bell", BellSettings, keys=("rings",))
    module.open_bell = BellDoor
    monkeypatch.setitem(sys.modules, "stranger_bell", module)
    found = plugins.Plugin("doors", "bell", "stranger", "1.0", "found", location="stranger_bell:DOOR")
    monkeypatch.setattr(plugins, "_used", (found,))
    CALLS.clear()


@pytest.mark.usefixtures("bell")
def test_a_door_that_nobody_here_knows_lives_as_long_as_the_daemon(tmp_path):
    config, daemon = serve(tmp_path, "[bell]\nrings = 3\n")
    try:
        assert daemon.start()
        assert daemon.status.stats()["bell"] == {"rings": 3}
        daemon.reload(config)
    finally:
        daemon.stop()
    assert CALLS == ["start", "ready: True", "reload", "stop_admitting", "close"]


@pytest.mark.usefixtures("bell")
@pytest.mark.parametrize("text", ["", "[bell]\nrings = 0\n"])
def test_a_door_without_its_table_or_its_key_is_not_opened(tmp_path, text):
    _, daemon = serve(tmp_path, text)
    daemon.stop()
    assert daemon.doors == {}


@pytest.mark.usefixtures("bell")
def test_a_mistake_in_the_table_of_a_strangers_door_is_reported_like_one_of_ours(tmp_path):
    with pytest.raises(ConfigError, match="bell: ringz: unknown key 'ringz'; did you mean 'rings'"):
        serve(tmp_path, "[bell]\nringz = 3\nrings = 3\n")


def test_a_table_of_no_door_is_an_unknown_key_that_names_the_doors(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'htpp'; did you mean 'http'"):
        serve(tmp_path, "[htpp]\nendpoint = '127.0.0.1:0'\n")
