"""A verified file lies on disk whole or not at all, whichever system call fails, and under names of our choosing."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.durable import growing
from edge_runtime.errors import DownloadError, StorageFailed, TrustError, UpdateError
from edge_runtime.updates.download import ARTIFACT_MODE, ExpectedFile, is_whole
from edge_runtime.updates.fetch import FetchedBody, FetchLimits, Pace
from edge_runtime.updates.store import ArtifactStore, MetadataStore, place, target_file
from tests.fakes.dying_disk import DyingDisk, SmallDisk, failing

DATA = bytes(range(256)) * 1024
PIECE = 10_000
NAME = "path/in/repository"
PRINTABLE = st.characters(codec="utf-8")


class FromMemory:
    """A fetcher of one file; notes where each fetch began. `stops_at`: where it breaks off."""

    def __init__(self, data: bytes = DATA, *, has_ranges: bool = True, stops_at: int | None = None) -> None:
        self.data = data
        self.has_ranges = has_ranges
        self.stops_at = stops_at
        self.starts: list[int] = []

    @contextmanager
    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> Iterator[FetchedBody]:
        assert path == NAME
        self.starts.append(start_bytes)
        yield _Memory(self, start_bytes if self.has_ranges else 0)


class _Memory:
    def __init__(self, source: FromMemory, start_bytes: int) -> None:
        self._source = source
        self.start_bytes = start_bytes
        self._at = start_bytes

    def read(self, limit: int) -> bytes:
        end = len(self._source.data) if self._source.stops_at is None else self._source.stops_at
        if self._source.stops_at is not None and self._at >= end:
            raise DownloadError("broken off")
        piece = self._source.data[self._at : min(end, self._at + min(limit, PIECE))]
        self._at += len(piece)
        return piece


def wanted(data: bytes = DATA) -> ExpectedFile:
    return ExpectedFile.of(len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def fetch(store: ArtifactStore, source: FromMemory, want: ExpectedFile | None = None) -> Path:
    return store.fetch(source, NAME, want or wanted(), pace=Pace(FetchLimits(total_s=100.0)))


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---- artifacts ------------------------------------------------------------------------------------------------------


def test_an_artifact_is_kept_under_its_hash_and_read_only(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    path = fetch(store, FromMemory())
    assert path == store.path(wanted()) == tmp_path / "artifacts" / hashlib.sha256(DATA).hexdigest()
    assert path.stat().st_mode & 0o777 == ARTIFACT_MODE
    assert files(tmp_path / "artifacts") == {path.name: DATA}


def test_an_artifact_is_synced_before_it_gets_its_name_and_its_folder_after(tmp_path: Path) -> None:
    disk = DyingDisk(piece_bytes=PIECE)
    fetch(ArtifactStore(tmp_path, disk=disk), FromMemory(DATA))
    assert disk.calls[-5:] == ["chmod", "fsync", "rename", "open", "fsync"]


def test_an_artifact_that_is_here_is_not_fetched(tmp_path: Path) -> None:
    store, source = ArtifactStore(tmp_path), FromMemory()
    fetch(store, source)
    fetch(store, source)
    assert source.starts == [0]


def test_an_artifact_that_was_changed_here_is_fetched_anew(tmp_path: Path) -> None:
    store, source = ArtifactStore(tmp_path), FromMemory()
    path = fetch(store, source)
    path.chmod(0o644)
    path.write_bytes(DATA[:-1] + b"!")
    assert fetch(store, source).read_bytes() == DATA


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_fetch_that_broke_off_is_resumed(tmp_path: Path, has_ranges: bool) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(DownloadError):
        fetch(store, FromMemory(stops_at=100_000))
    source = FromMemory(has_ranges=has_ranges)
    assert fetch(store, source).read_bytes() == DATA
    assert source.starts == [100_000]


def test_a_file_that_ends_early_is_resumed_when_there_is_more(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(DownloadError, match="ended after 1000 of"):
        fetch(store, FromMemory(DATA[:1000]))
    source = FromMemory()
    assert fetch(store, source).read_bytes() == DATA
    assert source.starts == [1000]


def test_a_part_that_the_disk_lost_bytes_of_is_fetched_anew(tmp_path: Path) -> None:
    """After a power cut a part may hold zeros where bytes were written and never synced."""
    store = ArtifactStore(tmp_path)
    with pytest.raises(DownloadError):
        fetch(store, FromMemory(stops_at=100_000))
    (part,) = (tmp_path / "parts").iterdir()
    part.write_bytes(bytes(100_000))
    source = FromMemory()
    assert fetch(store, source).read_bytes() == DATA
    assert source.starts == [100_000, 0]


def test_a_part_that_is_whole_needs_no_request(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / f"{wanted().digest}.part").write_bytes(DATA)
    source = FromMemory()
    assert fetch(store, source).read_bytes() == DATA
    assert source.starts == []


@pytest.mark.parametrize("part", [DATA + b"more", bytes(len(DATA))], ids=["too long", "wrong"])
def test_a_part_of_something_else_is_thrown_away(tmp_path: Path, part: bytes) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / f"{wanted().digest}.part").write_bytes(part)
    source = FromMemory()
    assert fetch(ArtifactStore(tmp_path), source).read_bytes() == DATA
    assert source.starts == [0]


@pytest.mark.parametrize("bad", [DATA[:-1] + b"!", DATA + b"!", DATA * 3], ids=["changed", "longer", "much longer"])
def test_bytes_that_were_not_signed_leave_nothing_behind(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(TrustError, match="wanted"):
        fetch(ArtifactStore(tmp_path), FromMemory(bad))
    assert files(tmp_path) == {}


def test_progress_is_reported_and_may_end_a_download_that_resumes_later(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    class Stopping:
        def show_bytes(self, done_bytes: int, total_bytes: int) -> None:
            told.append((done_bytes, total_bytes))
            if done_bytes >= 50_000:
                raise InterruptedError("the daemon stops")

    store, source = ArtifactStore(tmp_path), FromMemory()
    with pytest.raises(InterruptedError):
        store.fetch(source, NAME, wanted(), pace=Pace(FetchLimits(total_s=100.0)), progress=Stopping())
    assert told == [(number * PIECE, len(DATA)) for number in range(1, 6)]
    fetch(store, source)
    assert source.starts == [0, 50_000]


@pytest.mark.parametrize(("free", "is_enough"), [(len(DATA) + 999, False), (len(DATA) + 1000, True)])
def test_the_reserve_of_the_disk_is_kept(tmp_path: Path, free: int, is_enough: bool) -> None:
    store, source = ArtifactStore(tmp_path, reserve_bytes=1000, disk=SmallDisk(free)), FromMemory()
    if is_enough:
        fetch(store, source)
        return
    with pytest.raises(StorageFailed, match="1000 of them to stay free"):
        fetch(store, source)
    assert source.starts == []
    assert files(tmp_path) == {}


def test_a_small_file_of_a_check_may_be_fetched_below_the_reserve_while_it_fits(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "a", reserve_bytes=1 << 60, disk=SmallDisk(len(DATA)))
    pace = Pace(FetchLimits(total_s=100.0))
    assert store.fetch(FromMemory(), NAME, wanted(), pace=pace, keeps_reserve=False).is_file()
    full = ArtifactStore(tmp_path / "b", reserve_bytes=0, disk=SmallDisk(len(DATA) - 1))
    with pytest.raises(StorageFailed, match="bytes are free"):
        full.fetch(FromMemory(), NAME, wanted(), pace=pace, keeps_reserve=False)


def test_the_bytes_already_here_of_a_part_count_for_the_reserve(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, reserve_bytes=1000, disk=SmallDisk(len(DATA) - 100_000 + 1000))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / f"{wanted().digest}.part").write_bytes(DATA[:100_000])
    fetch(store, FromMemory())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_call_leaves_the_artifact_whole_or_absent(tmp_path: Path, error: int) -> None:
    recorded = DyingDisk(piece_bytes=PIECE)
    fetch(ArtifactStore(tmp_path / "0", disk=recorded), FromMemory())
    for number in range(1, len(recorded.calls) + 1):
        folder = tmp_path / str(number)
        with pytest.raises(StorageFailed):
            fetch(ArtifactStore(folder, disk=DyingDisk(number, failing(error), piece_bytes=PIECE)), FromMemory())
        path = folder / wanted().digest
        assert not path.exists() or is_whole(path, wanted())
        assert fetch(ArtifactStore(folder), FromMemory()).read_bytes() == DATA


def test_only_what_is_named_is_kept(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = fetch(store, FromMemory())
    fetch(store, FromMemory(b"other"), wanted(b"other"))
    with pytest.raises(DownloadError):
        fetch(store, FromMemory(b"third", stops_at=2), wanted(b"third"))
    store.keep_only({kept.name})
    assert files(tmp_path) == {kept.name: DATA}


@settings(max_examples=300, deadline=None)
@given(algorithm=st.sampled_from(["sha256", "sha512", "md5", "shake_128", "", "../x"]), value=st.text(max_size=140))
def test_only_a_plain_hash_of_a_known_algorithm_becomes_a_file_name(algorithm: str, value: str) -> None:
    try:
        name = ExpectedFile.of(1, {algorithm: value}).digest
    except TrustError:
        return
    assert len(name) in (64, 128)
    assert set(name) <= set("0123456789abcdef")


# ---- a person's own folder -------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    paths=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=400), min_size=2, max_size=2, unique=True)
)
def test_every_target_has_a_file_of_its_own_in_the_folder_itself(paths: list[str]) -> None:
    one, other = (target_file(Path("/folder"), path) for path in paths)
    assert one != other
    assert one.parent == Path("/folder")
    assert not one.name.startswith(".")
    assert len(one.name.encode()) <= 255


def test_a_copy_is_whole_and_read_only_and_leaves_nothing_beside(tmp_path: Path) -> None:
    source = fetch(ArtifactStore(tmp_path / "artifacts"), FromMemory())
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    place(source, folder / "file")
    assert files(folder) == {"file": DATA}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_call_leaves_the_old_copy_or_the_new(tmp_path: Path, error: int) -> None:
    source = fetch(ArtifactStore(tmp_path / "artifacts"), FromMemory())
    folder = tmp_path / "own"
    folder.mkdir()
    recorded = DyingDisk(piece_bytes=PIECE)
    place(source, folder / "file", disk=recorded)
    for number in range(1, len(recorded.calls) + 1):
        (folder / "file").unlink()
        (folder / "file").write_bytes(b"old")
        with pytest.raises(StorageFailed):
            place(source, folder / "file", disk=DyingDisk(number, failing(error), piece_bytes=PIECE))
        assert files(folder) in ({"file": b"old"}, {"file": DATA})


# ---- metadata -------------------------------------------------------------------------------------------------------


def test_metadata_is_kept_by_role_and_read_back(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path / "new" / "folder")
    store.save("root", b"{}")
    store.save("../escape", b"[]")
    assert store.load("root", 2) == b"{}"
    assert sorted(files(tmp_path)) == ["new/folder/..%2Fescape.json", "new/folder/root.json"]


def test_metadata_that_is_not_there_too_long_or_no_file_is_nothing(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path)
    store.save("root", b"123")
    (tmp_path / "timestamp.json").mkdir()
    (tmp_path / "snapshot.json").symlink_to(tmp_path / "root.json")
    os.mkfifo(tmp_path / "targets.json")
    assert store.load("root", 2) is None
    assert [store.load(role, 10) for role in ("timestamp", "snapshot", "nothing", "x" * 300)] == [None] * 4
    assert store.load("targets", 10) in (None, b"")


def test_a_folder_has_one_user_at_a_time_who_tidies_it(tmp_path: Path) -> None:
    (tmp_path / "root.json.123-1.part").write_bytes(b"half")
    store = MetadataStore(tmp_path)
    with store.lock():
        assert sorted(files(tmp_path)) == ["lock"]
        with pytest.raises(UpdateError, match="another process"), MetadataStore(tmp_path).lock():
            pass
    with store.lock():
        pass


def test_the_anchor_of_a_root_is_read_back_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path)
    assert store.load_anchor() is None
    store.save_anchor("00" * 32)
    assert store.load_anchor() == "00" * 32


# ---- a growing file -------------------------------------------------------------------------------------------------


def test_a_file_that_grows_keeps_what_it_got_until_it_is_committed(tmp_path: Path) -> None:
    part = tmp_path / "deep" / "er" / "x.part"
    with growing(part, keep=True) as file:
        file.write(b"one ")
    with growing(part, keep=True) as file:
        file.write(b"two")
        file.commit(tmp_path / "x")
    assert files(tmp_path) == {"x": b"one two"}


def test_a_file_that_is_not_to_be_kept_starts_empty(tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    part.write_bytes(b"old")
    with growing(part, keep=False) as file:
        file.write(b"new")
    assert part.read_bytes() == b"new"


def test_a_link_in_the_place_of_a_part_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "x.part").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageFailed), growing(tmp_path / "x.part", keep=False):
        pass
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_an_error_of_the_one_who_writes_closes_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), growing(tmp_path / "x.part", keep=False) as file:
        raise KeyError
    file.close()
