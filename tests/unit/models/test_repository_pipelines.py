"""Pipelines in the models folder: where `pipeline.toml` and `steps.py` may lie, and what changes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.models.walk import scan


def put(root: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def pipelines(root: Path) -> dict[str, dict[int, str | None]]:
    """By model and version: where its pipeline.toml lies."""
    found = scan(root).models
    return {
        name: {
            number: version.chain_file and str(version.chain_file.relative_to(root))
            for number, version in model.versions.items()
        }
        for name, model in found.items()
    }


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["p/pipeline.toml"], {1: "p/pipeline.toml"}),
        (["p/pipeline.toml", "p/1/", "p/2/"], {1: "p/pipeline.toml", 2: "p/pipeline.toml"}),
        (["p/pipeline.toml", "p/3/pipeline.toml"], {3: "p/3/pipeline.toml"}),
        (["p/2/pipeline.toml"], {2: "p/2/pipeline.toml"}),
        (["p/1/model.onnx"], {1: None}),
    ],
)
def test_a_pipeline_is_found_with_and_without_version_folders(
    tmp_path: Path, files: list[str], found: dict[int, str | None]
) -> None:
    put(tmp_path, *(file for file in files if not file.endswith("/")))
    for file in files:
        if file.endswith("/"):
            (tmp_path / file).mkdir()
    assert pipelines(tmp_path) == {"p": found}
    assert scan(tmp_path).problems == ()


def test_a_versions_own_files_stand_before_the_models(tmp_path: Path) -> None:
    put(tmp_path, "p/pipeline.toml", "p/steps.py", "p/1/steps.py", "p/2/pipeline.toml")
    first, second = scan(tmp_path).models["p"].versions.values()
    assert first.files == {"pipeline.toml": tmp_path / "p/pipeline.toml", "steps.py": tmp_path / "p/1/steps.py"}
    assert second.files == {"pipeline.toml": tmp_path / "p/2/pipeline.toml", "steps.py": tmp_path / "p/steps.py"}


@pytest.mark.parametrize("changed", ["p/pipeline.toml", "p/steps.py"])
def test_a_change_in_the_models_folder_changes_every_version_that_it_stands_for(tmp_path: Path, changed: str) -> None:
    put(tmp_path, "p/pipeline.toml", "p/steps.py", "p/2/pipeline.toml", "p/2/steps.py")
    (tmp_path / "p/1").mkdir()
    before = scan(tmp_path)
    put(tmp_path, changed, text="# more")
    after = scan(tmp_path, before)
    old, new = before.models["p"].versions, after.models["p"].versions
    assert new[1].fingerprint != old[1].fingerprint
    assert new[2] is old[2]


def test_a_folder_of_that_name_is_not_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "p/pipeline.toml").mkdir(parents=True)
    found = scan(tmp_path)
    assert found.models["p"].versions == {}
    assert [problem.model for problem in found.problems] == ["p"]
