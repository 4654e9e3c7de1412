"""Names and sizes of files alone say whether a start begins the process that prepares hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.config.settings import BackendSettings, Config
from edge_runtime.daemon.early_parent import LEAST_BYTES, MOST_FILES, begin_early_parent, wants_host
from tests.conftest import children_now

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core nothing overlaps")


def put(models: Path, name: str, size: int) -> None:
    place = models / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    os.truncate(place, size)


def config(models: Path, **settings: Any) -> Config:
    return Config(models=str(models), **settings)


@pytest.mark.parametrize("name", ["net.onnx", "net/1/model.onnx", "net/model.onnx"])
def test_a_large_onnx_file_wants_a_host_wherever_models_lie_and_a_small_one_does_not(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, LEAST_BYTES - 1)
    assert not wants_host(config(tmp_path))
    put(tmp_path, name, LEAST_BYTES)
    assert wants_host(config(tmp_path))


def test_a_named_model_counts_wherever_it_lies(tmp_path: Path) -> None:
    put(tmp_path / "here", "net.onnx", LEAST_BYTES)
    assert wants_host(Config(model={"net": str(tmp_path / "here" / "net.onnx")}))
    assert wants_host(Config(model={"net": str(tmp_path / "here")}))


def test_settings_that_choose_otherwise_want_none_and_always_wants_one_for_any_file(tmp_path: Path) -> None:
    put(tmp_path, "small/1/model.onnx", 10)
    assert wants_host(config(tmp_path, isolation="always"))
    put(tmp_path, "net/1/model.onnx", LEAST_BYTES)
    assert not wants_host(config(tmp_path, isolation="never"))
    assert not wants_host(config(tmp_path, backends=(BackendSettings(name="openvino"),)))


def test_other_files_and_places_that_cannot_be_read_want_none(tmp_path: Path) -> None:
    put(tmp_path, "net/1/model.xml", LEAST_BYTES)
    put(tmp_path, "net/1/deep/er/model.onnx", LEAST_BYTES)
    put(tmp_path, ".hidden/1/model.onnx", LEAST_BYTES)
    (tmp_path / "gone.onnx").symlink_to("nowhere")
    assert not wants_host(config(tmp_path))
    assert not wants_host(config(tmp_path / "nowhere"))


def test_of_a_large_folder_only_its_beginning_is_looked_at(tmp_path: Path) -> None:
    for number in range(MOST_FILES):
        put(tmp_path / "net" / "1", f"{number}.txt", 0)
    put(tmp_path, "net/1/a/model.onnx", LEAST_BYTES)
    assert not wants_host(config(tmp_path))


def test_a_parent_that_is_begun_ends_at_once_when_it_is_dropped(tmp_path: Path) -> None:
    put(tmp_path, "net/1/model.onnx", LEAST_BYTES)
    parent = begin_early_parent(config(tmp_path))
    assert parent is not None
    parent.drop()
    parent.drop()
    assert list(children_now()) == []
