"""Artifacts: fetched once, by any hash, gone on with after a break, and in the folder only when they are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tuf.api.metadata import TargetFile

from tests.fakes.http_server import Answer, Request
from tests.fakes.tuf_device import Site, new_site

DATA = bytes(range(256)) * 1000
REFRESHED = ["2.root.json", "timestamp.json"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with new_site(tmp_path) as it:
        yield it


def offer(site: Site, path: str, data: bytes, hashes: tuple[str, ...] = ("sha256",)) -> None:
    site.repository.add_target(path, data, hashes=hashes)
    site.repository.publish_all()


@pytest.mark.parametrize(
    "path", ["file.txt", "path/to/a/file.txt", "a b/ü.onnx", "a%20b", "deep/" * 20 + "file", "?", "#"]
)
@pytest.mark.parametrize("data", [DATA, b"x", b""], ids=["large", "one byte", "empty"])
def test_an_artifact_is_downloaded_as_it_was_signed(site: Site, path: str, data: bytes) -> None:
    offer(site, path, data)
    assert site.device.refresh() == 0
    assert site.device.artifacts == []
    site.server.find = _unquoting(site)
    assert site.device.download(path) == 0
    assert site.device.artifacts == [data]


def test_an_unchanged_artifact_is_not_fetched_twice(site: Site) -> None:
    offer(site, "file", DATA)
    assert site.device.download("file") == 0
    site.asked()
    assert site.device.download("file") == 0
    assert site.asked() == REFRESHED
    assert site.device.artifacts == [DATA]


def test_an_artifact_that_was_changed_here_is_fetched_anew(site: Site) -> None:
    offer(site, "file", DATA)
    site.device.download("file")
    (file,) = site.device.target_dir.iterdir()
    file.chmod(0o644)
    file.write_bytes(DATA[:-1] + b"!")
    assert site.device.download("file") == 0
    assert site.device.artifacts == [DATA]


def test_a_changed_artifact_takes_the_place_of_the_old_one_under_the_same_name(site: Site) -> None:
    names = set()
    for number in range(3):
        offer(site, "path/file", b"version %d" % number)
        assert site.device.download("path/file") == 0
        assert site.device.artifacts == [b"version %d" % number]
        names |= {file.name for file in site.device.target_dir.iterdir()}
    assert names == {"path%2Ffile"}


def test_artifacts_lie_in_the_order_of_their_download(site: Site) -> None:
    offer(site, "b", b"first")
    offer(site, "a", b"second")
    site.device.download("b")
    site.device.download("a")
    first, second = (site.device.target_dir / name for name in ("b", "a"))
    assert first.stat().st_mtime_ns <= second.stat().st_mtime_ns


@pytest.mark.parametrize("bad", [b"other", b"", DATA[:-1], DATA[:-1] + b"!", DATA + b"!", b"x" * 10_000_000])
def test_bytes_that_were_not_signed_do_not_appear(site: Site, bad: bytes) -> None:
    offer(site, "file", DATA)
    site.repository.artifacts["file"] = bad
    for _ in range(2):
        assert site.device.download("file") == 1
        assert site.device.artifacts == []
    site.repository.artifacts["file"] = DATA
    assert site.device.download("file") == 0
    assert site.device.artifacts == [DATA]


def test_a_file_with_other_bytes_is_asked_for_once(site: Site) -> None:
    offer(site, "file", DATA)
    site.repository.artifacts["file"] = bytes(len(DATA))
    site.device.download("file")
    assert len(site.asked()) == 4 + 1


def test_the_artifact_that_is_here_stays_when_its_successor_is_wrong(site: Site) -> None:
    offer(site, "file", b"old")
    site.device.download("file")
    offer(site, "file", b"new")
    site.repository.artifacts["file"] = b"bad"
    assert site.device.download("file") == 1
    assert site.device.artifacts == [b"old"]


def test_a_missing_artifact_does_not_appear(site: Site) -> None:
    offer(site, "file", DATA)
    del site.repository.artifacts["file"]
    assert site.device.download("file") == 1
    assert site.device.artifacts == []


@pytest.mark.parametrize(
    "hashes", [("sha256",), ("sha512",), ("sha256", "sha512"), ("sha512", "sha256"), ("blake2b-256",)]
)
def test_each_hash_algorithm_is_checked_and_the_first_names_the_file(site: Site, hashes: tuple[str, ...]) -> None:
    offer(site, "file", DATA, hashes)
    target = site.repository.targets().targets["file"]
    assert site.device.download("file") == 0
    first = min(target.hashes)  # metadata is written with its keys in order
    assert site.asked()[4:] == [f"{target.hashes[first]}.file"]
    assert site.device.artifacts == [DATA]


@pytest.mark.parametrize("wrong", ["sha256", "sha512"])
def test_every_hash_must_match(site: Site, wrong: str) -> None:
    site.repository.add_target("file", DATA, hashes=("sha256", "sha512"))
    hashes = site.repository.targets().targets["file"].hashes
    hashes[wrong] = TargetFile.from_data("file", b"other", [wrong]).hashes[wrong]
    site.repository.publish_all()
    assert site.device.download("file") == 1
    assert site.device.artifacts == []


@pytest.mark.parametrize(
    "hashes",
    [
        {"unknown-hash": "00" * 64},
        {"sha256": "right", "unknown-hash": "00" * 64},
        {"shake_256": "00" * 32},
        {"sha256": ""},
        {"sha256": "../../../etc/passwd"},
        {"sha256": "00" * 31 + "0/"},
        {"sha256": "RIGHT"},
        {"": "00" * 32},
    ],
    ids=str,
)
def test_an_artifact_with_a_hash_that_is_none_is_not_asked_for(site: Site, hashes: dict[str, str]) -> None:
    site.repository.add_target("file", DATA)
    target = site.repository.targets().targets["file"]
    right = target.hashes["sha256"]
    target.hashes = {
        name: value.replace("right", right).replace("RIGHT", right.upper()) for name, value in hashes.items()
    }
    site.repository.publish_all()
    assert site.device.download("file") == 1
    assert len(site.asked()) == 4
    assert site.device.artifacts == []


def test_without_consistent_snapshots_an_artifact_is_asked_for_by_its_name(site: Site) -> None:
    site.repository.root.consistent_snapshot = False
    site.repository.publish("root")
    offer(site, "path/file", DATA)
    assert site.device.download("path/file") == 0
    assert site.asked()[-1] == "path/file"
    assert site.device.artifacts == [DATA]


def test_several_artifacts_come_with_one_refresh(site: Site) -> None:
    offer(site, "a", b"A")
    offer(site, "b", b"B")
    assert site.device.download("a", "b") == 0
    assert site.device.artifacts == [b"A", b"B"]
    assert len(site.asked()) == 4 + 2


def test_two_targets_never_share_a_file(site: Site) -> None:
    paths = ["a/b", "a%2Fb", ".hidden", "%2Ehidden", "..", "x" * 400, "x" * 399 + "y", "a.part", ".a.part", "a"]
    for path in paths:
        site.repository.add_target(path, path.encode())
    site.repository.publish_all()
    site.repository.root.consistent_snapshot = True
    site.server.find = _unquoting(site)
    for path in paths:
        if path != "..":
            assert site.device.download(path) == 0, path
    assert len(site.device.artifacts) == len(paths) - 1
    assert {file.parent for file in site.device.target_dir.rglob("*")} == {site.device.target_dir}


# ---- connections that break -----------------------------------------------------------------------------------------


def test_a_download_that_broke_off_goes_on_where_it_stopped(site: Site) -> None:
    offer(site, "file", DATA)
    site.server.answer = _break_after(site, 100_000)
    assert site.device.download("file") == 1
    assert site.device.artifacts == []
    site.server.answer = lambda _request: None
    assert site.device.download("file") == 0
    assert site.server.requests[-1].headers["Range"] == "bytes=100000-"
    assert site.device.artifacts == [DATA]


def test_a_server_without_ranges_is_asked_once_and_the_file_is_taken_whole(site: Site) -> None:
    offer(site, "file", DATA)
    site.server.answer = _break_after(site, 100_000)
    site.device.download("file")
    site.server.answer = lambda _request: None
    site.server.has_ranges = False
    site.server.requests.clear()
    assert site.device.download("file") == 0
    assert len(site.asked()) == len(REFRESHED) + 1
    assert site.device.artifacts == [DATA]


def test_a_part_of_another_file_is_not_mixed_into_this_one(site: Site) -> None:
    offer(site, "file", DATA)
    site.repository.artifacts["file"] = bytes(len(DATA))
    site.server.answer = _break_after(site, 100_000)
    assert site.device.download("file") == 1
    site.server.answer = lambda _request: None
    site.repository.artifacts["file"] = DATA
    assert site.device.download("file") == 0
    assert site.device.artifacts == [DATA]


def test_a_link_that_breaks_at_a_hundred_places_costs_no_byte_twice(site: Site) -> None:
    offer(site, "file", DATA)
    site.server.answer = _break_after(site, len(DATA) // 100)
    for _ in range(99):
        assert site.device.download("file") == 1
    site.server.answer = lambda _request: None
    assert site.device.download("file") == 0
    starts = [request.start for request in site.server.requests if "targets/" in request.path]
    assert starts == [number * (len(DATA) // 100) for number in range(100)]
    assert site.device.artifacts == [DATA]


def _break_after(site: Site, length: int) -> Callable[[Request], Answer | None]:
    def answer(request: Request) -> Answer | None:
        if not request.path.startswith("targets/"):
            return None
        data = site.server.find(request.path) or b""
        status = 206 if request.start else 200
        headers = {"Content-Length": str(len(data) - request.start)}
        if request.start:
            headers["Content-Range"] = f"bytes {request.start}-{len(data) - 1}/{len(data)}"
        return Answer(status, data[request.start : request.start + length], headers)

    return answer


def _unquoting(site: Site) -> Callable[[str], bytes | None]:
    """A server whose artifacts have names that must be quoted in any of the ways there are."""

    def find(path: str) -> bytes | None:
        if path.startswith("targets/"):
            prefix = path.rpartition("/")[2].partition(".")[0]
            return next(
                (
                    site.repository.artifacts[name]
                    for name, target in site.repository.targets().targets.items()
                    if prefix in target.hashes.values()
                ),
                None,
            )
        return site.repository.find(path)

    return find


def test_of_several_artifacts_those_before_one_that_fails_are_there_as_with_python_tuf(site: Site) -> None:
    for name in ("a", "b", "c"):
        site.repository.add_target(name, name.encode())
    site.repository.publish_all()
    site.repository.artifacts["b"] = b"x"
    assert site.device.download("a", "b", "c") == 1
    assert site.device.artifacts == [b"a"]
    site.repository.artifacts["b"] = b"b"
    assert site.device.download("a", "b", "c") == 0
    assert sorted(site.device.artifacts) == [b"a", b"b", b"c"]


def test_two_artifacts_of_the_same_bytes_are_both_there(site: Site) -> None:
    for name in ("a", "b"):
        site.repository.add_target(name, b"same")
    site.repository.publish_all()
    assert site.device.download("a", "b") == 0
    assert site.device.artifacts == [b"same", b"same"]
