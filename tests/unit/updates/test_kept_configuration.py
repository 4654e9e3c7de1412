"""What a device remembers of its group's configuration, over restarts, crashes and broken files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.config.settings import Config, UpdateSettings
from edge_runtime.errors import StorageFailed
from edge_runtime.updates.kept_configuration import ConfigurationStore, KeptConfiguration, digest, lay_over, take_back
from edge_runtime.updates.states import MAX_TRIES

DEBUG = '[log]\nlevel = "debug"\n'
ERROR = '[log]\nlevel = "error"\n'


def device(folder: Path, **changes: Any) -> Config:
    return Config(state=str(folder), update=UpdateSettings(root_file="r", **changes))


def store(folder: Path) -> ConfigurationStore:
    return ConfigurationStore(folder / "update")


def started(folder: Path, *, is_start: bool = True, **changes: Any) -> Config:
    """The settings of a start, or of a reload."""
    return lay_over(device(folder, **changes), folder, is_start=is_start)[0]


def test_configuration_that_is_kept_is_laid_over_at_each_start(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    for _ in range(MAX_TRIES + 2):
        assert started(tmp_path).log.level == "debug"
    assert store(tmp_path).read().text == DEBUG


def test_configuration_on_trial_that_ends_the_daemon_is_refused_after_its_tries(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=ERROR).tried(DEBUG, {}))
    levels = [started(tmp_path).log.level for _ in range(MAX_TRIES + 1)]
    assert levels == ["debug"] * MAX_TRIES + ["error"]
    kept = store(tmp_path).read()
    assert kept.trying is None
    assert "ended 3 times" in kept.refused[digest(DEBUG)]


def test_configuration_on_trial_is_not_counted_at_a_reload(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration().tried(DEBUG, {}))
    for _ in range(MAX_TRIES + 2):
        assert started(tmp_path, is_start=False).log.level == "debug"
    assert store(tmp_path).read().tries == 0


@pytest.mark.parametrize("damage", [b"", b"{", b'{"text": 1}', b"\xff\xfe", b"[" * 100_000])
def test_configuration_whose_file_is_broken_is_left_out(tmp_path: Path, damage: bytes) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    (tmp_path / "update" / "configuration.json").write_bytes(damage)
    assert started(tmp_path).log.level == "info"
    assert store(tmp_path).read() == KeptConfiguration()


def test_configuration_that_was_changed_on_the_disk_opens_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path).write(KeptConfiguration(text="[zmq]\ninsecure = true\n"))
    with caplog.at_level(logging.ERROR):
        config, reason = lay_over(own := device(tmp_path), tmp_path, is_start=True)
    assert config is own
    assert "zmq: a signed configuration may not say this" in reason
    assert "left out" in caplog.text


def test_configuration_is_not_laid_over_where_the_device_says_so(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=DEBUG))
    assert started(tmp_path, configuration=False).log.level == "info"


def test_configurations_that_were_refused_are_remembered_up_to_a_bound(tmp_path: Path) -> None:
    kept = KeptConfiguration(text=ERROR)
    for number in range(50):
        kept = kept.refusing(f"# {number}\n", "no")
    store(tmp_path).write(kept)
    assert len(store(tmp_path).read().refused) == 20
    assert digest("# 49\n") in kept.refused
    assert kept.in_force == ERROR


def test_configuration_on_trial_whose_start_failed_is_out_at_the_next_start_and_refused_the_third_time(
    tmp_path: Path,
) -> None:
    own = device(tmp_path)
    for number in range(1, MAX_TRIES + 1):
        store(tmp_path).write(store(tmp_path).read().tried(DEBUG, {}))
        assert started(tmp_path).log.level == "debug"
        take_back(own, tmp_path, "no broker")
        assert started(tmp_path).log.level == "info"
        assert (digest(DEBUG) in store(tmp_path).read().refused) is (number == MAX_TRIES)
    assert store(tmp_path).read().refused[digest(DEBUG)] == (
        f"the daemon's start failed with it: no broker; so {MAX_TRIES} times"
    )


def test_configuration_that_was_kept_and_fails_a_start_is_out_at_the_next_one(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(group="g", text=DEBUG))
    take_back(device(tmp_path), tmp_path, "no broker")
    assert started(tmp_path).log.level == "info"
    kept = store(tmp_path).read()
    assert (kept.group, kept.text, kept.refused) == ("g", "", {})
    assert kept.doubts[digest(DEBUG)] == ("the daemon's start failed with it: no broker",)


def test_configuration_on_trial_that_fails_a_start_gives_the_one_before_its_place_back(tmp_path: Path) -> None:
    store(tmp_path).write(KeptConfiguration(text=ERROR).tried(DEBUG, {}))
    take_back(device(tmp_path), tmp_path, "no broker")
    assert started(tmp_path).log.level == "error"


def test_configuration_that_is_kept_is_no_longer_in_doubt() -> None:
    doubted = KeptConfiguration().tried(DEBUG, {}).doubting(DEBUG, "a camera is lost")
    assert doubted.tried(DEBUG, {}).committed().doubts == {}


def test_configurations_in_doubt_are_remembered_up_to_a_bound() -> None:
    kept = KeptConfiguration()
    for number in range(50):
        kept = kept.tried(f"# {number}\n", {}).doubting(f"# {number}\n", "no")
    assert len(kept.doubts) == 20
    assert digest("# 49\n") in kept.doubts


def test_settings_are_as_they_were_read_without_a_state_folder(tmp_path: Path) -> None:
    own = device(tmp_path)
    assert lay_over(own, None, is_start=True) == (own, "")


def test_configuration_on_trial_is_left_out_with_the_reason_where_its_try_cannot_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path).write(KeptConfiguration(text=ERROR).tried(DEBUG, {}))

    def full(store: ConfigurationStore, configuration: KeptConfiguration) -> None:
        raise StorageFailed("the disk is full")

    monkeypatch.setattr(ConfigurationStore, "write", full)
    config, reason = lay_over(device(tmp_path), tmp_path, is_start=True)
    assert (config.log.level, reason) == ("error", "it cannot be tried: the disk is full")
