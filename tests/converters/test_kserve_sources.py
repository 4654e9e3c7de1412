"""KServe's containers for what training libraries write: converted or run by the real libraries, asked as KServe asks.

tests/system/test_kserve.py has the objects, and the formats that take no such library.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import OipClient
from edge_runtime_converters.formats import SourceFormat
from tests.converters.sources import DIGITS, images, needs, source_of
from tests.system.image_root import ImageRoot, unpack
from tests.system.kserve_pod import image_of, image_pod, named, pod, posted

SERVICES = named("inference-services.yaml")


FILES = [
    ("digits-forest", SourceFormat.SKLEARN, "model.skops"),
    ("digits-xgboost", SourceFormat.XGBOOST, "model.json"),
    ("digits-lightgbm", SourceFormat.LIGHTGBM, "model.txt"),
    ("digits-lightgbm", SourceFormat.LIGHTGBM, "model.bst"),
    ("digits-pytorch", SourceFormat.PYTORCH, "model.pt2"),
    ("digits-pytorch", SourceFormat.TORCHSCRIPT, "model.pt"),
]
"""A service, and a file that it may have."""


@pytest.mark.parametrize(("name", "source_format", "file"), FILES)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trained_model_is_served_under_the_services_name_over_http_and_grpc(
    name: str, source_format: SourceFormat, file: str, tmp_path: Path
) -> None:
    source = source_of(source_format, tmp_path)
    serve(name, source, file, tmp_path)


@pytest.mark.root
@pytest.mark.parametrize(("name", "source_format", "file"), [each for each in FILES if "pytorch" not in each[0]])
def test_the_image_serves_a_trained_model_from_a_read_only_root(
    name: str, source_format: SourceFormat, file: str, tmp_path: Path
) -> None:
    image = unpack(image_of(SERVICES[name]), DIGITS.parents[1], tmp_path / "image")
    serve(name, source_of(source_format, tmp_path), file, tmp_path, image)


def test_a_booster_that_xgboost_called_bst_is_served(tmp_path: Path) -> None:
    (xgboost,) = needs("xgboost")
    booster = xgboost.Booster(model_file=source_of(SourceFormat.XGBOOST, tmp_path))
    (tmp_path / "booster.bst").write_bytes(booster.save_raw("ubj"))
    serve("digits-xgboost", tmp_path / "booster.bst", "model.bst", tmp_path)


def serve(name: str, source: Path, file: str, folder: Path, image: ImageRoot | None = None) -> None:
    """Serve a source as KServe would, and ask it over HTTP by both protocols, and over gRPC."""
    (folder / "files").mkdir()
    shutil.copyfile(source, folder / "files" / file)
    service, rows = SERVICES[name], images(3)
    starting = image_pod(service, folder / "files", folder, image) if image else pod(service, folder / "files", folder)
    with starting as started:
        started.wait_until_ready()
        with OipClient(f"grpc://127.0.0.1:{started.grpc}") as client:
            (described,) = client.metadata(name)["inputs"]
            by_grpc = client.infer(name, {described["name"]: rows}).outputs
        tensor = {"name": described["name"], "shape": [3, 64], "datatype": "FP32", "data": rows.tolist()}
        status, fields = posted(started.http, f"/v2/models/{name}/infer", {"inputs": [tensor]})
        assert (status, fields["model_name"]) == (200, name)
        by_http = {each["name"]: np.reshape(each["data"], each["shape"]) for each in fields["outputs"]}
        assert by_http.keys() == by_grpc.keys()
        assert all(np.allclose(by_http[each], by_grpc[each]) for each in by_grpc)
        status, fields = posted(started.http, f"/v1/models/{name}:predict", {"instances": rows.tolist()})
        assert (status, len(fields["predictions"])) == (200, 3)
