"""The files that a release needs are fetched, whole or as a patch, and nothing that a hostile patch says does harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from msgspec.structs import replace

from edge_runtime.errors import DownloadError, NotPublished, StorageFailed, TrustError, UpdateError
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.updates.download import ExpectedFile, is_whole
from edge_runtime.updates.fetch import FetchedBody, FetchLimits, Pacer
from edge_runtime.updates.manifest import PATCH_ALGORITHM, Artifact, Delta
from edge_runtime.updates.patch import apply_patch, find_zstd
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.repository_view import RepositoryView
from edge_runtime.updates.staging import Staging, choose_artifacts, plan_fetches
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from edge_runtime.updates.tuf_client import TufClient
from tests.fakes.dying_disk import SmallDisk
from tests.fakes.releases import Made, delta, make_release, sha256
from tests.fakes.tuf_repository import NOW, TufRepository

RANDOM = np.random.default_rng(0)
OLD = RANDOM.bytes(300_000)
NEW = OLD[:250_000] + RANDOM.bytes(50_000)
PLENTY = 1 << 40


def zstd() -> ModuleType:
    library = find_zstd()
    assert library is not None
    return library


def patch_of(old: bytes, new: bytes, window_log: int = 19) -> bytes:
    parameters = zstd().CompressionParameter
    options = {parameters.window_log: window_log, parameters.enable_long_distance_matching: 1}
    patch: bytes = zstd().compress(new, options=options, zstd_dict=zstd().ZstdDict(old, is_raw=True).as_prefix)
    return patch


PATCH = patch_of(OLD, NEW)
BEFORE = make_release({"model.onnx": ("onnxruntime", OLD)})


class FromRepository:
    """A fetcher of a repository in memory; notes requests and counts bytes. `breaks_after`: bytes of one file."""

    def __init__(self, repository: TufRepository, place: str) -> None:
        self.asked: list[tuple[str, int]] = []
        self.breaks_after: int | None = None
        self.fetched_bytes = 0
        self._repository = repository
        self._place = place

    @contextmanager
    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> Iterator[FetchedBody]:
        self.asked.append((path.rpartition("/")[2].partition(".")[2], start_bytes))
        data = self._repository.find(f"{self._place}/{path}")
        if data is None:
            raise NotPublished(path)
        yield _Rest(self, data[start_bytes:], start_bytes)


class _Rest:
    def __init__(self, source: FromRepository, rest: bytes, start_bytes: int) -> None:
        self.start_bytes = start_bytes
        self._source = source
        self._rest = rest
        self._left = source.breaks_after if source.breaks_after is not None else len(rest) + 1

    def read(self, limit: int) -> bytes:
        if self._left <= 0:
            raise DownloadError("the link broke")
        piece = self._rest[: min(limit, self._left, 10_000)]
        self._rest = self._rest[len(piece) :]
        self._left -= len(piece)
        self._source.fetched_bytes += len(piece)
        return piece


class FreeMemory(HostProbe):
    """A host with as much free memory as it is told to have."""

    free_bytes = PLENTY

    def memory_available_bytes(self) -> int:
        return self.free_bytes


class Site:
    """A repository with one release, and a device that has the one before it."""

    def __init__(self, folder: Path, made: Made, patches: Sequence[tuple[Delta, bytes]] = ()) -> None:
        self.made = made
        self.folder = folder
        self.repository = TufRepository()
        for name, data in made.files.items():
            self.repository.add_target(made.path.replace("manifest.json", name), data)
        for each, data in patches:
            self.repository.add_target(each.target, data)
        self.repository.publish_all()
        self.store = ArtifactStore(folder / "artifacts")
        self.releases = Releases(folder / "releases", self.store)
        BEFORE.store(self.store)
        self.releases.lay_out(BEFORE.release, BEFORE.manifest_data, BEFORE.manifest.artifacts)
        self.source = FromRepository(self.repository, "targets")
        self.progress: list[tuple[int, int]] = []
        self.host = FreeMemory()
        self.staging = self.new_staging()

    def set_free_memory(self, nbytes: int) -> None:
        """Let the host say that so much memory is free."""
        self.host.free_bytes = nbytes

    def show_bytes(self, done_bytes: int, total_bytes: int) -> None:
        self.progress.append((done_bytes, total_bytes))

    def new_staging(self) -> Staging:
        metadata = FromRepository(self.repository, "metadata")
        bootstrap = self.repository.published["root"][0]
        client = TufClient(metadata, MetadataStore(self.folder / "metadata"), now_utc=NOW, bootstrap=bootstrap)
        client.refresh()
        pacer = Pacer(FetchLimits(total_s=100.0))
        repository = RepositoryView(client, self.source, self.store, pacer)
        return Staging(repository, pacer, probe=self.host)

    def stage(self, suffixes: Sequence[str] = (".onnx",)) -> tuple[Artifact, ...]:
        return self.staging.stage(self.made.manifest, suffixes, self.releases.artifacts(), self)

    def install(self) -> bytes:
        """Stage, lay out, open; the model's bytes."""
        chosen = self.stage()
        self.releases.lay_out(self.made.release, self.made.manifest_data, chosen)
        staged = self.releases.open(self.made.release)
        return staged.folder.versions[2].files["model.onnx"].read_bytes()

    @property
    def names(self) -> list[str]:
        """The files that were fetched, but for the golden file, which always is."""
        return [name for name, _ in self.source.asked if name != "golden.bin"]


def next_release(*deltas: Delta, data: bytes = NEW) -> Made:
    return make_release({"model.onnx": ("onnxruntime", data)}, version=2, counter=2, delta=deltas)


def with_patch(folder: Path, patch: bytes = PATCH, algorithm: str = PATCH_ALGORITHM, new: bytes = NEW) -> Site:
    described = delta(OLD, new, patch, counter=2, algorithm=algorithm)
    return Site(folder, next_release(described, data=new), [(described, patch)])


def test_a_patch_is_fetched_instead_of_the_file_and_gives_it(tmp_path: Path) -> None:
    site = with_patch(tmp_path)
    assert site.install() == NEW
    assert [name.rpartition(".")[2] for name in site.names] == ["patch"]
    assert site.source.fetched_bytes == len(PATCH) < 0.2 * len(NEW)
    assert site.progress[-1] == (len(PATCH), len(PATCH))
    assert list((tmp_path / "artifacts").glob("[0-9a-f]*")) == []


def test_without_a_patch_from_what_is_here_the_whole_file_is_fetched(tmp_path: Path) -> None:
    described = delta(b"something else", NEW, PATCH, counter=2, algorithm=PATCH_ALGORITHM)
    site = Site(tmp_path, next_release(described), [(described, PATCH)])
    assert site.install() == NEW
    assert site.names == ["model.onnx"]
    assert site.progress[-1] == (len(NEW), len(NEW))


def test_an_algorithm_that_is_not_known_is_passed_over(tmp_path: Path) -> None:
    site = with_patch(tmp_path, algorithm="bsdiff-2")
    assert site.install() == NEW
    assert site.names == ["model.onnx"]


def test_the_smallest_patch_is_taken(tmp_path: Path) -> None:
    other = RANDOM.bytes(1000) + NEW[1000:]
    small, large = patch_of(OLD, NEW), patch_of(other, NEW)
    deltas = [
        delta(old, NEW, patch, counter=2, algorithm=PATCH_ALGORITHM) for old, patch in ((OLD, small), (other, large))
    ]
    files = next_release(*deltas).manifest.artifacts
    bases = {each.from_sha256: 300_000 for each in deltas}
    (fetch,) = plan_fetches(next_release(*deltas).manifest, files, (), bases, PLENTY)
    assert fetch.delta == min(deltas, key=lambda each: each.size)


def test_a_file_that_did_not_change_is_not_fetched(tmp_path: Path) -> None:
    site = Site(tmp_path, next_release(data=OLD))
    assert site.install() == OLD
    assert site.names == []
    assert site.source.fetched_bytes == 0


def test_a_file_that_did_not_change_and_was_damaged_here_is_fetched(tmp_path: Path) -> None:
    site = Site(tmp_path, next_release(data=OLD))
    path = site.releases.artifacts()[sha256(OLD)]
    path.chmod(0o644)
    path.write_bytes(OLD[:-1])
    assert site.install() == OLD
    assert site.names == ["model.onnx"]


def test_only_files_of_backends_that_are_here_are_fetched() -> None:
    manifest = make_release(
        {
            "model.onnx": ("onnxruntime", b"1"),
            "weights.data": ("onnxruntime", b"2"),
            "net.xml": ("openvino", b"3"),
            "net.bin": ("openvino", b"4"),
        }
    ).manifest
    chosen = {
        suffixes: [each.path.rpartition("/")[2] for each in choose_artifacts(manifest, suffixes)]
        for suffixes in ((".onnx",), (".xml",), (".onnx", ".xml"), (".plan",))
    }
    assert list(chosen.values()) == [
        ["model.onnx", "weights.data"],
        ["net.xml", "net.bin"],
        ["model.onnx", "weights.data", "net.xml", "net.bin"],
        [],
    ]


def test_a_release_with_nothing_for_this_device_is_not_fetched(tmp_path: Path) -> None:
    site = Site(tmp_path, next_release())
    with pytest.raises(UpdateError, match="no backend here loads it"):
        site.stage((".plan",))
    assert site.names == []


def test_a_release_with_code_is_not_fetched(tmp_path: Path) -> None:
    made = make_release({"model.onnx": ("onnxruntime", NEW), "ops.so": ("onnxruntime", b"")}, version=2, counter=2)
    site = Site(tmp_path, made)
    with pytest.raises(UpdateError, match=r"names ops.so, which is code"):
        site.stage()
    assert site.names == []


def test_a_patch_whose_application_needs_too_much_memory_is_not_taken(tmp_path: Path) -> None:
    site = with_patch(tmp_path)
    site.set_free_memory(1_500_000)
    assert site.install() == NEW
    assert site.names == ["model.onnx"]


def test_without_zstd_whole_files_are_fetched_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edge_runtime.updates.staging.find_zstd", lambda: None)
    site = with_patch(tmp_path)
    assert site.install() == NEW
    assert site.names == ["model.onnx"]
    assert [record.levelno for record in caplog.records if "zstd is missing" in record.message] == [logging.WARNING]


# ---- patches that do not do -----------------------------------------------------------------------------------------

BOMB = patch_of(OLD, bytes(1 << 28))
OTHER = patch_of(OLD, NEW[:-1] + b"!")


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(b"no patch at all" * 100, id="no zstd"),
        pytest.param(b"", id="empty"),
        pytest.param(PATCH[: len(PATCH) // 2], id="ends early"),
        pytest.param(PATCH[:40_000] + bytes(100) + PATCH[40_100:], id="damaged"),
        pytest.param(OTHER, id="of another file"),
        pytest.param(patch_of(OLD[::-1], NEW)[: len(NEW) - 1], id="from another file"),
        pytest.param(patch_of(OLD, NEW, window_log=27), id="window"),
        pytest.param(BOMB, id="bomb"),
    ],
)
def test_a_signed_patch_that_does_not_give_the_file_costs_no_more_than_itself(
    tmp_path: Path, patch: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    site = with_patch(tmp_path, patch)
    assert site.install() == NEW
    if site.names[-1] == "model.onnx":
        assert "so the whole file is fetched" in caplog.text
        assert site.source.fetched_bytes == len(patch) + len(NEW)
    assert [path.name for path in (tmp_path / "artifacts").rglob("*") if path.is_file()] == []


def test_a_decompression_bomb_ends_one_byte_past_the_files_length() -> None:
    assert len(BOMB) < 100_000
    pieces = apply_patch(zstd(), OLD, BOMB, len(NEW))
    assert sum(map(len, pieces)) == len(NEW) + 1


def test_a_patch_that_wants_a_larger_window_than_its_files_is_refused() -> None:
    # The content size is left out, so that the frame says the window it was given.
    maker = zstd().ZstdCompressor(options={zstd().CompressionParameter.window_log: 27})
    patch = maker.compress(NEW) + maker.flush()
    with pytest.raises(UpdateError, match="cannot be applied"):
        list(apply_patch(zstd(), OLD, patch, len(NEW)))


def test_a_patch_that_nobody_signs_leaves_the_whole_file(tmp_path: Path) -> None:
    described = delta(OLD, NEW, PATCH, counter=2, algorithm=PATCH_ALGORITHM)
    site = Site(tmp_path, next_release(described))
    assert site.install() == NEW
    assert site.names == ["model.onnx"]


def test_a_patch_that_was_swapped_leaves_the_whole_file(tmp_path: Path) -> None:
    site = with_patch(tmp_path)
    target = site.made.manifest.delta[0].target
    site.repository.artifacts[target] = OTHER[: len(PATCH)]
    assert site.install() == NEW
    assert site.names[-1] == "model.onnx"


def test_a_patch_that_is_signed_as_another_than_the_manifest_says_leaves_the_whole_file(tmp_path: Path) -> None:
    described = delta(OLD, NEW, PATCH, counter=2, algorithm=PATCH_ALGORITHM)
    site = Site(tmp_path, next_release(replace(described, size=len(PATCH) + 1)), [(described, PATCH)])
    assert site.install() == NEW
    assert site.names == ["model.onnx"]


def test_an_artifact_that_is_signed_as_another_than_the_manifest_says_is_not_taken(tmp_path: Path) -> None:
    site = Site(tmp_path, next_release())
    site.repository.add_target(site.made.path.replace("manifest.json", "model.onnx"), OLD)
    site.repository.publish_all()
    site.staging = site.new_staging()
    with pytest.raises(TrustError, match="both must be the same"):
        site.stage()
    assert site.names == []


def test_an_artifact_that_nobody_signs_is_not_taken(tmp_path: Path) -> None:
    site = Site(tmp_path, next_release())
    del site.repository.targets().targets[site.made.path.replace("manifest.json", "model.onnx")]
    site.repository.publish_all()
    site.staging = site.new_staging()
    with pytest.raises(TrustError, match="no team that may speak of it signs it"):
        site.stage()


# ---- a link that breaks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_link_cut_at_many_places_costs_nothing_twice(tmp_path: Path, is_patched: bool) -> None:
    site = with_patch(tmp_path) if is_patched else Site(tmp_path, next_release())
    cuts = 0
    whole = len(PATCH) if is_patched else len(NEW)
    site.source.breaks_after = whole // 7
    while True:
        try:
            site.stage()
        except DownloadError:
            cuts += 1
            site.staging = site.new_staging()
        else:
            break
    assert cuts == 7
    assert site.source.fetched_bytes == whole
    assert site.install() == NEW


def test_a_full_disk_is_not_a_fault_of_the_patch(tmp_path: Path) -> None:
    site = with_patch(tmp_path)
    site.store = ArtifactStore(tmp_path / "artifacts", disk=SmallDisk(len(PATCH)))
    site.staging = site.new_staging()
    with pytest.raises(StorageFailed, match="bytes are free"):
        site.stage()
    assert [name.rpartition(".")[2] for name in site.names] == ["patch"]


# ---- what is made here ----------------------------------------------------------------------------------------------


def test_a_file_that_was_made_here_is_kept_as_one_that_was_fetched(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    wanted = ExpectedFile.of(len(NEW), {"sha256": sha256(NEW)})
    path = store.adopt(wanted, [NEW[:1000], NEW[1000:]])
    assert is_whole(path, wanted)
    assert path == store.path(wanted)
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_file_that_was_made_wrongly_leaves_nothing_and_is_not_made_to_its_end(tmp_path: Path) -> None:
    store, taken = ArtifactStore(tmp_path), 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield bytes(1000)

    with pytest.raises(TrustError, match="another file: got 301000 bytes"):
        store.adopt(ExpectedFile.of(len(NEW), {"sha256": sha256(NEW)}), endless())
    assert taken == 301
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
