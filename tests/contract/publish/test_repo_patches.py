"""Patches between releases: made where they pay, and any zstd turns the old file into the new one with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from backports import zstd
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.errors import PublishError, UpdateError
from edge_runtime.publish.assignments import assign
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import ReleaseOptions, prepare_release
from edge_runtime.publish.roles import add_group, add_team
from edge_runtime.updates.manifest import Manifest, decode_manifest, encode_manifest
from tests.fakes.publishing import Publisher, TufDevice
from tests.models.onnx_models import save

SIZE = 256
SHARED_ROWS = 5
"""Matrices of which all but the last stay the same from version to version: 1/6 of the bytes change."""


def layered(folder: Path, version: int, *, shares: bool = True) -> Path:
    """x FP32 [rows, SIZE] -> y through six matrices: the last, or with `shares` false each, is the version's own."""
    nodes, weights, name = [], [], "x"
    for layer in range(SHARED_ROWS + 1):
        is_own = layer == SHARED_ROWS or not shares
        random = np.random.default_rng((layer, version if is_own else 0))
        weights.append(numpy_helper.from_array(random.normal(0, 0.06, (SIZE, SIZE)).astype(np.float32), f"w{layer}"))
        result = "y" if layer == SHARED_ROWS else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [result]))
        name = result
    shape = ["rows", SIZE]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    save(folder / "layered" / str(version), helper.make_graph(nodes, "graph", tensors[:1], tensors[1:], weights))
    return folder / "layered"


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    return publisher


def publish(publisher: Publisher, path: Path, patches: int = 3) -> Manifest:
    with publisher.opened() as repository:
        prepared = prepare_release(repository, ReleaseOptions("vision", path, patches=patches))
        prepared.change.commit()
    return prepared.manifest


def test_a_device_gets_the_new_model_from_the_old_one_and_a_small_patch(publisher: Publisher, tmp_path: Path) -> None:
    path = tmp_path
    assert publish(publisher, layered(path, 1)).delta == ()
    publish(publisher, layered(path, 2))
    manifest = publish(publisher, layered(path, 3))
    files = {
        hashlib.sha256(data).hexdigest(): data
        for data in ((path / "layered" / str(version) / "model.onnx").read_bytes() for version in (1, 2, 3))
    }
    device = TufDevice(publisher.path, tmp_path / "device", publisher.root_1)
    old, new = list(files)[:2], manifest.artifacts[0]
    assert [delta.from_sha256 for delta in manifest.delta] == old[::-1]
    for delta in manifest.delta:
        patch = device.fetch(delta.target)
        assert patch is not None
        assert (delta.size, delta.sha256) == (len(patch), hashlib.sha256(patch).hexdigest())
        assert delta.size <= 0.20 * new.length
        prefix = zstd.ZstdDict(files[delta.from_sha256], is_raw=True).as_prefix
        whole = zstd.decompress(patch, zstd_dict=prefix, options={zstd.DecompressionParameter.window_log_max: 27})
        assert hashlib.sha256(whole).hexdigest() == delta.to_sha256 == new.sha256


def test_only_the_last_releases_get_patches_and_none_where_nobody_wants_them(
    publisher: Publisher, tmp_path: Path
) -> None:
    for version in (1, 2):
        publish(publisher, layered(tmp_path, version))
    assert len(publish(publisher, layered(tmp_path, 3), patches=1).delta) == 1
    assert publish(publisher, layered(tmp_path, 4), patches=0).delta == ()


def test_a_patch_that_does_not_pay_is_not_made(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, layered(tmp_path, 1))
    assert publish(publisher, layered(tmp_path, 2, shares=False)).delta == ()


def test_the_same_bytes_again_need_no_patch(publisher: Publisher, tmp_path: Path) -> None:
    for _ in range(2):
        manifest = publish(publisher, layered(tmp_path, 1))
    assert manifest.delta == ()


def test_an_old_file_that_somebody_changed_makes_no_patch(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, layered(tmp_path, 1))
    blob = next((publisher.path / "targets" / "team" / "vision" / "layered" / "1").glob("*.model.onnx"))
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(PublishError, match="was changed after it was signed"):
        publish(publisher, layered(tmp_path, 2))
    assert publish(publisher, layered(tmp_path, 2), patches=0).version == 2


def test_a_bundle_has_the_whole_file_and_no_patch(publisher: Publisher, tmp_path: Path) -> None:
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    for version in (1, 2):
        publish(publisher, layered(tmp_path, version))
    publisher.carry_out(lambda repository: assign(repository, "line", "layered", 2))
    with publisher.opened() as repository:
        write_bundle(repository, "line", tmp_path / "usb")
    names = sorted(path.name.partition(".")[2] for path in (tmp_path / "usb" / "targets" / "team").rglob("*.*"))
    assert names == ["golden.bin", "manifest.json", "model.onnx"]


def test_a_signed_patch_of_another_release_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, layered(tmp_path, 1))
    manifest = publish(publisher, layered(tmp_path, 2))
    data = encode_manifest(manifest).replace(
        b"layered/2/" + Path(manifest.delta[0].target).name.encode(), b"layered/1/x"
    )
    with pytest.raises(UpdateError, match="which is not below"):
        decode_manifest(data, "team/vision/layered/2/manifest.json")
