"""Weights go into the module that a model.py defines, as docs/python-models.md has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_runtime
from tests.contract.backends.test_python_models_page import BLOCKS
from tests.contract.running_daemon import running_daemon
from tests.converters.sources import images, needs

NAME = "models/network/1/model.py"


def module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("network_of_the_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("way", ["safetensors", "weights_only"])
def test_weights_are_served_by_the_module_of_the_page(tmp_path: Path, way: str) -> None:
    torch, safetensors = needs("torch", "safetensors.torch")
    file = tmp_path / NAME
    file.parent.mkdir(parents=True)
    text, told = BLOCKS[NAME], 'load_file(folder / "weights.safetensors")'
    assert told in text
    if way == "weights_only":
        text = text.replace(told, 'torch.load(folder / "weights.pth", weights_only=True)')
    file.write_text(text)
    torch.manual_seed(5)
    network = module_of(file).Network()
    if way == "weights_only":
        torch.save(network.state_dict(), file.parent / "weights.pth")
    else:
        safetensors.save_file(network.state_dict(), file.parent / "weights.safetensors")
    image = images(3)
    with torch.inference_mode():
        wanted = network(torch.from_numpy(image)).numpy()
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", python_models=True, start_limit_s=120) as daemon,
        edge_runtime.Client(daemon.endpoints[0]) as client,
    ):
        (entry,) = client.models()
        assert (entry["state"], entry["reason"]) == ("ready", "")
        got = client.infer("network", {"image": image})["scores"]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
