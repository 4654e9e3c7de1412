# ruff: noqa: E402  (what follows needs torch, and is left out where there is none)
"""TorchServe's archives whose weights are PyTorch's: converted where they can be, else run in a host with torch."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

import edge_runtime
from edge_runtime_converters.importing.report import ImportedModel
from edge_runtime_converters.importing.writing import ImportOptions, import_source
from tests.contract.pictures.test_pictures import picture
from tests.contract.running_daemon import floats, running_daemon
from tests.models.torchserve_archives import put_archive

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x)
"""

HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class NetHandler(BaseHandler):
    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        return torch.as_tensor(rows, dtype=torch.float32, device=self.device)

    def postprocess(self, data):
        assert isinstance(data, torch.Tensor)
        return data.softmax(1).tolist()
"""

STANDALONE = """
import os

import torch


class ModelHandler(object):
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        properties = context.system_properties
        name = context.manifest["model"]["serializedFile"]
        self.device = torch.device("cuda:" + str(properties.get("gpu_id")) if torch.cuda.is_available() else "cpu")
        self.model = torch.jit.load(os.path.join(properties.get("model_dir"), name))
        self.initialized = True

    def handle(self, data, context):
        rows = torch.tensor([row["body"] for row in data])
        with torch.inference_mode():
            return self.model.forward(rows).argmax(1).tolist()
"""


class Colours(torch.nn.Module):
    """image [rows, 3, 224, 224] -> how much of each colour."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.mean((2, 3)) * 4


class Words(torch.nn.Module):
    """Numbers of words, and where texts begin -> two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(4, 2, mode="sum")
        self.bag.weight.data = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 0.0]])

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bag(text, offsets)
        return found


class Finder(torch.nn.Module):
    """A list of pictures -> losses and what is found in each, as torchvision's detection models do when scripted."""

    def forward(self, images: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        found: list[dict[str, torch.Tensor]] = []
        for image in images:
            size = torch.tensor([0.0, 0.0, float(image.shape[2]), float(image.shape[1])])
            scores = torch.stack([image.mean(), image.mean() / 10])
            found.append({"boxes": torch.stack([size, size]), "labels": torch.tensor([1, 0]), "scores": scores})
        return {}, found


class Segments(torch.nn.Module):
    """image -> {"out": logits}: green and the others."""

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.stack([image[:, 0], image[:, 1]], dim=1)}


class Code:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self._path, "ran")


Take = Callable[..., ImportedModel]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Write an archive and import it; what became of the model."""

    def call(name: str, files: dict[str, bytes | str], shapes: tuple[str, ...] = (), **fields: str) -> ImportedModel:
        archive = put_archive(tmp_path, name, files, **fields)
        options = ImportOptions(source=str(archive), models=str(tmp_path / "models"), shapes=shapes)
        return next(each for each in import_source(options).models if each.name == name)

    return call


def asked(client: edge_runtime.Client, name: str, body: bytes, kind: str) -> Any:
    """Ask a handler as the door of TorchServe's paths does; what it returned."""
    said = json.dumps({"parts": [["body", kind, len(body)]], "headers": {}}).encode()
    inputs = {"body": np.array([[body]], object), "request": np.array([[said]], object)}
    return json.loads(client.infer(name, inputs, timeout_ms=60_000)["answer"][0, 0])


def scripted(module: torch.nn.Module, *example: torch.Tensor) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
        torch.jit.save(torch.jit.trace(module.eval(), example) if example else torch.jit.script(module.eval()), file)
    return file.getvalue()


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def net() -> torch.nn.Module:
    space: dict[str, type[torch.nn.Module]] = {}
    exec(NET, space)
    torch.manual_seed(3)
    return space["Net"]().eval()


def test_torchscript_weights_and_handlers_of_each_kind_answer_as_before(take: Take, tmp_path: Path) -> None:
    module = net()
    script = scripted(module, torch.zeros(2, 16))
    names = json.dumps({"0": "red", "1": "green", "2": "blue"})
    colours = {"c.pt": scripted(Colours(), torch.zeros(2, 3, 224, 224)), "index_to_name.json": names}
    classifier = take("colours", colours, serializedFile="c.pt")
    assert "python" not in " ".join(classifier.files)
    assert len(classifier.conversions) == 1
    kept = take("kept", {"net.pt": script, "h.py": HANDLER}, handler="h.py", serializedFile="net.pt")
    assert "needs torch" in dict(kept.remarks)["net.pt"]
    shaped = take("shaped", {"net.pt": script, "h.py": HANDLER}, ("x=-1,16",), handler="h.py", serializedFile="net.pt")
    assert "shaped.network" in dict(shaped.remarks)["initialize"]
    assert not [file for file in shaped.files if file.endswith(".pt")]
    eager = {"net.pth": saved(module.state_dict()), "model.py": NET, "h.py": HANDLER}
    take("eager", eager, handler="h.py", serializedFile="net.pth", modelFile="model.py")
    take("alone", {"net.pt": script, "h.py": STANDALONE}, handler="h.py:", serializedFile="net.pt")
    text = {"w.pt": scripted(Words()), "source_vocab.pt": saved({"<unk>": 0, "good": 1, "bad": 2}),
            "index_to_name.json": json.dumps({"0": "praise", "1": "complaint"})}  # fmt: skip
    take("words", text, handler="text_classifier", serializedFile="w.pt")
    birds = {"f.pt": scripted(Finder()), "index_to_name.json": json.dumps({"object_type_names": ["ground", "bird"]})}
    take("birds", birds, handler="object_detector", serializedFile="f.pt")
    take("segments", {"s.pt": scripted(Segments())}, handler="image_segmenter", serializedFile="s.pt")
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", python_models=True, start_limit_s=240) as daemon,
        edge_runtime.Client(daemon.endpoints[0]) as client,
    ):
        assert {(each["state"], each["reason"]) for each in client.models()} == {("ready", "")}
        x = floats(1, 16)
        with torch.inference_mode():
            wanted = module(torch.from_numpy(x)).softmax(1)[0].numpy()
        body = json.dumps(x[0].tolist()).encode()
        for name in ("kept", "shaped", "eager"):
            np.testing.assert_allclose(asked(client, name, body, "application/json"), wanted, rtol=1e-4, atol=1e-4)
        assert asked(client, "alone", body, "application/json") == int(wanted.argmax())
        praise = asked(client, "words", b"Good <b>good</b>!", "text/plain")
        assert max(praise, key=praise.get) == "praise"
        found = asked(client, "birds", picture("white", (64, 48)), "image/png")
        assert found == [{"bird": [0.0, 0.0, 64.0, 48.0], "score": 1.0}]
        mask = np.array(asked(client, "segments", picture("lime"), "image/png"))
        assert mask.shape == (224, 224, 2)
        assert (mask[..., 0] == 1).all()
        red = client.infer("colours", {"image": np.array([picture("red")], object)}, timeout_ms=60_000)
        assert red["output"][0, 0, 0] == 0
    assert (tmp_path / "models" / "colours" / "1" / "labels.txt").read_text() == "red\ngreen\nblue\n"


def test_a_pickle_in_place_of_weights_ends_the_load_and_runs_nothing(take: Take, tmp_path: Path) -> None:
    files = {"net.pth": saved(Code(tmp_path / "ran")), "model.py": NET, "h.py": HANDLER}
    take("evil", files, handler="h.py", serializedFile="net.pth", modelFile="model.py")
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", python_models=True, start_limit_s=120) as daemon,
        edge_runtime.Client(daemon.endpoints[0]) as client,
    ):
        (entry,) = client.models()
        assert entry["state"] == "failed"
        assert "save model.state_dict()" in entry["reason"]
    assert not (tmp_path / "ran").exists()


def test_an_exported_program_becomes_the_network_of_its_handler(take: Take, tmp_path: Path) -> None:
    file = io.BytesIO()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(net(), (torch.zeros(2, 16),), dynamic_shapes=({0: rows},))
    torch.export.save(program, file)
    found = take("exported", {"net.pt2": file.getvalue(), "h.py": HANDLER}, handler="h.py", serializedFile="net.pt2")
    assert "exported.network" in dict(found.remarks)["initialize"]
    said = json.loads((tmp_path / "models" / "exported" / "1" / "torchserve.json").read_text())
    assert said["network"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
