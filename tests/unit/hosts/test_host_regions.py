"""A host reads a client's region where it is, and keeps nothing of one that ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import HostEnded
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.hosts.regions import LENDER, LENT_BYTES, MAX_LENT, RegionBounds, RegionOwner, Regions
from edge_runtime.messages import RegionPlace, TensorHeader
from edge_runtime.tensors import Array
from tests.models import onnx_models, python_models

NBYTES = 1 << 20
LIMIT_S = 60.0


@pytest.fixture
def regions() -> Iterator[Regions]:
    made = Regions(RegionBounds(1 << 30, 1 << 30, 1 << 30))
    yield made
    made.close()


@pytest.fixture
def hosts(regions: Regions) -> Iterator[Hosts]:
    made = Hosts(regions=regions)
    yield made
    made.close()


@pytest.fixture
def instance(tmp_path: Path, hosts: Hosts) -> Iterator[HostInstance]:
    made = HostedBackend(backend("onnxruntime"), hosts).load(onnx_models.mlp(tmp_path), LoadOptions())
    made.finish_warm_up()
    yield made
    made.close()


def shared(owner: RegionOwner, number: int, offset: int, x: Array) -> Array:
    """Write an array into a region, and view it as a request's input."""
    owner.regions[number].data[offset : offset + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
    return owner.input(TensorHeader("x", "FP32", x.shape, RegionPlace(number, offset))).array


def mapped_regions(instance: HostInstance) -> int:
    """How many regions the host maps."""
    return Path(f"/proc/{instance.host.pid}/maps").read_text().count("edge-runtime-region")


def rows(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).random((count, 16), np.float32)


def test_a_host_maps_a_region_once_and_gives_the_answer_of_each_place(instance: HostInstance, regions: Regions) -> None:
    owner = regions.add_owner(0)
    number = regions.allocate(owner, NBYTES)[0]
    for turn in range(3):
        for place in range(5):
            x = rows(2, turn * 5 + place)
            view = shared(owner, number, place * 4096, x)
            assert instance.run_parts([[view]], LIMIT_S)[0].tolist() == instance.run({"x": x})[0].tolist()
    assert mapped_regions(instance) == 1


def test_requests_that_run_together_are_joined_from_regions_and_elsewhere(
    instance: HostInstance, regions: Regions
) -> None:
    owner = regions.add_owner(0)
    number = regions.allocate(owner, NBYTES)[0]
    x = rows(3, 1)
    parts = [[shared(owner, number, 64, x[:1])], [x[1:2]], [shared(owner, number, 8192, x[2:])]]
    np.testing.assert_allclose(instance.run_parts(parts, LIMIT_S)[0], instance.run({"x": x})[0], rtol=1e-5)


def test_a_region_that_ended_is_unmapped_by_an_idle_host_and_its_memory_is_given_up(
    instance: HostInstance, regions: Regions
) -> None:
    owner = regions.add_owner(0)
    number, region = regions.allocate(owner, NBYTES)
    kept = os.dup(region.file.fd)
    view = shared(owner, number, 0, rows(1, 1))
    instance.run_parts([[view]], LIMIT_S)
    del region, view
    regions.remove_owner(owner)
    regions.drain()
    assert regions.snapshot() == {"connections": 0, "regions": 0, "bytes": 0}
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)
    instance.run({"x": rows(1, 2)})  # its host has then taken what was sent before
    assert mapped_regions(instance) == 0


def test_a_region_outlives_its_owner_as_long_as_a_request_uses_it(instance: HostInstance, regions: Regions) -> None:
    owner = regions.add_owner(0)
    number = regions.allocate(owner, NBYTES)[0]
    x = rows(1, 1)
    view = shared(owner, number, 0, x)
    regions.remove_owner(owner)
    got = instance.run_parts([[view]], LIMIT_S)[0]  # outside of an assertion, which would keep the view
    assert got.tolist() == instance.run({"x": x})[0].tolist()
    assert regions.snapshot()["regions"] == 1
    del view
    regions.drain()
    assert regions.snapshot()["regions"] == 0


def test_the_next_host_is_given_the_region_anew(instance: HostInstance, regions: Regions) -> None:
    owner = regions.add_owner(0)
    number = regions.allocate(owner, NBYTES)[0]
    x = rows(1, 1)
    view = shared(owner, number, 0, x)
    want = instance.run_parts([[view]], LIMIT_S)[0].tolist()
    psutil.Process(instance.host.pid).kill()
    while True:
        try:
            assert instance.run_parts([[view]], LIMIT_S)[0].tolist() == want
            break
        except HostEnded:
            instance.restore()
    assert mapped_regions(instance) == 1


def test_lent_memory_is_used_again_once_nothing_views_it(regions: Regions) -> None:
    lender = RegionOwner(LENDER)
    first = regions.lend(lender, 100_000)
    assert first is not None
    part = first.view(np.float32)[10:20]
    address = first.__array_interface__["data"][0]
    found = regions.find(part.__array_interface__["data"][0])
    assert found is not None
    assert found.offset == 40
    del first, found
    second = regions.lend(lender, 100_000)
    assert second is not None
    assert second.__array_interface__["data"][0] != address
    del part
    third = regions.lend(lender, 90_000)
    assert third is not None
    assert third.__array_interface__["data"][0] == address


def test_lent_memory_is_bounded_and_counts_for_no_client(regions: Regions) -> None:
    lender, client = RegionOwner(LENDER), regions.add_owner(os.getuid())
    free = regions.free_bytes(client)
    held = [regions.lend(lender, 100_000) for _ in range(MAX_LENT + 1)]
    assert [each is None for each in held] == [False] * MAX_LENT + [True]
    assert regions.lend(RegionOwner(LENDER), LENT_BYTES + 1) is None
    assert regions.free_bytes(client) == free
    held.clear()
    assert regions.lend(lender, 1_000_000) is None  # those of another size make room for it
    assert regions.lend(lender, 1_000_000) is not None


def test_a_result_that_is_handed_over_is_read_in_place_by_the_next_host(
    tmp_path: Path, hosts: Hosts, regions: Regions
) -> None:
    source = "def infer(inputs):\n    return {'y': inputs['x'] + 1}\n"
    tensors = [("x", "FP32", [1, 50_000])], [("y", "FP32", [1, 50_000])]
    python_models.write(tmp_path / "m", *tensors, source)
    made = HostedBackend(backend("python"), hosts, allows_code=True).load(tmp_path / "m" / "model.py", LoadOptions())
    made.finish_warm_up()
    try:
        made.hands_over = True
        (first,) = made.run_parts([[np.zeros((1, 50_000), np.float32)]], LIMIT_S)
        assert regions.find(first.__array_interface__["data"][0]) is not None
        (second,) = made.run_parts([[first]], LIMIT_S)
        (both,) = made.run_parts([[second]], LIMIT_S)
        assert (first == 1).all()
        assert (second == 2).all()
        assert (both == 3).all()
    finally:
        made.close()
    assert (both == 3).all()


def test_a_host_that_writes_to_its_inputs_changes_no_tensor_of_another_step(
    tmp_path: Path, hosts: Hosts, regions: Regions
) -> None:
    source = "def infer(inputs):\n    inputs['x'] += 1\n    return {'y': inputs['x']}\n"
    tensors = [("x", "FP32", [1, 50_000])], [("y", "FP32", [1, 50_000])]
    python_models.write(tmp_path / "m", *tensors, source)
    made = HostedBackend(backend("python"), hosts, allows_code=True).load(tmp_path / "m" / "model.py", LoadOptions())
    made.finish_warm_up()
    try:
        made.hands_over = True
        (first,) = made.run_parts([[np.zeros((1, 50_000), np.float32)]], LIMIT_S)
        for _ in range(2):
            (second,) = made.run_parts([[first]], LIMIT_S)
            assert (first == 1).all()
            assert (second == 2).all()
        lines = Path(f"/proc/{made.host.pid}/maps").read_text().splitlines()
        assert {line.split()[1] for line in lines if "edge-runtime-region" in line} == {"r--s"}
    finally:
        made.close()
