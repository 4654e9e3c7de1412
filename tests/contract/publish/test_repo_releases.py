"""Releases, from a model's folder to what python-tuf's own client reads: tried, described, signed, assigned."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_runtime.cli.main import main
from edge_runtime.errors import PublishError
from edge_runtime.publish.assignments import assign, unassign
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.change import Change
from edge_runtime.publish.cleaning import sweep, withdraw
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import PreparedRelease, ReleaseOptions, choose_counter, prepare_release
from edge_runtime.publish.roles import add_group, add_team
from edge_runtime.publish.trial import try_artifact
from edge_runtime.updates.golden import differences, unpack
from edge_runtime.updates.manifest import Assignment, Manifest, decode_assignments, decode_manifest
from edge_runtime.updates.release_checks import KnownReleases, why_not_offered
from edge_runtime.updates.release_paths import LONGEST_LEAP, ReleasePath, assignments_path
from tests.fakes.dying_disk import DyingDisk, Killed
from tests.fakes.publishing import PASSPHRASE, Publisher, TufDevice
from tests.models.ir_models import from_onnx
from tests.models.onnx_models import IR_VERSION, OPSET, mlp, wide

DIGITS = Path(__file__).parents[3] / "demo" / "models" / "digits"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the team vision and the group line."""
    publisher = Publisher(tmp_path_factory.mktemp("bare") / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    return publisher.path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with versions 1 to 3 of `tiny`."""
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 2, 3):
        tiny(folder, version)
    return folder


@pytest.fixture(scope="module")
def filled(bare: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with versions 1 to 3 of `tiny` published."""
    path = tmp_path_factory.mktemp("filled") / "repository"
    shutil.copytree(bare, path)
    for version in (1, 2, 3):
        publish(Publisher(path), models / "tiny", version=version)
    return path


@pytest.fixture
def publisher(bare: Path, tmp_path: Path) -> Publisher:
    """A copy of `bare`."""
    shutil.copytree(bare, tmp_path / "repository")
    return Publisher(tmp_path / "repository")


@pytest.fixture
def device(bare: Path, tmp_path: Path) -> TufDevice:
    """A device of the test's repository, shipped with the root that all of them begin with."""
    return TufDevice(tmp_path / "repository", tmp_path / "device", Publisher(bare).root_1)


def publish(publisher: Publisher, path: Path, **wish: object) -> PreparedRelease:
    with publisher.opened() as repository:
        prepared = prepare_release(repository, ReleaseOptions(**{"team": "vision", "path": path, **wish}))  # type: ignore[arg-type]
        prepared.change.commit()
    return prepared


def tiny(folder: Path, version: int) -> Path:
    """A model `tiny`, other weights for each version."""
    wide(folder / "tiny" / str(version), size=version + 1)
    return folder / "tiny"


def fetch_manifest(device: TufDevice, release: ReleasePath) -> Manifest:
    data = device.fetch(release.manifest)
    assert data is not None
    return decode_manifest(data, release.manifest)


# ---- publish --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_published_model_is_read_by_a_device_as_its_manifest_says(publisher: Publisher, device: TufDevice) -> None:
    release = publish(publisher, DIGITS).release
    assert release == ReleasePath("vision", "digits", 1)
    manifest = fetch_manifest(device, release)
    assert (manifest.version, manifest.release_counter, manifest.profiles) == (1, 1, ())
    assert [(form.name, form.datatype, form.shape) for form in manifest.inputs] == [("image", "FP32", (-1, 64))]
    assert [form.name for form in manifest.outputs] == ["scores", "digit"]
    assert manifest.peak_memory_bytes > (DIGITS / "1" / "model.onnx").stat().st_size
    artifact = manifest.artifacts[0]
    data = device.fetch(artifact.path)
    assert data == (DIGITS / "1" / "model.onnx").read_bytes()
    assert (artifact.sha256, artifact.length) == (hashlib.sha256(data).hexdigest(), len(data))


def test_the_golden_output_is_what_the_model_answers_to_the_golden_input(
    publisher: Publisher, device: TufDevice, tmp_path: Path
) -> None:
    image = np.random.default_rng(1).random((3, 64), np.float32)
    np.savez(tmp_path / "golden.npz", image=image)
    release = publish(publisher, DIGITS, golden=tmp_path / "golden.npz").release
    manifest = fetch_manifest(device, release)
    data = device.fetch(manifest.golden.path)
    assert data is not None
    inputs, outputs = unpack(manifest.golden, data)
    assert np.array_equal(inputs["image"], image)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(DIGITS / "1" / "model.onnx"))
    answers = dict(zip(("scores", "digit"), session.run(["scores", "digit"], {"image": image}), strict=True))
    assert differences(manifest.golden.outputs, outputs, answers, manifest.golden.tolerance["f32"]) == []
    assert set(manifest.golden.tolerance) >= {"f32", "f16", "bf16", "int8"}


def test_files_lie_under_hash_prefixed_names_and_readable_for_a_server(publisher: Publisher) -> None:
    publish(publisher, DIGITS)
    found = [path for path in (publisher.path / "targets" / "team").rglob("*") if path.is_file()]
    assert sorted(path.name.partition(".")[2] for path in found) == ["golden.bin", "manifest.json", "model.onnx"]
    for path in found:
        assert path.name.partition(".")[0] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_mode & 0o777 == 0o644
    assert not (publisher.path / "staging").exists() or not list((publisher.path / "staging").rglob("*.onnx"))


def test_counters_grow_and_a_version_may_be_released_again_with_the_same_bytes_only(
    publisher: Publisher, tmp_path: Path
) -> None:
    for version in (1, 2):
        assert publish(publisher, tiny(tmp_path, version)).release.counter == version
    again = publish(publisher, tmp_path / "tiny", version=1)
    assert (again.release.counter, again.manifest.version) == (3, 1)
    wide(tmp_path / "tiny" / "1", size=9)
    with pytest.raises(PublishError, match=r"version 1 was published with other bytes.*put the new ones into 2/"):
        publish(publisher, tmp_path / "tiny", version=1)


def test_a_model_belongs_to_one_team(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, tiny(tmp_path, 1))
    publisher.carry_out(lambda repository: add_team(repository, "sound", NewKeys(is_online=True)))
    with pytest.raises(PublishError, match="is a model of the team vision"):
        publish(publisher, tmp_path / "tiny", team="sound")
    with pytest.raises(PublishError, match="no team 'smell'; known: sound, vision"):
        publish(publisher, tmp_path / "tiny", team="smell")


@pytest.mark.parametrize(
    ("team", "why"), [("smell", "no team 'smell'"), ("vision", "team-vision: 0 of its keys are within reach")]
)
def test_the_team_and_its_keys_are_checked_before_the_model_is_tried(
    publisher: Publisher, tmp_path: Path, team: str, why: str
) -> None:
    (path := tiny(tmp_path, 1)).joinpath("1", "model.onnx").write_bytes(b"no model")
    for key in (publisher.path / "keys").glob("team-vision*"):
        key.unlink()
    with pytest.raises(PublishError, match=why):
        publish(publisher, path, team=team)


def test_two_artifacts_of_a_version_must_answer_alike(publisher: Publisher, tmp_path: Path) -> None:
    path = tmp_path / "both" / "1"
    from_onnx(mlp(path), path)
    prepared = publish(publisher, tmp_path / "both")
    assert {artifact.backend for artifact in prepared.manifest.artifacts} == {"onnxruntime", "openvino"}
    wide(path, size=16)
    with pytest.raises(PublishError, match=r"model\.onnx \(f32\) and model\.xml \(f32\): the artifacts"):
        publish(publisher, tmp_path / "both", version=1, model="other")


def test_settings_and_wishes_travel_in_the_manifest(publisher: Publisher, tmp_path: Path) -> None:
    (tiny(tmp_path, 1) / "model.toml").write_text("max_batch_rows = 8\n")
    manifest = publish(publisher, tmp_path / "tiny", profiles=("jetson-orin",), min_runtime="0.9").manifest
    assert manifest.settings == {"max_batch_rows": 8}
    assert (manifest.profiles, manifest.min_runtime) == (("jetson-orin",), "0.9")
    for wish in ({"profiles": ("No Name",)}, {"min_runtime": "new"}):
        with pytest.raises(PublishError):
            publish(publisher, tmp_path / "tiny", **wish)


def graph(folder: Path, *nodes: onnx.NodeProto) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] through any nodes."""
    folder.mkdir(parents=True)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 2]) for name in "xy"]
    made = helper.make_model(
        helper.make_graph(list(nodes), "graph", tensors[:1], tensors[1:]),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("own.operators", 1)],
        ir_version=IR_VERSION,
    )
    (folder / "model.onnx").write_bytes(made.SerializeToString())
    return folder.parent


def nan(path: Path) -> Path:
    return graph(
        path / "1", helper.make_node("Sub", ["x", "x"], ["zero"]), helper.make_node("Div", ["zero", "zero"], ["y"])
    )


def random(path: Path) -> Path:
    return graph(path / "1", helper.make_node("RandomNormalLike", ["x"], ["y"]))


def custom(path: Path) -> Path:
    return graph(path / "1", helper.make_node("Evil", ["x"], ["y"], domain="own.operators"))


def cut_off(path: Path) -> Path:
    data = mlp(path / "1").read_bytes()
    (path / "1" / "model.onnx").write_bytes(data[: len(data) // 2])
    return path


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (nan, "NaN or infinite"),
        (random, "differently each time"),
        (custom, "own.operators"),
        (cut_off, "model.onnx"),
    ],
)
def test_a_model_that_no_device_could_be_held_to_is_not_published(
    make: Callable[[Path], Path], complaint: str, publisher: Publisher, tmp_path: Path
) -> None:
    with pytest.raises(PublishError, match=complaint):
        publish(publisher, make(tmp_path / "bad"))
    with publisher.opened() as repository:
        assert list(repository.catalog.releases()) == []


def test_a_golden_input_may_be_a_picture_that_the_steps_read(
    publisher: Publisher, device: TufDevice, tmp_path: Path
) -> None:
    photo = DIGITS.parents[1] / "seven.jpg"
    with pytest.raises(PublishError, match=r"a picture is for a model of one input whose model\.toml declares"):
        publish(publisher, DIGITS, golden=photo)
    shutil.copytree(DIGITS, tmp_path / "photo")
    shutil.copy(DIGITS.parents[1] / "photo.toml", tmp_path / "photo" / "model.toml")
    manifest = fetch_manifest(device, publish(publisher, tmp_path / "photo", golden=photo).release)
    data = device.fetch(manifest.golden.path)
    assert data is not None
    inputs, outputs = unpack(manifest.golden, data)
    assert inputs["image"].shape == (1, 64)
    assert outputs["digit"].tolist() == [7]
    assert manifest.settings["input"]["image"]["size"] == [8, 8]


def test_a_golden_input_that_the_model_does_not_take_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    golden = tmp_path / "golden.npz"
    for arrays, complaint in (
        ({"other": np.zeros((1, 64), np.float32)}, "has other; wanted image"),
        ({"image": np.zeros((1, 63), np.float32)}, r"FP32 \[1, 63\]; wanted FP32 \[-1, 64\]"),
        ({"image": np.zeros((1, 64))}, "is FP64"),
    ):
        np.savez(golden, **arrays)  # type: ignore[arg-type]
        with pytest.raises(PublishError, match=complaint):
            publish(publisher, DIGITS, golden=golden)
    golden.write_bytes(b"junk")
    with pytest.raises(PublishError, match=r"is not a \.npz"):
        publish(publisher, DIGITS, golden=golden)


def test_a_model_that_takes_too_long_or_kills_its_process_is_an_error_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(tmp_path / "model")
    with pytest.raises(PublishError, match=r"within 0\.001 s"):
        try_artifact("onnxruntime", model, {}, limit_s=0.001)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    with pytest.raises(PublishError, match="SIGABRT"):
        try_artifact("onnxruntime", model, {})


def test_the_process_that_tries_a_model_knows_no_passphrase_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("MY_KEY", "secret")
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nopen({str(seen)!r}, 'w').write(' '.join(os.environ))\n")
    try_artifact("onnxruntime", model, {})
    assert "PATH" in seen.read_text().split()
    assert not {"EDGE_RUNTIME_PASSPHRASE", "MY_KEY"} & set(seen.read_text().split())


@pytest.mark.long
def test_a_publish_cut_off_anywhere_leaves_devices_a_whole_repository(tmp_path: Path) -> None:
    model, number, was_killed = tiny(tmp_path, 1), 0, True
    first = Publisher(tmp_path / "first").found()
    first.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    seen: set[bool] = set()
    while was_killed:
        number += 4  # one trial takes half a second
        publisher = Publisher(tmp_path / str(number), disk=DyingDisk(number))
        shutil.copytree(first.path, publisher.path)
        with suppress(Killed):
            publish(publisher, model)
        was_killed = publisher.disk.is_dead  # type: ignore[attr-defined]
        publisher.disk = DyingDisk()
        device = TufDevice(publisher.path, tmp_path / f"device-{number}", publisher.root_1)
        release = ReleasePath("vision", "tiny", 1)
        is_there = device.fetch(release.manifest) is not None
        assert (device.fetch(release.file("model.onnx")) is not None) is is_there
        seen.add(is_there)
        with publisher.opened() as repository:
            sweep(repository)
        device.check()
    assert seen == {False, True}


# ---- assign ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(filled: Path, models: Path, tmp_path: Path) -> Publisher:
    """A copy of `filled`, with its models in `tmp_path`."""
    shutil.copytree(filled, tmp_path / "repository")
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return Publisher(tmp_path / "repository")


def give(publisher: Publisher, version: int, percent: float = 100.0, model: str = "tiny") -> Change:
    return publisher.carry_out(lambda repository: assign(repository, "line", model, version, percent))


def assigned(device: TufDevice) -> list[tuple[int, float]]:
    data = device.fetch(assignments_path("line"))
    assert data is not None
    return [(each.release.counter, each.percent) for each in decode_assignments(data, assignments_path("line"))]


def test_a_group_is_given_a_release_by_its_manifests_hash(three: Publisher, device: TufDevice) -> None:
    change = give(three, 2, model="vision/tiny")
    assert [each.role for each in change.signings] == ["fleet-line", "snapshot", "timestamp"]
    data = device.fetch(assignments_path("line"))
    manifest = device.fetch(ReleasePath("vision", "tiny", 2).manifest)
    assert data is not None
    assert manifest is not None
    digest = hashlib.sha256(manifest).hexdigest()
    assert decode_assignments(data, "") == (Assignment("tiny", "team/vision/tiny/2/manifest.json", digest, 100.0),)


def test_a_share_of_the_devices_gets_a_release_beside_the_one_for_all(three: Publisher, device: TufDevice) -> None:
    give(three, 1)
    for percent in (1.0, 10.0):
        give(three, 2, percent)
        assert assigned(device) == [(2, percent), (1, 100.0)]
    give(three, 3, 5.0)
    assert assigned(device) == [(3, 5.0), (1, 100.0)]
    give(three, 3)
    assert assigned(device) == [(3, 100.0)]


def test_a_first_release_may_go_to_a_share_alone(three: Publisher, device: TufDevice) -> None:
    give(three, 1, 0.5)
    assert assigned(device) == [(1, 0.5)]


def test_a_group_never_goes_back_but_by_a_new_release_of_old_bytes(
    three: Publisher, device: TufDevice, tmp_path: Path
) -> None:
    give(three, 2)
    three.carry_out(lambda repository: unassign(repository, "line", "tiny"))
    with pytest.raises(PublishError, match=r"is release 1, and line was given 2 before"):
        give(three, 1)
    publish(three, tmp_path / "tiny", version=1)
    give(three, 1)
    assert assigned(device) == [(4, 100.0)]


def test_a_publisher_whose_devices_are_further_than_the_repository_chooses_the_counter(
    publisher: Publisher, device: TufDevice, tmp_path: Path
) -> None:
    folder = tiny(tmp_path, 1)
    publish(publisher, folder)
    release = publish(publisher, folder, counter=7).release
    assert release == ReleasePath("vision", "tiny", 7)
    assert fetch_manifest(device, release).release_counter == 7
    give(publisher, 1)
    assert assigned(device) == [(7, 100.0)]
    assert publish(publisher, folder).release.counter == 8
    with pytest.raises(PublishError, match="tiny has release 8 already, and counters only grow; wanted 9 to"):
        publish(publisher, folder, counter=8)


def follows(highest: int, counter: int) -> bool:
    """Whether a device that had a release of a counter takes another one."""
    release = ReleasePath("vision", "tiny", counter)
    given = Assignment("tiny", release.manifest, "5" * 64, 100.0)
    return why_not_offered(given, KnownReleases({"tiny": highest}, {}, {})) is None


@pytest.mark.parametrize(
    ("highest", "asked", "chosen"),
    [(0, None, 1), (5, None, 6), (5, 6, 6), (0, LONGEST_LEAP, LONGEST_LEAP), (5, LONGEST_LEAP + 5, LONGEST_LEAP + 5)],
)
def test_a_counter_that_is_chosen_is_one_that_devices_follow(highest: int, asked: int | None, chosen: int) -> None:
    assert choose_counter("tiny", highest, asked) == chosen
    assert follows(highest, chosen)


@pytest.mark.parametrize("highest", [0, 5])
def test_a_counter_that_devices_would_refuse_is_refused_with_the_next_step(highest: int) -> None:
    asked = highest + LONGEST_LEAP + 1
    assert not follows(highest, asked)
    with pytest.raises(PublishError, match=f"wanted at most {asked - 1}: publish and assign that one first"):
        choose_counter("tiny", highest, asked)
    assert choose_counter("tiny", asked - 1, asked) == asked


def test_a_counter_beyond_what_a_new_device_follows_is_noted(publisher: Publisher, tmp_path: Path) -> None:
    folder = tiny(tmp_path, 1)
    assert not any("never had" in note for note in publish(publisher, folder, counter=LONGEST_LEAP).notes)
    assert any("devices that never had tiny begin" in note for note in publish(publisher, folder).notes)


def test_a_model_is_taken_away_from_a_group(three: Publisher, device: TufDevice) -> None:
    give(three, 1)
    three.carry_out(lambda repository: unassign(repository, "line", "tiny"))
    assert assigned(device) == []
    with pytest.raises(PublishError, match="line has no 'tiny'; it has nothing"):
        three.carry_out(lambda repository: unassign(repository, "line", "tiny"))


@pytest.mark.parametrize(
    ("group", "model", "version", "percent", "complaint"),
    [
        ("line", "tiny", 9, 100.0, "has no version 9; published: 1, 2, 3"),
        ("line", "other", 1, 100.0, "no model 'other' is published; known: tiny; .*publish MODEL_DIR --team vision`"),
        ("line", "sound/tiny", 1, 100.0, "no model 'sound/tiny' is published; known: vision/tiny;"),
        ("yard", "tiny", 1, 100.0, "no group 'yard'; known: line"),
        ("line", "tiny", 1, 0.0, "percent is 0"),
        ("line", "tiny", 1, 100.5, "percent is 100.5"),
        ("line", "tiny", 1, float("nan"), "percent is nan"),
    ],
)
def test_an_impossible_assignment_is_refused_with_the_possible_ones(
    group: str, model: str, version: int, percent: float, complaint: str, three: Publisher
) -> None:
    with pytest.raises(PublishError, match=complaint):
        three.carry_out(lambda repository: assign(repository, group, model, version, percent))


def test_a_manifest_that_somebody_changed_on_the_disk_is_not_assigned(three: Publisher) -> None:
    path = next((three.path / "targets" / "team" / "vision" / "tiny" / "2").glob("*.manifest.json"))
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 7'))
    with pytest.raises(PublishError, match="was changed after it was signed"):
        give(three, 2)


# ---- clean and bundle -----------------------------------------------------------------------------------------------


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_clean_deletes_what_nothing_names_and_keeps_every_root(
    three: Publisher, device: TufDevice, tmp_path: Path
) -> None:
    give(three, 1)
    give(three, 2)
    (three.path / "targets" / "junk").write_text("left by a publisher that was killed")
    with three.opened() as repository:
        before = set(repository.catalog.blobs())
        swept = sweep(repository)
    assert Path("targets/junk") in swept.files
    assert swept.nbytes > 0
    assert files_of(three.path / "targets") == before
    assert len(list(three.path.glob("metadata/*.json"))) == 6  # root, timestamp, snapshot, targets, a team, a group
    assert assigned(device) == [(2, 100.0)]
    assert device.fetch(ReleasePath("vision", "tiny", 1).file("model.onnx")) is not None
    with three.opened() as repository:
        assert sweep(repository).files == ()


def test_clean_keeps_the_newest_releases_and_those_that_groups_run(three: Publisher, device: TufDevice) -> None:
    give(three, 1)
    with three.opened() as repository:
        change = withdraw(repository, 1)
        assert change is not None
        change.commit()
        sweep(repository)
    for counter, is_there in ((1, True), (2, False), (3, True)):
        assert (device.fetch(ReleasePath("vision", "tiny", counter).manifest) is not None) is is_there
        assert any(f"/tiny/{counter}/" in name for name in files_of(three.path)) is is_there
    with three.opened() as repository:
        assert withdraw(repository, 1) is None


def test_after_a_clean_the_next_release_still_has_the_next_counter(three: Publisher, tmp_path: Path) -> None:
    with three.opened() as repository:
        change = withdraw(repository, 1)
        assert change is not None
        change.commit()
    assert publish(three, tiny(tmp_path, 4)).release.counter == 4
    with pytest.raises(PublishError, match="wanted 1 or more"), three.opened() as repository:
        withdraw(repository, 0)


def test_a_bundle_has_all_that_a_device_of_the_group_needs_and_nothing_else(three: Publisher, tmp_path: Path) -> None:
    for name in ("sound", "smell"):
        three.carry_out(lambda repository, name=name: add_team(repository, name, NewKeys(is_online=True)))  # type: ignore[misc]
    three.carry_out(lambda repository: add_group(repository, "yard", NewKeys(is_online=True)))
    give(three, 1)
    give(three, 3, 10.0)
    out = tmp_path / "usb"
    bundle(three, out)
    files = ("golden.bin", "manifest.json", "model.onnx")
    assert {unprefixed(name) for name in files_of(out / "targets")} == {"fleet/line/assign.json"} | {
        f"team/vision/tiny/{counter}/{name}" for counter in (1, 3) for name in files
    }
    device = TufDevice(out, tmp_path / "device", three.root_1)
    assert assigned(device) == [(3, 10.0), (1, 100.0)]
    for counter in (1, 3):
        manifest = fetch_manifest(device, ReleasePath("vision", "tiny", counter))
        for path in (manifest.golden.path, *(artifact.path for artifact in manifest.artifacts)):
            assert device.fetch(path) is not None
    names = {Path(name).name for name in files_of(out)} - {"1.root.json"}
    assert names == set(device.fetched) - {"2.root.json"}


def unprefixed(name: str) -> str:
    """A target's path from the name that it lies under."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[2]}"


def bundle(publisher: Publisher, out: Path, group: str = "line") -> None:
    with publisher.opened() as repository:
        write_bundle(repository, group, out)


def test_a_bundle_is_never_mixed_into_something_else(three: Publisher, tmp_path: Path) -> None:
    out = tmp_path / "usb"
    bundle(three, out)
    with pytest.raises(PublishError, match="holds something already"):
        bundle(three, out)
    with pytest.raises(PublishError, match="no group 'yard'"):
        bundle(three, tmp_path / "other", "yard")
    assert not (tmp_path / "other").exists()


def test_a_bundle_of_a_repository_with_a_changed_blob_is_not_finished(three: Publisher, tmp_path: Path) -> None:
    give(three, 1)
    blob = next((three.path / "targets" / "team" / "vision" / "tiny" / "1").glob("*.model.onnx"))
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(PublishError, match="was changed after it was signed"):
        bundle(three, tmp_path / "usb")
    assert not (tmp_path / "usb" / "metadata" / "timestamp.json").exists()


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_whole_way_by_command_line(
    publisher: Publisher,
    device: TufDevice,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_REPO", str(publisher.path))
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)

    def run(*words: str) -> dict[str, object]:
        status = main(["repo", *words, "--json"])
        shown = capsys.readouterr()
        assert status == 0, shown.err
        result: dict[str, object] = json.loads(shown.out)
        return result

    published = run("publish", str(DIGITS), "--team", "vision", "--tolerance", "f16=0.1")
    manifest = published["manifest"]
    assert isinstance(manifest, dict)
    assert manifest["golden"]["tolerance"]["f16"] == {"relative": 0.1, "absolute": 0.1, "exact": False}
    run("assign", "line", "digits=1", "--percent", "50")
    assert assigned(device) == [(1, 50.0)]
    status = run("status")
    assert status["releases"] == [
        {"team": "vision", "model": "digits", "version": 1, "release_counter": 1, "nbytes": 154091, "groups": ["line"]}
    ]
    assert run("bundle", "--group", "line", str(tmp_path / "usb"))["releases"] == ["team/vision/digits/1"]
    run("unassign", "line", "digits")
    assert run("clean", "--keep", "1")["deleted"]
    for words in (["assign", "line", "digits"], ["assign", "line", "digits=x"], ["publish", str(DIGITS)]):
        assert main(["repo", *words]) == 2
    assert main(["repo", "publish", str(DIGITS), "--team", "vision", "--tolerance", "f99=1"]) == 2
    assert main(["repo", "status"]) == 0
    assert "vision  digits" in capsys.readouterr().out
