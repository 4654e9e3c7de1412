"""What is converted, and what a conversion depends on: without any library that converts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from edge_runtime.builds.conversions import LIBRARIES, MADE, ConversionPlan, machine_bytes, plan_conversion
from edge_runtime.config.settings import ModelSettings, Warmup
from edge_runtime.errors import LoadFailed
from edge_runtime.models.kinds import KINDS
from edge_runtime.models.walk import MAX_VERSION_FILES, scan
from edge_runtime.sandbox.folder_tree import remove_tree
from edge_runtime.typed_toml import parse_toml
from tests.fakes.odd_converter_child import write_source

ROOT = Path(__file__).parents[3]

MODULES = {"scikit-learn": "sklearn", "xgboost-cpu": "xgboost"}
UNASKED = {"nncf"}
"""Of an extra, and of no conversion at load: it makes int8."""


def plan_of(models: Path, settings: ModelSettings | None = None) -> ConversionPlan:
    folder = scan(models).models["m"]
    plan = plan_conversion(settings or folder.settings, folder.versions[1], {"model.onnx", "model.xml"})
    assert plan is not None
    return plan


def distributions(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """What an extra brings, as modules."""
    found: set[str] = set()
    for wanted in extras[extra]:
        name, more = re.match(r"([a-z0-9-]+)(?:\[(.*)\])?", wanted).groups()  # type: ignore[union-attr]
        if name == "edge-runtime":
            found |= {each for other in more.split(",") for each in distributions(other, extras)}
        else:
            found.add(MODULES.get(name, name))
    return found


def test_every_kind_that_converts_has_its_libraries_listed_and_they_are_those_of_its_extra() -> None:
    pyproject = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")
    extras = pyproject["project"]["optional-dependencies"]
    for kind in KINDS:
        if kind.converts_to:
            assert kind.converts_to in MADE
            listed = set(LIBRARIES[kind.extra])
            assert distributions(kind.extra, extras) - UNASKED - listed <= {"numpy"}, kind.extra
            assert listed - distributions(kind.extra, extras) <= {"torch", "sklearn"}, kind.extra


def test_the_key_holds_content_libraries_and_shapes_and_no_name(tmp_path: Path) -> None:
    source = write_source(tmp_path / "m" / "1" / "model.json", "adding", 1)
    key = plan_of(tmp_path).key()
    assert plan_of(tmp_path).key() == key
    shaped = plan_of(tmp_path, ModelSettings(warmup=Warmup(shapes={"x": (2, 3)})))
    assert shaped.shapes == ("x=-1,2,3",)
    newer = ConversionPlan(str(source), shaped.kind, "onnx", (("xgboost", "99"),))
    assert len({key, shaped.key(), newer.key()}) == 3
    source.rename(source.with_name("renamed.json"))
    assert plan_of(tmp_path).key() == key
    write_source(source.with_name("renamed.json"), "adding", 2)
    assert plan_of(tmp_path).key() != key


def test_the_key_of_a_folder_holds_all_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"graph")
    (folder / "variables" / "data").write_bytes(b"one")
    plan = ConversionPlan(str(folder), "a TensorFlow SavedModel", "openvino", ())
    key = plan.key()
    (folder / "variables" / "data").write_bytes(b"two")
    assert plan.key() != key


def test_a_source_that_is_gone_is_a_failed_load(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="cannot be read"):
        ConversionPlan(str(tmp_path / "gone.ubj"), "an XGBoost model", "onnx", ()).key()


def test_a_source_that_no_memory_holds_is_not_read(tmp_path: Path) -> None:
    source = tmp_path / "model.json"
    source.touch()
    os.truncate(source, machine_bytes() + 1)
    with pytest.raises(LoadFailed, match="of memory; convert it where there is more"):
        ConversionPlan(str(source), "an XGBoost model", "onnx", ()).key()


def test_a_folder_with_a_link_or_more_files_than_any_model_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    plan = ConversionPlan(str(folder), "a TensorFlow SavedModel", "openvino", ())
    link = folder / "variables" / "data"
    link.symlink_to("/proc/kcore")
    with pytest.raises(LoadFailed, match="data: is a symbolic link"):
        plan.key()
    link.unlink()
    for number in range(MAX_VERSION_FILES + 1):
        (folder / str(number)).touch()
    with pytest.raises(LoadFailed, match=f"holds more than {MAX_VERSION_FILES} files"):
        plan.key()


def test_a_folder_of_any_depth_is_a_failed_load_or_read(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    here = folder
    for _ in range(600):
        here = here / "d"
    here.mkdir(parents=True)
    (here / "weights").write_bytes(b"one")
    plan = ConversionPlan(str(folder), "a TensorFlow SavedModel", "openvino", ())
    key = plan.key()
    (here / "weights").write_bytes(b"two")
    assert plan.key() != key
    remove_tree(folder)


def test_a_source_that_became_a_link_out_of_the_models_folder_is_not_read(tmp_path: Path) -> None:
    secret = write_source(tmp_path / "secret.json", "adding")
    source = write_source(tmp_path / "models" / "m" / "1" / "model.json", "adding")
    plan = plan_of(tmp_path / "models")
    source.unlink()
    source.symlink_to(secret)
    with pytest.raises(LoadFailed, match="leads outside the models folder"):
        plan.key()


def test_files_that_are_not_models_are_never_converted(tmp_path: Path) -> None:
    for name in ("labels.txt", "index_to_name.json", "notes.json"):
        write_source(tmp_path / "m" / "1" / "model.onnx", "adding").with_name(name).write_text('{"0": "cat"}')
    folder = scan(tmp_path).models["m"]
    (tmp_path / "m" / "1" / "model.onnx").unlink()
    assert plan_conversion(folder.settings, folder.versions[1], {"model.onnx"}) is None
