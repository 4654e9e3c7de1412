"""One check of a repository from the inside: where trust begins, how long it takes, and what it leaves when it dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata

from edge_runtime.durable import SystemDisk
from edge_runtime.errors import (
    DownloadError,
    EdgeRuntimeError,
    MetadataExpired,
    NotPublished,
    StorageFailed,
    TrustError,
)
from edge_runtime.updates.fetch import FetchedBody, FetchLimits, Pacer
from edge_runtime.updates.store import MetadataStore
from edge_runtime.updates.trust import update_start
from edge_runtime.updates.tuf_client import Bounds, TufClient
from tests.fakes.clock import FakeClock
from tests.fakes.dying_disk import DyingDisk, Killed, die, failing
from tests.fakes.tuf_repository import NOW, TufRepository


class FromRepository:
    """A fetcher without a network: each file takes `each_s` on the clock."""

    def __init__(self, repository: TufRepository, clock: FakeClock | None = None, each_s: float = 0.0) -> None:
        self._repository = repository
        self._clock = clock or FakeClock()
        self._each_s = each_s
        self.asked: list[str] = []

    @contextmanager
    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> Iterator[FetchedBody]:
        self.asked.append(path)
        self._clock.advance(self._each_s)
        data = self._repository.find(f"metadata/{path}")
        if data is None:
            raise NotPublished(path)
        yield _Whole(data)


class _Whole:
    start_bytes = 0

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def read(self, limit: int) -> bytes:
        piece, self._rest = self._rest[:limit], self._rest[limit:]
        return piece


@pytest.fixture
def repository() -> TufRepository:
    return TufRepository()


def client(
    repository: TufRepository,
    folder: Path,
    bootstrap: bytes | None = None,
    *,
    bounds: Bounds | None = None,
    now_utc: datetime = NOW,
) -> TufClient:
    return TufClient(
        FromRepository(repository), MetadataStore(folder), now_utc=now_utc, bootstrap=bootstrap, bounds=bounds
    )


def root_version(folder: Path) -> int:
    return int(Metadata.from_file(str(folder / "root.json")).signed.version)


# ---- where trust begins ---------------------------------------------------------------------------------------------


def test_without_a_root_nothing_is_asked_for(repository: TufRepository, tmp_path: Path) -> None:
    fetcher = FromRepository(repository)
    with pytest.raises(TrustError, match="no trusted root"):
        TufClient(fetcher, MetadataStore(tmp_path), now_utc=NOW).refresh()
    assert fetcher.asked == []


def test_a_device_begins_with_the_root_it_came_with_and_goes_on_with_the_one_it_reached(
    repository: TufRepository, tmp_path: Path
) -> None:
    bootstrap = repository.published["root"][0]
    repository.publish("root")
    client(repository, tmp_path, bootstrap).refresh()
    assert root_version(tmp_path) == 2
    fetcher = FromRepository(repository)
    TufClient(fetcher, MetadataStore(tmp_path), now_utc=NOW, bootstrap=bootstrap).refresh()
    assert fetcher.asked == ["3.root.json", "timestamp.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"{}"])
def test_a_kept_root_that_is_broken_is_reached_again_from_the_one_the_device_came_with(
    repository: TufRepository, tmp_path: Path, content: bytes
) -> None:
    bootstrap = repository.published["root"][0]
    repository.publish("root")
    client(repository, tmp_path, bootstrap).refresh()
    (tmp_path / "root.json").write_bytes(content)
    client(repository, tmp_path, bootstrap).refresh()
    assert root_version(tmp_path) == 2


def test_a_kept_root_that_was_not_reached_from_the_one_the_device_came_with_is_not_believed(
    repository: TufRepository, tmp_path: Path
) -> None:
    client(repository, tmp_path, repository.published["root"][0]).refresh()
    other = TufRepository()
    for role in ("root", "timestamp", "snapshot", "targets"):
        other.rotate(role)
    other.start_again("root")
    other.publish_all()
    with pytest.raises(TrustError):
        client(repository, tmp_path, other.published["root"][0]).refresh()
    client(other, tmp_path, other.published["root"][0]).refresh()
    assert (tmp_path / "root.json").read_bytes() == other.published["root"][0]


def test_the_root_of_another_repository_is_reported_as_that(repository: TufRepository, tmp_path: Path) -> None:
    other = TufRepository()
    for role in ("root", "timestamp"):
        other.rotate(role)
    wrong_root = "was signed by no key .*update.root_file is another repository's root"
    with pytest.raises(TrustError, match=f"timestamp: {wrong_root}"):
        client(repository, tmp_path, other.sign("root")).refresh()
    repository.publish("root")
    with pytest.raises(TrustError, match=f"root: {wrong_root}"):
        client(repository, tmp_path, other.sign("root")).refresh()


def test_a_bootstrap_that_is_not_a_root_is_refused(repository: TufRepository, tmp_path: Path) -> None:
    with pytest.raises(TrustError):
        client(repository, tmp_path, repository.published["targets"][0]).refresh()
    assert list(tmp_path.iterdir()) == []


# ---- clocks and bounds ----------------------------------------------------------------------------------------------


def test_expiry_is_distinguished_from_other_reasons_and_names_both_instants(
    repository: TufRepository, tmp_path: Path
) -> None:
    expired, now = (NOW + timedelta(days=days) for days in (30, 99))
    with pytest.raises(MetadataExpired, match=f"{expired:%Y-%m-%d}.*{now:%Y-%m-%d}"):
        client(repository, tmp_path, repository.published["root"][0], now_utc=now).refresh()


def test_a_clock_behind_the_floor_is_not_believed() -> None:
    later = datetime.now(timezone.utc) + timedelta(days=400)
    assert update_start(later) == later
    assert update_start(datetime(1970, 1, 1, tzinfo=timezone.utc)) > datetime(2024, 1, 1, tzinfo=timezone.utc)


def test_a_check_ends_at_its_deadline_and_the_next_goes_on_from_there(
    repository: TufRepository, tmp_path: Path
) -> None:
    for _ in range(30):
        repository.publish("root")
    clock = FakeClock()

    def check() -> None:
        TufClient(
            FromRepository(repository, clock, each_s=10.0),
            MetadataStore(tmp_path),
            now_utc=NOW,
            bootstrap=repository.published["root"][0],
            pacer=Pacer(FetchLimits(total_s=150.0, min_bytes_per_s=0.0), clock),
        ).refresh()

    with pytest.raises(DownloadError):
        check()
    reached = root_version(tmp_path)
    assert 10 < reached < 16
    with pytest.raises(DownloadError):
        check()
    check()
    assert root_version(tmp_path) == 31


def test_one_check_follows_no_more_roots_than_its_bound(repository: TufRepository, tmp_path: Path) -> None:
    for _ in range(5):
        repository.publish("root")
    bootstrap = repository.published["root"][0]
    for reached in (3, 5, 6):
        client(repository, tmp_path, bootstrap, bounds=Bounds(root_rotations=2)).refresh()
        assert root_version(tmp_path) == reached


def test_a_target_is_looked_up_only_after_a_refresh(repository: TufRepository, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="refresh first"):
        client(repository, tmp_path).look_up("file")


# ---- death ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0, 28, 5], ids=["death", "full", "failing"])
def test_a_check_that_ends_at_any_write_never_forgets_a_version_and_the_next_completes(
    tmp_path: Path, error: int
) -> None:
    repository = TufRepository()
    bootstrap = repository.published["root"][0]
    repository.delegate("targets", "team")
    repository.publish_all()

    def check(folder: Path, disk: SystemDisk) -> None:
        one = TufClient(FromRepository(repository), MetadataStore(folder, disk=disk), now_utc=NOW, bootstrap=bootstrap)
        one.refresh()
        one.look_up("file")

    first = dict.fromkeys(("root", "timestamp", "snapshot", "targets"), 1) | {"team": 1}
    seeds = tmp_path / "first"
    check(seeds, SystemDisk())
    before = {file.name: file.read_bytes() for file in seeds.iterdir()}
    repository.publish("root")
    repository.publish_all()
    counting = DyingDisk()
    check(seeds, counting)
    assert len(counting.calls) > 20
    for dies_at in range(1, len(counting.calls) + 1):
        folder = tmp_path / str(dies_at)
        folder.mkdir()
        for name, data in before.items():
            (folder / name).write_bytes(data)
        with pytest.raises(StorageFailed if error else Killed):
            check(folder, DyingDisk(dies_at, failing(error) if error else die))
        for role in first:
            data = (folder / f"{role}.json").read_bytes()
            assert data in repository.published[role]
            assert data == before[f"{role}.json"] or data == repository.published[role][-1]
        check(folder, SystemDisk())
        for role in first:
            assert (folder / f"{role}.json").read_bytes() == repository.published[role][-1]


GARBAGE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"signed":{},"signatures":[]}',
    b"[" * 100_000,
    b"\xff",
    b"1e999",
    b"9" * 10_000,
]


def test_every_error_of_a_check_is_one_of_ours(repository: TufRepository, tmp_path: Path) -> None:
    """Whatever bytes a repository gives, nothing but our own errors comes out."""
    bootstrap = repository.published["root"][0]
    for number, data in enumerate(GARBAGE):
        for role in ("timestamp", "snapshot", "targets"):
            good = repository.published[role][-1]
            repository.published[role][-1] = data
            device = tmp_path / f"{role}-{number}"
            with pytest.raises(EdgeRuntimeError):
                client(repository, device, bootstrap).refresh()
            repository.published[role][-1] = good
            client(repository, device, bootstrap).refresh()
