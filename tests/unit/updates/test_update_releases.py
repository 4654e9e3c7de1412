"""A release is served only when every byte of it is as it was signed, and lies here whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from edge_runtime.config.settings import ModelSettings, Warmup
from edge_runtime.durable import SystemDisk
from edge_runtime.errors import StorageFailed, UpdateError
from edge_runtime.updates.download import ExpectedFile, is_whole
from edge_runtime.updates.releases import Releases, golden_input
from edge_runtime.updates.store import ArtifactStore
from tests.fakes.dying_disk import DyingDisk, Killed, failing
from tests.fakes.releases import Made, folder_of, make_release, sha256

GRAPH = ("onnxruntime", b"graph" * 1000)
DATA = ("onnxruntime", b"data" * 1000)
RELEASE = make_release({"model.onnx": GRAPH, "weights.data": DATA}, settings={"max_batch_rows": 8})
NEXT = make_release({"model.onnx": GRAPH, "weights.data": DATA}, version=2, counter=2)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def releases(tmp_path: Path, store: ArtifactStore) -> Releases:
    return Releases(tmp_path / "releases", store)


def lay_out(releases: Releases, store: ArtifactStore, made: Made) -> None:
    made.store(store)
    releases.lay_out(made.release, made.manifest_data, made.manifest.artifacts)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_release_is_a_folder_with_one_version_that_the_loader_takes(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    staged = releases.open(RELEASE.release)
    folder = folder_of(tmp_path / "releases", RELEASE)
    assert staged.manifest == RELEASE.manifest
    assert staged.golden.read_bytes() == RELEASE.files["golden.bin"]
    assert staged.folder.name == "digits"
    assert staged.folder.settings == ModelSettings(max_batch_rows=8, convert="never")
    (version,) = staged.folder.versions.values()
    assert (version.model, version.number) == ("digits", 1)
    assert version.files == {name: folder / name for name in ("model.onnx", "weights.data")}
    assert [path.read_bytes() for path in version.files.values()] == [GRAPH[1], DATA[1]]
    staged.check_unchanged()


def test_the_golden_input_of_a_release_is_there_for_who_only_looks(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    x, y = np.ones((1, 2), np.float32), np.zeros((1, 1), np.float32)
    made = make_release({"model.onnx": ("onnxruntime", b"graph")}, ({"x": x}, {"y": y}), model="sums", version=4)
    assert golden_input(tmp_path / "releases", "sums", 4) is None
    lay_out(releases, store, made)
    (tmp_path / "releases" / "half").mkdir()
    found = golden_input(tmp_path / "releases", "sums", 4)
    assert found is not None
    assert {name: array.tolist() for name, array in found.items()} == {"x": x.tolist()}
    assert golden_input(tmp_path / "releases", "sums", 3) is None
    golden = folder_of(tmp_path / "releases", made) / "golden.bin"
    golden.chmod(0o644)
    golden.write_bytes(b"short")
    assert golden_input(tmp_path / "releases", "sums", 4) is None


def test_files_are_read_only_have_one_name_and_left_the_store(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    """A file that a graph reads as its data must have one name only, or the walk over the graph refuses it."""
    lay_out(releases, store, RELEASE)
    for path in folder_of(tmp_path / "releases", RELEASE).iterdir():
        assert (path.stat().st_mode & 0o777, path.stat().st_nlink) == (0o444, 1)
    assert names(tmp_path / "artifacts") == []


def test_a_second_release_shares_the_graph_and_has_a_copy_of_the_data(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    NEXT.store(store, ["golden.bin"])
    releases.lay_out(NEXT.release, NEXT.manifest_data, NEXT.manifest.artifacts)
    for made in (RELEASE, NEXT):
        releases.open(made.release)
        folder = folder_of(tmp_path / "releases", made)
        assert [(folder / name).stat().st_nlink for name in ("model.onnx", "weights.data")] == [2, 1]
    assert set(releases.artifacts()) == {sha256(GRAPH[1]), sha256(DATA[1])}


def test_two_data_files_with_the_same_bytes_have_one_name_each(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, made := make_release({"model.onnx": GRAPH, "a.data": DATA, "b.data": DATA}))
    folder = folder_of(tmp_path / "releases", made)
    assert [path.stat().st_nlink for path in releases.open(made.release).folder.versions[1].files.values()] == [1] * 3
    assert (folder / "b.data").read_bytes() == DATA[1]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_a_file_system_without_links_gets_copies(store: ArtifactStore, tmp_path: Path, number: int) -> None:
    class NoLinks(SystemDisk):
        def link(self, old: Path, new: Path) -> None:  # type: ignore[override]
            raise OSError(number, os.strerror(number))

    releases = Releases(tmp_path / "releases", store, disk=NoLinks())
    lay_out(releases, store, RELEASE)
    releases.open(RELEASE.release)
    assert names(tmp_path / "artifacts") == []


def test_only_the_artifacts_of_backends_that_are_here_need_to_lie_there(
    releases: Releases, store: ArtifactStore
) -> None:
    both = make_release({"model.onnx": GRAPH, "model.xml": ("openvino", b"<net/>"), "model.bin": ("openvino", b"")})
    both.store(store, ["model.onnx", "golden.bin"])
    releases.lay_out(both.release, both.manifest_data, both.manifest.artifacts[:1])
    assert list(releases.open(both.release).folder.versions[1].files) == ["model.onnx"]


def test_half_of_a_backends_files_is_not_a_release(releases: Releases, store: ArtifactStore) -> None:
    RELEASE.store(store)
    with pytest.raises(UpdateError, match=r"weights.data: is missing"):
        releases.lay_out(RELEASE.release, RELEASE.manifest_data, RELEASE.manifest.artifacts[:1])
    with pytest.raises(UpdateError, match=r"has no artifact; wanted model.onnx, weights.data"):
        releases.lay_out(RELEASE.release, RELEASE.manifest_data, [])


def test_a_file_that_was_never_fetched_is_named(releases: Releases, store: ArtifactStore, tmp_path: Path) -> None:
    RELEASE.store(store, ["model.onnx", "golden.bin"])
    with pytest.raises(UpdateError, match=r"weights.data: its bytes are not here"):
        releases.lay_out(RELEASE.release, RELEASE.manifest_data, RELEASE.manifest.artifacts)
    with pytest.raises(UpdateError, match=r"manifest.json: cannot be read"):
        releases.open(RELEASE.release)


# ---- what is not as it was signed -----------------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: list[Callable[[Path], None]] = [overwrite, Path.unlink, replace_by_link, replace_by_pipe]


@pytest.mark.parametrize("name", ["manifest.json", "golden.bin", "model.onnx", "weights.data"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_or_missing_is_named_and_nothing_is_served(
    releases: Releases, store: ArtifactStore, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    lay_out(releases, store, RELEASE)
    change(folder_of(tmp_path / "releases", RELEASE) / name)
    with pytest.raises(UpdateError, match=name):
        releases.open(RELEASE.release)


@pytest.mark.parametrize("name", ["manifest.json", "golden.bin", "model.onnx", "weights.data"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_target_swapped_between_verification_and_load_is_found(
    releases: Releases, store: ArtifactStore, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    lay_out(releases, store, RELEASE)
    staged = releases.open(RELEASE.release)
    change(folder_of(tmp_path / "releases", RELEASE) / name)
    with pytest.raises(UpdateError, match=name):
        staged.check_unchanged()


def test_a_flipped_bit_anywhere_is_found_and_its_file_named(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    random = Random(0)
    paths = [path for path in folder_of(tmp_path / "releases", RELEASE).iterdir() if path.stat().st_size]
    for path in paths:
        path.chmod(0o644)
    for _ in range(500):
        path = random.choice(paths)
        place = random.randrange(path.stat().st_size)
        flipped = bytearray(path.read_bytes())
        flipped[place] ^= 1 << random.randrange(8)
        whole = path.read_bytes()
        path.write_bytes(flipped)
        with pytest.raises(UpdateError, match=path.name):
            releases.open(RELEASE.release)
        path.write_bytes(whole)
    releases.open(RELEASE.release)


@pytest.mark.parametrize("length", [(1 << 31) - 1, 1 << 31, (1 << 32) + 1])
def test_a_sparse_file_of_any_length_is_refused_unread(
    releases: Releases, store: ArtifactStore, tmp_path: Path, length: int
) -> None:
    lay_out(releases, store, RELEASE)
    for name in ("manifest.json", "golden.bin", "weights.data"):
        path = folder_of(tmp_path / "releases", RELEASE) / name
        path.chmod(0o644)
        whole = path.read_bytes()
        os.truncate(path, length)
        with pytest.raises(UpdateError, match=name):
            releases.open(RELEASE.release)
        path.write_bytes(whole)


def test_a_target_swapped_and_put_back_with_its_old_times_is_found(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    staged = releases.open(RELEASE.release)
    path = folder_of(tmp_path / "releases", RELEASE) / "model.onnx"
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(bytes(before.st_size))
    path.write_bytes(GRAPH[1])
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UpdateError, match=r"model.onnx: was changed after it was verified"):
        staged.check_unchanged()


def test_a_file_that_the_manifest_does_not_name_is_refused(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    (folder_of(tmp_path / "releases", RELEASE) / "model.xml").write_bytes(b"<net/>")
    with pytest.raises(UpdateError, match=r"model.xml: is not a file of the release"):
        releases.open(RELEASE.release)


def test_a_damaged_release_is_laid_out_again_from_what_was_fetched_again(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    overwrite(folder_of(tmp_path / "releases", RELEASE) / "weights.data")
    lay_out(releases, store, RELEASE)
    releases.open(RELEASE.release)


def test_the_manifest_of_another_release_is_refused(releases: Releases, store: ArtifactStore) -> None:
    NEXT.store(store)
    with pytest.raises(UpdateError, match="is not the manifest that was signed"):
        releases.lay_out(RELEASE.release, NEXT.manifest_data, NEXT.manifest.artifacts)
    other = msgspec.structs.replace(NEXT.release, version=3)
    with pytest.raises(UpdateError, match="wanted"):
        releases.lay_out(other, NEXT.manifest_data, NEXT.manifest.artifacts)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"options": {"custom_op_library": "/tmp/x.so"}}, "options is not published: .* may name code"),
        ({"device": "CUDA"}, "device is not published"),
        ({"versions": {"all": True}}, "versions is not published"),
        ({"max_batch_row": 8}, "did you mean 'max_batch_rows'"),
        ({"threads": "many"}, "threads"),
    ],
)
def test_settings_that_could_name_code_or_are_not_known_are_refused(
    releases: Releases, store: ArtifactStore, settings: dict[str, object], reason: str
) -> None:
    made = make_release({"model.onnx": GRAPH}, settings=settings)
    made.store(store)
    with pytest.raises(UpdateError, match=reason):
        releases.lay_out(made.release, made.manifest_data, made.manifest.artifacts)


def test_settings_of_a_release_are_those_of_model_toml(releases: Releases, store: ArtifactStore) -> None:
    lay_out(releases, store, made := make_release({"m.onnx": GRAPH}, settings={"warmup": {"rows": [1, 2]}}))
    assert releases.open(made.release).folder.settings == ModelSettings(warmup=Warmup(rows=(1, 2)), convert="never")


@pytest.mark.parametrize(
    "name",
    [
        "model.py",
        "ops.so",
        "model.pt",
        "saved_model.pb",
        "model.plan",
        "m.ubj",
        "m.skops",
        "manifest.json",
        "golden.bin",
    ],
)
def test_code_sources_and_names_that_are_taken_are_refused(releases: Releases, store: ArtifactStore, name: str) -> None:
    made = make_release({"model.onnx": GRAPH, name: GRAPH})
    store.adopt(ExpectedFile.of(len(GRAPH[1]), {"sha256": sha256(GRAPH[1])}), [GRAPH[1]])
    with pytest.raises(UpdateError, match=f"names {name}"):
        releases.lay_out(made.release, made.manifest_data, made.manifest.artifacts)


# ---- cut off --------------------------------------------------------------------------------------------------------


def test_a_process_that_ends_at_any_call_leaves_a_whole_release_or_none_and_loses_no_file(tmp_path: Path) -> None:
    number = 0
    while True:
        number += 1
        root, disk = tmp_path / str(number), DyingDisk(number)
        store = ArtifactStore(root / "artifacts")
        RELEASE.store(store)
        try:
            Releases(root / "releases", store, disk=disk).lay_out(
                RELEASE.release, RELEASE.manifest_data, RELEASE.manifest.artifacts
            )
        except Killed:
            pass
        else:
            break
        releases = Releases(root / "releases", store)
        if folder_of(root / "releases", RELEASE).exists():
            releases.open(RELEASE.release)
        assert set(releases.artifacts()) in (set(), {sha256(GRAPH[1]), sha256(DATA[1])})
        releases.lay_out(RELEASE.release, RELEASE.manifest_data, RELEASE.manifest.artifacts)
        releases.open(RELEASE.release)
        assert names(root / "artifacts") == []
        assert len(list((root / "releases").iterdir())) == 1
    assert number > 15


def test_a_store_whose_names_came_back_after_a_power_cut_is_tidied_before_the_load(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, RELEASE)
    folder = folder_of(tmp_path / "releases", RELEASE)
    os.link(folder / "weights.data", tmp_path / "artifacts" / sha256(DATA[1]))
    releases.open(RELEASE.release).check_unchanged()
    assert (folder / "weights.data").stat().st_nlink == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_call_is_said_and_the_store_keeps_the_files(tmp_path: Path, number: int) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    RELEASE.store(store)
    calls = 0
    while True:
        calls += 1
        root = tmp_path / str(calls)
        try:
            Releases(root, store, disk=DyingDisk(calls, failing(number))).lay_out(
                RELEASE.release, RELEASE.manifest_data, RELEASE.manifest.artifacts
            )
        except StorageFailed:
            for data in RELEASE.files.values():
                wanted = ExpectedFile.of(len(data), {"sha256": sha256(data)})
                assert is_whole(store.path(wanted), wanted)
        else:
            break
    assert calls > 15


def test_only_releases_that_are_needed_are_kept(releases: Releases, store: ArtifactStore, tmp_path: Path) -> None:
    lay_out(releases, store, RELEASE)
    lay_out(releases, store, NEXT)
    fetched, stale = make_release({"model.onnx": ("onnxruntime", b"3")}), make_release({"m.onnx": ("openvino", b"4")})
    for made in (fetched, stale):
        made.store(store)
    releases.keep_only({NEXT.release.manifest_sha256}, digests={sha256(b"3")})
    assert [path.name for path in (tmp_path / "releases").iterdir()] == [NEXT.release.manifest_sha256]
    assert names(tmp_path / "artifacts") == [sha256(b"3")]
    releases.open(NEXT.release)
    releases.keep_only(())
    assert names(tmp_path) == []


def test_a_removal_that_was_cut_off_is_finished_and_never_mistaken_for_a_release(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    for number in range(1, 4):
        lay_out(Releases(tmp_path / "releases", store), store, RELEASE)
        with pytest.raises(Killed):
            Releases(tmp_path / "releases", store, disk=DyingDisk(number)).keep_only(())
        releases = Releases(tmp_path / "releases", store)
        if folder_of(tmp_path / "releases", RELEASE).exists():
            releases.open(RELEASE.release)
        releases.keep_only(())
        assert names(tmp_path / "releases") == []


PIPELINE = make_release(
    {"detect/model.onnx": GRAPH, "read/model.onnx": GRAPH, "read/weights.data": DATA},
    model="reader",
    counter=7,
    pipeline="""
    [[step]]
    name = "boxes"
    model = "detect"
    inputs = {x = "input.x"}
    [[step]]
    name = "text"
    model = "read"
    inputs = {x = "boxes.y"}
    [output]
    y = "text.y"
    """,
)


def test_a_pipeline_is_a_folder_with_its_models_as_models_of_its_own(
    releases: Releases, store: ArtifactStore, tmp_path: Path
) -> None:
    lay_out(releases, store, PIPELINE)
    staged = releases.open(PIPELINE.release)
    folder = folder_of(tmp_path / "releases", PIPELINE)
    assert names(folder) == [
        "golden.bin", "manifest.json", "models/detect/model.onnx", "models/read/model.onnx",
        "models/read/weights.data", "pipeline.toml",
    ]  # fmt: skip
    assert (folder / "pipeline.toml").read_text() == PIPELINE.manifest.pipeline
    assert (staged.folder.name, list(staged.folder.versions)) == ("reader", [1])
    owned = {each.name: each.versions[7] for each in staged.folder.owned}
    assert {name: sorted(version.files) for name, version in owned.items()} == {
        "reader/detect": ["model.onnx"],
        "reader/read": ["model.onnx", "weights.data"],
    }
    assert owned["reader/read"].path == folder / "models" / "read"
    assert (folder / "models" / "read" / "weights.data").stat().st_nlink == 1
    staged.check_unchanged()


def test_a_pipeline_keeps_its_files_for_the_release_after_it(releases: Releases, store: ArtifactStore) -> None:
    lay_out(releases, store, PIPELINE)
    assert set(releases.artifacts()) == {sha256(GRAPH[1]), sha256(DATA[1])}


@pytest.mark.parametrize("place", ["pipeline.toml", "models/detect/model.onnx", "models/read/weights.data"])
@pytest.mark.parametrize("change", [b"another", None])
def test_a_pipeline_with_a_changed_or_lost_file_is_not_served_and_made_anew(
    releases: Releases, store: ArtifactStore, tmp_path: Path, place: str, change: bytes | None
) -> None:
    lay_out(releases, store, PIPELINE)
    staged = releases.open(PIPELINE.release)
    file = folder_of(tmp_path / "releases", PIPELINE) / place
    file.unlink()
    if change is not None:
        file.write_bytes(change)
    with pytest.raises(UpdateError, match=re.escape(place)):
        staged.check_unchanged()
    with pytest.raises(UpdateError, match=re.escape(place)):
        releases.open(PIPELINE.release)
    lay_out(releases, store, PIPELINE)
    releases.open(PIPELINE.release).check_unchanged()


@pytest.mark.parametrize("place", ["models/detect/more.onnx", "models/other/model.onnx", "more/model.onnx", "models/x"])
def test_a_file_that_is_none_of_a_pipelines_is_found(
    releases: Releases, store: ArtifactStore, tmp_path: Path, place: str
) -> None:
    lay_out(releases, store, PIPELINE)
    file = folder_of(tmp_path / "releases", PIPELINE) / place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"more")
    with pytest.raises(UpdateError, match="find out who writes there"):
        releases.open(PIPELINE.release)
