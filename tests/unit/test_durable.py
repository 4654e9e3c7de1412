"""A durable file is whole and new, or whole and old, whichever system call fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.durable import SystemDisk, growing, make_folder, remove_parts, write_atomically
from edge_runtime.errors import StorageFailed


class RecordingDisk:
    """The real disk, its calls noted down; call number `fails_at` (from 1) fails with `error`; writes may be short."""

    def __init__(self, fails_at: int = 0, error: int = errno.EIO, write_limit: int = 1 << 30) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at
        self._error = error
        self._write_limit = write_limit
        self._names: dict[int, str] = {}

    def open(self, path: Path, flags: int, mode: int) -> int:
        self._note(f"open {_shape(path)}")
        fd = os.open(path, flags, mode)
        self._names[fd] = _shape(path)
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._note(f"write {self._names[fd]}")
        return os.write(fd, data[: self._write_limit])

    def fsync(self, fd: int) -> None:
        self._note(f"fsync {self._names[fd]}")
        os.fsync(fd)

    def close(self, fd: int) -> None:
        # Closing cannot be failed here: a real close frees the descriptor even when it reports an error.
        os.close(fd)
        self.calls.append(f"close {self._names.pop(fd)}")

    def rename(self, old: Path, new: Path) -> None:
        self._note(f"rename {_shape(old)} {_shape(new)}")
        old.replace(new)

    def mkdir(self, path: Path) -> None:
        self._note(f"mkdir {_shape(path)}")
        path.mkdir()

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if len([call for call in self.calls if not call.startswith("close")]) == self._fails_at:
            raise OSError(self._error, os.strerror(self._error))

    @property
    def has_open_files(self) -> bool:
        return bool(self._names)


def _shape(path: Path) -> str:
    """The name of a file, without what differs between writers."""
    return "part" if path.name.endswith(".part") else path.name


def test_a_file_is_written_synced_renamed_and_its_folder_synced_in_that_order(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    disk = RecordingDisk()
    write_atomically(folder / "curve.json", b"new", disk=disk)
    assert disk.calls == [
        "open part",
        "write part",
        "fsync part",
        "close part",
        "rename part curve.json",
        "open state",
        "fsync state",
        "close state",
    ]
    assert [file.name for file in folder.iterdir()] == ["curve.json"]
    assert (folder / "curve.json").read_bytes() == b"new"


def test_missing_folders_are_created_each_synced_into_its_parent_before_the_next(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    disk = RecordingDisk()
    make_folder(base / "a" / "b", disk=disk)
    assert disk.calls == [
        "mkdir a", "open base", "fsync base", "close base", "mkdir b", "open a", "fsync a", "close a",
    ]  # fmt: skip
    assert (base / "a" / "b").is_dir()


@settings(max_examples=40, deadline=None)
@given(old=st.none() | st.binary(max_size=50), new=st.binary(max_size=50), write_limit=st.integers(1, 60))
def test_bytes_that_were_written_are_read_back_even_through_short_writes(
    tmp_path_factory: pytest.TempPathFactory, old: bytes | None, new: bytes, write_limit: int
) -> None:
    file = tmp_path_factory.mktemp("state") / "file"
    if old is not None:
        write_atomically(file, old)
    write_atomically(file, new, disk=RecordingDisk(write_limit=write_limit))
    assert file.read_bytes() == new


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(
    ("fails_at", "call"), [(1, "open part"), (2, "write part"), (3, "write part"), (4, "fsync part"), (5, "rename")]
)
def test_a_failure_before_the_rename_is_over_leaves_the_old_file_untouched(
    tmp_path: Path, fails_at: int, call: str, error: int
) -> None:
    file = tmp_path / "curve.json"
    file.write_bytes(b"old")
    disk = RecordingDisk(fails_at, error, write_limit=2)
    with pytest.raises(StorageFailed) as caught:
        write_atomically(file, b"new", disk=disk)
    failed = [found for found in disk.calls if not found.startswith("close")][-1]
    assert failed.startswith(call)
    assert file.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["curve.json"], "no part stays on a full disk"
    assert not disk.has_open_files
    assert os.strerror(error) in caught.value.message
    assert "its old content is untouched" in caught.value.message
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("fails_at", [5, 6])
def test_a_failure_after_the_rename_says_that_only_permanence_is_unsure(tmp_path: Path, fails_at: int) -> None:
    file = tmp_path / "curve.json"
    file.write_bytes(b"old")
    disk = RecordingDisk(fails_at)
    with pytest.raises(StorageFailed, match="a power cut may bring the old one back"):
        write_atomically(file, b"new", disk=disk)
    assert file.read_bytes() == b"new"
    assert not disk.has_open_files


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_failure_while_creating_folders_writes_nothing(tmp_path: Path, fails_at: int) -> None:
    disk = RecordingDisk(fails_at, errno.ENOSPC)
    with pytest.raises(StorageFailed, match="free some space"):
        write_atomically(tmp_path / "a" / "b" / "file", b"new", disk=disk)
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == []
    assert not disk.has_open_files


def test_a_full_disk_is_named_and_so_is_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed) as caught:
        write_atomically(tmp_path / "file", b"new", disk=RecordingDisk(2, errno.ENOSPC))
    message = caught.value.message
    assert str(tmp_path / "file") in message
    assert "writing 3 bytes" in message
    assert "No space left on device" in message
    assert "--state" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_really_full_device_is_reported(tmp_path: Path) -> None:
    class FullDisk(SystemDisk):
        def open(self, path: Path, flags: int, mode: int) -> int:
            return os.open("/dev/full", os.O_WRONLY) if flags & os.O_CREAT else os.open(path, flags, mode)

    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(StorageFailed, match="No space left on device"):
        write_atomically(file, b"new", disk=FullDisk())
    assert file.read_bytes() == b"old"


def test_a_file_where_a_folder_should_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"a file")
    for path in (tmp_path / "state" / "file", tmp_path / "state" / "deeper" / "file"):
        with pytest.raises(StorageFailed, match="creating the folder failed: Not a directory"):
            write_atomically(path, b"new")
    assert (tmp_path / "state").read_bytes() == b"a file"


def test_the_mode_asked_for_is_that_of_the_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "blob", b"new", mode=0o444)
    assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o444
    write_atomically(tmp_path / "blob", b"newer", mode=0o444)
    assert (tmp_path / "blob").read_bytes() == b"newer"


def test_writers_at_the_same_time_leave_one_whole_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    contents = [bytes([number]) * 200_000 for number in range(6)]
    start = threading.Barrier(len(contents))

    def write(content: bytes) -> None:
        start.wait()
        for _ in range(3):
            write_atomically(file, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() in contents
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_parts_of_a_writer_that_was_cut_off_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("file", "file.123-1.part", "other.9-4.part", "part"):
        (tmp_path / name).write_bytes(b"")
    remove_parts(tmp_path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "part"]
    remove_parts(tmp_path / "absent")


class StrictDisk(SystemDisk):
    """Opens as the kernel does for all but root: no file for writing that its owner may not write."""

    @staticmethod
    def open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_WRONLY and path.exists() and not path.stat().st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.open(path, flags, mode)


@pytest.mark.parametrize("keep", [True, False])
def test_a_part_whose_commit_a_power_cut_ended_before_its_rename_is_written_on(tmp_path: Path, keep: bool) -> None:
    part, whole = tmp_path / "model.part", tmp_path / "model"
    part.write_bytes(b"all ")
    part.chmod(0o440)

    with growing(part, keep=keep, disk=StrictDisk()) as file:
        file.write(b"of it")
        file.commit(whole, mode=0o440)

    assert whole.read_bytes() == (b"all of it" if keep else b"of it")
    assert whole.stat().st_mode & 0o777 == 0o440
