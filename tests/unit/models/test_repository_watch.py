"""A change in the folder is told once, and only when it has settled. A real folder, a clock that the test moves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from edge_runtime.config.settings import ModelSettings
from edge_runtime.models.walk import scan
from edge_runtime.models.watch import VersionChange, Watcher
from tests.fakes.clock import FakeClock
from tests.fakes.rights import open_folder, ordinary_rights


class Folder:
    """A models folder with a watcher on it. Each `put` gives the file another time, as seconds do on a real device."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.watcher = Watcher(root, self.clock)
        self._time_ns = 1_700_000_000_000_000_000

    def put(self, name: str, data: bytes = b"model") -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        self._time_ns += 1_000_000_000
        os.utime(file, ns=(self._time_ns, self._time_ns))

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def poll(self, after_s: float = 0.0) -> list[VersionChange]:
        self.clock.advance(after_s)
        return self.watcher.poll()

    def settle(self) -> list[VersionChange]:
        """Look now and again when everything has settled."""
        return [*self.poll(), *self.poll(after_s=2.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "models").mkdir()
    return Folder(tmp_path / "models")


@pytest.fixture
def serving(folder: Folder) -> Folder:
    """A folder with one version of one model, taken."""
    folder.put("digits/1/model.onnx")
    assert folder.poll() == [VersionChange("appeared", "digits", 1)]
    return folder


@pytest.mark.parametrize("place", ["mnt", "mnt/net.onnx"])
def test_a_named_model_is_followed_and_stays_while_its_place_is_gone(tmp_path: Path, place: str) -> None:
    clock = FakeClock()
    (tmp_path / "mnt").mkdir()
    file = tmp_path / "mnt" / "net.onnx"
    file.write_bytes(b"one")
    watcher = Watcher(None, clock, named={"net": tmp_path / place})
    assert watcher.poll() == [VersionChange("appeared", "net", 1)]
    (tmp_path / "mnt").rename(tmp_path / "away")
    for _ in range(3):
        assert watcher.poll() == []
        clock.advance(5.0)
    assert list(watcher.scan.models) == ["net"]
    assert "no such folder" in str(watcher.scan.problems[0])
    (tmp_path / "away").rename(tmp_path / "mnt")
    file.write_bytes(b"another")
    assert watcher.poll() == []
    clock.advance(2.0)
    assert watcher.poll() == [VersionChange("changed", "net", 1)]


def test_the_first_poll_takes_everything_at_once(folder: Folder) -> None:
    for name in ("b/1/model.onnx", "a/2/model.onnx", "a/1/model.onnx", "c.onnx"):
        folder.put(name)
    folder.put("a/model.toml", b"max_batch_rows = 8\n")
    assert folder.poll() == [
        VersionChange("appeared", "a", 1),
        VersionChange("appeared", "a", 2),
        VersionChange("appeared", "b", 1),
        VersionChange("appeared", "c", 1),
    ]
    assert folder.watcher.scan == scan(folder.root)
    assert folder.poll(after_s=60) == []


def test_a_new_version_is_taken_when_unchanged_for_two_seconds(serving: Folder) -> None:
    serving.put("digits/2/model.onnx")
    assert serving.poll() == []
    assert serving.poll(after_s=1.9) == []
    assert serving.watcher.scan.models["digits"].versions.keys() == {1}
    assert serving.poll(after_s=0.1) == [VersionChange("appeared", "digits", 2)]
    assert serving.watcher.scan.models["digits"].versions.keys() == {1, 2}
    assert serving.poll(after_s=60) == []


def test_a_model_that_is_asked_for_is_taken_as_it_lies_and_no_other(serving: Folder) -> None:
    serving.put("digits/2/model.onnx")
    serving.put("digits/model.toml", b"pinned = true")
    serving.put("other/1/model.onnx")
    assert serving.watcher.poll(at_once="digits") == [
        VersionChange("changed", "digits", None),
        VersionChange("appeared", "digits", 2),
    ]
    assert serving.watcher.poll(at_once="absent") == []
    assert serving.watcher.scan.models.keys() == {"digits"}
    assert serving.poll(after_s=2.0) == [VersionChange("appeared", "other", 1)]
    serving.remove("digits/1")
    assert serving.watcher.poll(at_once="digits") == [VersionChange("removed", "digits", 1)]


def test_a_copy_that_goes_on_is_not_taken_until_it_rests(serving: Folder) -> None:
    for size in range(1, 6):
        serving.put("digits/2/model.onnx", b"x" * size)
        assert serving.poll(after_s=1.5) == []
    assert serving.poll(after_s=1.5) == []
    assert serving.poll(after_s=0.5) == [VersionChange("appeared", "digits", 2)]


def test_weights_that_follow_later_start_the_wait_anew(serving: Folder) -> None:
    serving.put("digits/2/model.xml")
    assert serving.poll() == []
    serving.put("digits/2/model.bin")
    assert serving.poll(after_s=1.9) == []
    assert serving.poll(after_s=1.9) == []
    assert serving.poll(after_s=0.2) == [VersionChange("appeared", "digits", 2)]
    assert set(serving.watcher.scan.models["digits"].versions[2].files) == {"model.xml", "model.bin"}


def test_a_version_whose_load_failed_comes_again_when_it_changes(serving: Folder) -> None:
    serving.put("digits/1/model.onnx", b"repaired")
    assert serving.settle() == [VersionChange("changed", "digits", 1)]
    serving.put("digits/1/model.onnx", b"repaired again")
    assert serving.settle() == [VersionChange("changed", "digits", 1)]


def test_a_version_that_went_is_reported_when_it_stays_away(serving: Folder) -> None:
    serving.remove("digits")
    assert serving.poll() == []
    assert serving.watcher.scan.models.keys() == {"digits"}
    assert serving.poll(after_s=2.0) == [VersionChange("removed", "digits", 1)]
    assert serving.watcher.scan.models == {}
    assert serving.poll(after_s=60) == []


def test_a_version_replaced_by_removing_and_copying_is_a_change_not_a_removal(serving: Folder) -> None:
    serving.remove("digits/1")
    assert serving.poll() == []
    serving.put("digits/1/model.onnx", b"newer")
    assert serving.poll(after_s=1.0) == []
    assert serving.poll(after_s=2.0) == [VersionChange("changed", "digits", 1)]


def test_a_folder_that_comes_back_as_it_was_is_not_a_change(serving: Folder) -> None:
    away = serving.root.parent / "away"
    (serving.root / "digits").rename(away)
    assert serving.poll() == []
    away.rename(serving.root / "digits")
    assert serving.poll(after_s=1.0) == []
    assert serving.poll(after_s=60) == []


def test_a_model_that_comes_again_after_it_went_appears_again(serving: Folder) -> None:
    serving.remove("digits")
    serving.settle()
    serving.put("digits/1/model.onnx")
    assert serving.settle() == [VersionChange("appeared", "digits", 1)]


def test_settings_that_change_appear_or_go_are_a_change_of_the_model(serving: Folder) -> None:
    serving.put("digits/model.toml", b"max_batch_rows = 8\n")
    assert serving.poll() == []
    assert serving.watcher.scan.models["digits"].settings == ModelSettings()
    assert serving.poll(after_s=2.0) == [VersionChange("changed", "digits", None)]
    assert serving.watcher.scan.models["digits"].settings == ModelSettings(max_batch_rows=8)
    serving.put("digits/model.toml", b"max_batch_rows = ")
    assert serving.settle() == [VersionChange("changed", "digits", None)]
    assert serving.watcher.scan.models["digits"].settings_error is not None
    serving.remove("digits/model.toml")
    assert serving.settle() == [VersionChange("changed", "digits", None)]
    assert serving.watcher.scan.models["digits"].settings_error is None
    assert serving.poll(after_s=60) == []


def test_settings_that_come_with_a_new_model_are_not_a_change_of_their_own(serving: Folder) -> None:
    serving.put("other/1/model.onnx")
    serving.put("other/model.toml", b"max_batch_rows = 8\n")
    assert serving.settle() == [VersionChange("appeared", "other", 1)]
    assert serving.watcher.scan.models["other"].settings == ModelSettings(max_batch_rows=8)
    assert serving.poll(after_s=60) == []


def test_settings_come_before_the_versions_they_are_for(serving: Folder) -> None:
    serving.put("digits/2/model.onnx")
    serving.put("digits/model.toml", b"pinned = true\n")
    serving.put("another/1/model.onnx")
    assert serving.settle() == [
        VersionChange("appeared", "another", 1),
        VersionChange("changed", "digits", None),
        VersionChange("appeared", "digits", 2),
    ]


def test_settings_of_a_model_that_went_are_not_a_change(serving: Folder) -> None:
    serving.put("digits/model.toml", b"max_batch_rows = 8\n")
    serving.settle()
    serving.remove("digits")
    assert serving.settle() == [VersionChange("removed", "digits", 1)]


def test_a_model_moved_from_the_short_form_into_a_version_folder_changes(folder: Folder) -> None:
    folder.put("digits/model.onnx")
    folder.poll()
    (folder.root / "digits" / "1").mkdir()
    (folder.root / "digits" / "model.onnx").rename(folder.root / "digits" / "1" / "model.onnx")
    assert folder.settle() == [VersionChange("changed", "digits", 1)]
    assert folder.watcher.scan.models["digits"].versions[1].path == folder.root / "digits" / "1"


def test_a_file_still_being_written_under_another_name_is_not_a_change(serving: Folder) -> None:
    serving.put("digits/2.part/model.onnx")
    serving.put("digits/1/model.onnx.part")
    serving.put("upload.tmp/1/model.onnx")
    assert serving.settle() == []


def test_a_models_folder_that_went_leaves_what_was_taken_and_says_so(serving: Folder) -> None:
    away = serving.root.parent / "away"
    serving.root.rename(away)
    assert serving.settle() == []
    assert serving.watcher.scan.models["digits"].versions.keys() == {1}
    assert "no such folder" in str(serving.watcher.scan.problems[0])
    away.rename(serving.root)
    assert serving.settle() == []
    assert serving.watcher.scan.problems == ()
    serving.remove("digits")
    assert serving.settle() == [VersionChange("removed", "digits", 1)]


@pytest.mark.parametrize("name", [".", "digits", "digits/1"])
def test_a_folder_that_cannot_be_read_leaves_what_was_taken(name: str) -> None:
    with open_folder() as root:
        folder = Folder(root)
        folder.put("digits/1/model.onnx")
        folder.poll()
        (root / name).chmod(0)
        with ordinary_rights():
            assert folder.settle() == []
        assert folder.watcher.scan.models["digits"].versions.keys() == {1}
        assert "Permission denied" in str(folder.watcher.scan.problems[0])
        (root / name).chmod(0o755)
        assert folder.settle() == []
        assert folder.watcher.scan.problems == ()


def test_a_watcher_that_starts_on_an_absent_folder_takes_it_when_it_comes(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "models")
    assert folder.poll() == []
    folder.put("digits/1/model.onnx")
    assert folder.settle() == [VersionChange("appeared", "digits", 1)]


def test_the_settling_time_can_be_chosen(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.watcher = Watcher(tmp_path, folder.clock, settle_s=0.0)
    folder.poll()
    folder.put("digits/1/model.onnx")
    assert folder.poll() == [VersionChange("appeared", "digits", 1)]


class Watching(RuleBasedStateMachine):
    """Any sequence of changes and polls: replaying what was told always gives what is held as taken."""

    root: Path

    @initialize()
    def start(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        self.folder = Folder(self.root)
        self.told: dict[str, set[int]] = {}

    @rule(
        name=st.sampled_from(
            ["a/1/model.onnx", "a/2/model.onnx", "a/model.toml", "b/1/model.onnx", "b/model.onnx", "c.onnx"]
        ),
        data=st.sampled_from([b"", b"pinned = true", b"x = "]),
    )
    def put(self, name: str, data: bytes) -> None:
        self.folder.put(name, data)

    @rule(name=st.sampled_from(["a", "a/1", "a/model.toml", "b", "b/1", "c.onnx"]))
    def remove(self, name: str) -> None:
        if (self.root / name).exists():
            self.folder.remove(name)

    @rule(after_s=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    def poll(self, after_s: float) -> None:
        for change in self.folder.poll(after_s):
            versions = self.told.setdefault(change.model, set())
            if change.version is None:
                assert change.kind == "changed"
                assert versions, "settings change only for a model that was taken"
            elif change.kind == "appeared":
                assert change.version not in versions
                versions.add(change.version)
            else:
                assert change.version in versions
                if change.kind == "removed":
                    versions.remove(change.version)

    @rule()
    def settle(self) -> None:
        self.poll(0.0)
        self.poll(2.0)
        taken, there = self.folder.watcher.scan, scan(self.root)
        with_versions = {name: model for name, model in there.models.items() if model.versions}
        assert taken.models.keys() == with_versions.keys()
        for name, model in with_versions.items():
            assert taken.models[name].versions == model.versions
            assert taken.models[name].settings == model.settings
            assert taken.models[name].settings_error == model.settings_error

    @invariant()
    def what_was_told_is_what_is_taken(self) -> None:
        if hasattr(self, "folder"):
            taken = {name: set(model.versions) for name, model in self.folder.watcher.scan.models.items()}
            assert taken == {name: versions for name, versions in self.told.items() if versions}


def test_any_sequence_of_changes_is_reported_without_gaps(tmp_path: Path) -> None:
    class WatchingHere(Watching):
        root = tmp_path / "models"

    run_state_machine_as_test(WatchingHere, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


def test_a_look_takes_nothing_and_reports_what_has_not_settled(serving: Folder) -> None:
    serving.put("other/1/model.onnx")
    serving.watcher.look()
    assert [(each.model, each.reason) for each in serving.watcher.unsettled()] == [
        ("other", "was found just now: it is taken when its files have not changed for 2 s")
    ]
    assert "other" not in serving.watcher.scan.models
