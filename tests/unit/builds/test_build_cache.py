"""Engines on disk: whole or not at all, bounded, the one used longest ago leaves first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_runtime.backends.base import BuildOrder
from edge_runtime.builds.build_cache import BuildCache
from edge_runtime.errors import LoadFailed, NotBuiltYet, StorageFailed

KEYS = [letter * 64 for letter in "abcd"]


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path / "engines", limit_bytes=1000)


def age(cache: BuildCache, key: str, seconds: int) -> None:
    os.utime(cache.folder / f"{key}.engine", (1_000_000 - seconds, 1_000_000 - seconds))


def test_a_build_that_was_written_is_read(cache: BuildCache) -> None:
    assert cache.read(KEYS[0]) is None
    cache.write(KEYS[0], b"engine")
    assert cache.read(KEYS[0]) == b"engine"
    assert (cache.folder / f"{KEYS[0]}.engine").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("position", [0, 8, 20, 47, 48, -1])
def test_a_changed_bit_anywhere_is_noticed_and_the_file_removed(cache: BuildCache, position: int) -> None:
    cache.write(KEYS[0], b"engine")
    path = cache.folder / f"{KEYS[0]}.engine"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)
    assert cache.read(KEYS[0]) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 1, 47, 48, 50])
def test_a_file_that_was_cut_is_noticed(cache: BuildCache, length: int) -> None:
    cache.write(KEYS[0], b"engine")
    path = cache.folder / f"{KEYS[0]}.engine"
    path.write_bytes(path.read_bytes()[:length])
    assert cache.read(KEYS[0]) is None


def test_an_engine_from_elsewhere_under_a_key_is_not_an_engine(cache: BuildCache) -> None:
    cache.folder.mkdir(parents=True)
    (cache.folder / f"{KEYS[0]}.engine").write_bytes(b"vtrt" + bytes(2000))
    assert cache.read(KEYS[0]) is None


def test_an_engine_in_anothers_place_is_noticed(cache: BuildCache) -> None:
    for key in KEYS[:2]:
        cache.write(key, key.encode())
    one, other = (cache.folder / f"{key}.engine" for key in KEYS[:2])
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert cache.read(KEYS[0]) is None
    assert cache.read(KEYS[1]) is None


def test_a_link_in_an_engines_place_is_not_followed(cache: BuildCache, tmp_path: Path) -> None:
    cache.write(KEYS[0], b"engine")
    path = cache.folder / f"{KEYS[0]}.engine"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.read(KEYS[0]) is None


def test_the_limit_is_kept_by_what_was_used_longest_ago(cache: BuildCache) -> None:
    for key, seconds in zip(KEYS[:3], (30, 20, 10), strict=True):
        cache.write(key, bytes(250))
        age(cache, key, seconds)
    assert cache.read(KEYS[0]) is not None  # used just now
    cache.write(KEYS[3], bytes(250))
    assert [cache.read(key) is not None for key in KEYS] == [True, False, True, True]


def test_a_build_just_written_stays_even_when_it_is_larger_than_the_limit(cache: BuildCache) -> None:
    cache.write(KEYS[0], bytes(100))
    cache.write(KEYS[1], bytes(950))
    assert cache.read(KEYS[0]) is None
    assert cache.read(KEYS[1]) == bytes(950)


def test_a_failure_is_remembered_until_the_engine_is_there(cache: BuildCache) -> None:
    cache.keep_failure(KEYS[0], "no kernel")
    assert str(cache.failure(KEYS[0])).startswith("no kernel (not tried again until something changes; or remove ")
    cache.write(KEYS[0], b"engine")
    assert cache.failure(KEYS[0]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"why": 1}', b"\xff"])
def test_a_damaged_failure_counts_as_none(cache: BuildCache, content: bytes) -> None:
    cache.folder.mkdir(parents=True)
    (cache.folder / f"{KEYS[0]}.failure").write_bytes(content)
    assert cache.failure(KEYS[0]) is None


def test_timings_are_kept_by_device(cache: BuildCache) -> None:
    assert cache.timings("one") == b""
    cache.keep_timings("one", b"timings")
    assert (cache.timings("one"), cache.timings("two")) == (b"timings", b"")


def test_as_a_source_it_builds_nothing(cache: BuildCache) -> None:
    order = BuildOrder("tensorrt", "model.onnx", KEYS[0], b"")
    with pytest.raises(NotBuiltYet):
        cache.built(order)
    cache.keep_failure(KEYS[0], "no kernel")
    with pytest.raises(LoadFailed, match="no kernel"):
        cache.built(order)
    cache.write(KEYS[0], b"engine")
    assert cache.built(order) == b"engine"


def test_a_disk_that_does_not_keep_an_engine_says_so(tmp_path: Path) -> None:
    (tmp_path / "engines").write_bytes(b"a file")
    with pytest.raises(StorageFailed):
        BuildCache(tmp_path / "engines").write(KEYS[0], b"engine")
