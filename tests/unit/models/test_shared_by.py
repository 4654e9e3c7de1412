"""Which versions may share a host: those of the models folder that ask for nothing of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.config.settings import Isolation, ModelLimits, ModelSettings
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.loading import shared_by

LIES_IN_FOLDER = VersionFolder("m", 1, Path("/models/m/1"), {}, (), within=("/models",))
IS_RELEASED = VersionFolder("m", 1, Path("/state/releases/m"), {}, ())


def test_models_of_the_models_folder_share_with_each_other() -> None:
    other = VersionFolder("n", 7, Path("/models/n/7"), {}, (), within=("/models",))
    found = {shared_by(ModelSettings(), each, "auto") for each in (LIES_IN_FOLDER, other)}
    assert len(found) == 1
    assert found != {""}


@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(rerun=False),
        ModelSettings(limits=ModelLimits(host_memory_bytes=1 << 30)),
        ModelSettings(limits=ModelLimits(run_limit_ms=100.0)),
    ],
    ids=["rerun", "host_memory_bytes", "run_limit_ms"],
)
def test_a_model_with_a_limit_of_its_own_shares_with_none(settings: ModelSettings) -> None:
    assert shared_by(settings, LIES_IN_FOLDER, "auto") == ""


def test_a_release_shares_with_none() -> None:
    assert shared_by(ModelSettings(), IS_RELEASED, "auto") == ""


@pytest.mark.parametrize("isolation", ["always", "never"])
def test_models_share_under_auto_alone(isolation: Isolation) -> None:
    assert shared_by(ModelSettings(), LIES_IN_FOLDER, isolation) == ""
