"""What a device remembers of its group's configuration, over restarts, crashes and broken files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.config.settings import Config, UpdateSettings
from edge_runtime.updates.kept_configuration import ConfigurationStore, KeptConfiguration, digest, lay_over
from edge_runtime.updates.states import MAX_TRIES

DEBUG = '[log]\nlevel = "debug"\n'
ERROR = '[log]\nlevel = "error"\n'


def device(folder: Path, **changes: Any) -> Config:
    return Config(state=str(folder), update=UpdateSettings(root_file="r", **changes))


def store(folder: Path) -> ConfigurationStore:
    return ConfigurationStore(folder / "update")


def test_configuration_that_is_kept_is_laid_over_at_each_start(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    for _ in range(MAX_TRIES + 2):
        assert lay_over(device(tmp_path), is_start=True).log.level == "debug"
    assert store(tmp_path).read().text == DEBUG


def test_configuration_on_trial_that_ends_the_daemon_is_refused_after_its_tries(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=ERROR).tried(DEBUG, ()))
    levels = [lay_over(device(tmp_path), is_start=True).log.level for _ in range(MAX_TRIES + 1)]
    assert levels == ["debug"] * MAX_TRIES + ["error"]
    kept = store(tmp_path).read()
    assert kept.trying is None
    assert "ended 3 times" in kept.refused[digest(DEBUG)]


def test_configuration_on_trial_is_not_counted_at_a_reload(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration().tried(DEBUG, ()))
    for _ in range(MAX_TRIES + 2):
        assert lay_over(device(tmp_path), is_start=False).log.level == "debug"
    assert store(tmp_path).read().tries == 0


@pytest.mark.parametrize("damage", [b"", b"{", b'{"text": 1}', b"\xff\xfe", b"[" * 100_000])
def test_configuration_whose_file_is_broken_is_left_out(tmp_path: Path, damage: bytes) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    (tmp_path / "update" / "configuration.json").write_bytes(damage)
    assert lay_over(device(tmp_path), is_start=True).log.level == "info"
    assert store(tmp_path).read() == KeptConfiguration()


def test_configuration_that_was_changed_on_the_disk_opens_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path).write(KeptConfiguration(text="[zmq]\ninsecure = true\n"))
    with caplog.at_level(logging.ERROR):
        assert not lay_over(device(tmp_path), is_start=True).zmq.insecure
    assert "left out" in caplog.text


def test_configuration_is_not_laid_over_where_the_device_says_so(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    assert lay_over(device(tmp_path, configuration=False), is_start=True).log.level == "info"


def test_configurations_that_were_refused_are_remembered_up_to_a_bound(tmp_path: Path) -> None:
    kept = KeptConfiguration(text=ERROR)
    for number in range(50):
        kept = kept.refusing(f"# {number}\n", "no")
    store(tmp_path).write(kept)
    assert len(store(tmp_path).read().refused) == 20
    assert digest("# 49\n") in kept.refused
    assert kept.in_force == ERROR
