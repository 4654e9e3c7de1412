"""A backend that nobody here knows: a distribution brings it, a profile names it, and no file of the core is edited."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client, plugins
from edge_runtime.cli.main import main
from edge_runtime.config.settings import BackendSettings, ModelSettings
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.errors import ConfigError, RunFailed
from edge_runtime.publish.trial import try_artifact
from edge_runtime.sandbox.child import run_child
from edge_runtime.tuning.trial import WayTask, try_way
from tests.contract.running_daemon import running_daemon
from tests.fakes.plugin_site import PluginSite, plugin_site
from tests.models import onnx_models

TOY = """
    import os

    import numpy as np

    from edge_runtime.backends.base import Probe
    from edge_runtime.backends.declaration import Declaration
    from edge_runtime.errors import BackendUnavailable, LoadFailed
    from edge_runtime.model_spec import ModelSpec, TensorSpec

    BACKEND = Declaration(name="toy", factory="toy_one:ToyBackend", artifacts=("model.toy", "model.rknn"))


    class ToyBackend:
        declaration = BACKEND

        def probe(self):
            return Probe("toy", is_available=True, version="1.5", devices=("TOY:0",))

        def load(self, artifact, options):
            if artifact.with_name("no device").exists():
                raise BackendUnavailable("toy: TOY:0 is not there; plug it in")
            magic, _, factor = artifact.read_text().partition(" ")
            if magic != "\x7fTOY":
                raise LoadFailed(f"{artifact.name} is not a toy: it begins with {magic!r}")
            return ToyInstance(float(factor))


    class ToyInstance:
        backend, device, precision, concurrency, memory_bytes = "toy", "TOY:0", "f32", 1, 4096
        spec = ModelSpec((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))

        def __init__(self, factor):
            self.factor = factor

        def run(self, inputs, outputs=None):
            if float(inputs["x"].flat[0]) == 13.0:
                os.abort()
            return [inputs["x"] * np.float32(self.factor)]

        def bind(self, max_rows):
            return None

        def close(self):
            pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PluginSite]:
    with plugin_site(tmp_path / "site") as made:
        made.put("toy-one", TOY, {"backends.toy": "toy_one:BACKEND"})
        yield made


def put_toy(folder: Path, name: str = "model.toy", content: str = "\x7fTOY 3") -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text(content)


def serving(tmp_path: Path) -> AbstractContextManager[Daemon]:
    """A daemon whose configuration names the distribution, and the backend in its profile's place."""
    chosen = (BackendSettings(name="toy"), BackendSettings(name="onnxruntime"))
    return running_daemon(tmp_path / "models", tmp_path / "run", plugins=("toy-one",), backends=chosen)


@pytest.mark.parametrize("name", ["model.toy", "best.toy", "best.rknn"])
def test_a_profile_chooses_it_and_a_host_serves_its_model(site: PluginSite, tmp_path: Path, name: str) -> None:
    put_toy(tmp_path / "models" / "m" / "1", name)
    with serving(tmp_path) as daemon, Client(daemon.endpoints[0]) as client:
        result = client.infer("m", {"x": np.array([[1, 2]], np.float32)})
        np.testing.assert_array_equal(result["y"], [[3, 6]])
        (entry,) = client.models()
        assert (entry["state"], entry["backend"], entry["device"]) == ("ready", "toy", "TOY:0")
        assert entry["host"]["pid"] != os.getpid()


def test_models_list_and_the_probes_of_profile_show_name_it(
    site: PluginSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_toy(tmp_path / "models" / "m" / "1")
    with serving(tmp_path) as daemon:
        assert main(["models", "list", "--connect", daemon.endpoints[0]]) == 0
        assert "toy" in capsys.readouterr().out
        assert main(["profile", "show", "--json"]) == 0
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)["backends"]}
    assert told["toy"]["devices"] == ["TOY:0"]
    assert [*told][-1] == "toy"


def test_its_file_alone_in_the_models_folder_is_a_model(site: PluginSite, tmp_path: Path) -> None:
    put_toy(tmp_path / "models", "m.toy")
    with serving(tmp_path) as daemon, Client(daemon.endpoints[0]) as client:
        assert [entry["name"] for entry in client.models()] == ["m"]
        np.testing.assert_array_equal(client.infer("m", {"x": np.ones((1, 2), np.float32)})["y"], [[3, 3]])


def test_its_words_about_a_broken_file_are_the_reason_of_the_version(site: PluginSite, tmp_path: Path) -> None:
    put_toy(tmp_path / "models" / "m" / "1", content="a doll")
    with serving(tmp_path) as daemon, Client(daemon.endpoints[0]) as client:
        (entry,) = client.models()
        assert (entry["state"], entry["reason"]) == ("failed", "toy: model.toy is not a toy: it begins with 'a'")


def test_a_run_that_ends_its_process_fails_alone_and_the_next_host_serves(site: PluginSite, tmp_path: Path) -> None:
    put_toy(tmp_path / "models" / "m" / "1")
    with serving(tmp_path) as daemon, Client(daemon.endpoints[0]) as client:
        with pytest.raises(RunFailed, match="SIGABRT"):
            client.infer("m", {"x": np.full((1, 2), 13, np.float32)})
        np.testing.assert_array_equal(client.infer("m", {"x": np.ones((1, 2), np.float32)})["y"], [[3, 3]])


def test_a_missing_device_leaves_its_model_to_the_next_backend_and_a_load_tries_it_again(
    site: PluginSite, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "m" / "1"
    put_toy(folder)
    onnx_models.mlp(folder)
    absent = folder / "no device"
    absent.touch()
    with serving(tmp_path) as daemon, Client(daemon.endpoints[1]) as client:
        assert [each["backend"] for each in client.models()] == ["onnxruntime"]
        absent.unlink()
        client.load("m")
        assert [(each["backend"], each["state"]) for each in client.models()] == [("toy", "ready")]
        np.testing.assert_array_equal(client.infer("m", {"x": np.array([[1, 2]], np.float32)})["y"], [[3, 6]])


def test_a_publishers_trial_and_a_tunes_trial_load_it_in_their_children(site: PluginSite, tmp_path: Path) -> None:
    put_toy(tmp_path / "m" / "1")
    plugins.use(("toy-one",))
    artifact = tmp_path / "m" / "1" / "model.toy"
    assert try_artifact("toy", artifact, {}).result.outputs[0].shape == (-1, 2)
    task = WayTask("toy", str(artifact), "", "", 1, ModelSettings())
    ending = run_child(try_way, task, limit_s=60, reads=[artifact.parent])
    assert ending.reason == ""
    found = ending.result
    assert found is not None
    assert (found.fault, found.precision, found.interface) == ("", "f32", "x FP32 -> y FP32")


def test_without_the_plugin_its_name_is_not_a_backends_and_its_file_not_a_model(tmp_path: Path) -> None:
    put_toy(tmp_path / "models" / "m" / "1")
    with (
        pytest.raises(ConfigError, match=r"backends.name: got 'toy', wanted one of onnxruntime, .* python"),
        running_daemon(tmp_path / "models", tmp_path / "run", backends=(BackendSettings(name="toy"),)),
    ):
        pass
    assert plugins.used() == ()
