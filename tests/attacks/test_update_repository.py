"""Attacks on updates, each by its name, and the state of the device after it. TUF's own list is in tests/contract."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.errors import DownloadError, EdgeRuntimeError, NotPublished, UpdateError
from edge_runtime.updates.fetch import FetchLimits, FolderFetcher, Pace, Pacer, fetch_bytes
from edge_runtime.updates.http_fetch import HttpFetcher
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from edge_runtime.updates.tuf_client import TufClient
from tests.fakes.clock import FakeClock
from tests.fakes.http_server import Answer
from tests.fakes.tuf_device import Site, new_site
from tests.fakes.tuf_repository import NOW, TufRepository

DATA = random.Random(1).randbytes(5000)
FLIPS = 2000


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with new_site(tmp_path) as it:
        yield it


def _publish_a_model(repository: TufRepository, data: bytes = DATA) -> None:
    if repository.targets().delegations is None:
        repository.delegate("targets", "team", ["team/*"])
    repository.add_target("team/model", data, "team")
    repository.publish_all()


@pytest.mark.long
def test_two_thousand_flipped_bits_install_nothing_and_forget_nothing(tmp_path: Path) -> None:
    """One flipped bit in any file of the repository, each on a device that knew the release before."""
    repository = TufRepository()
    bootstrap = repository.published["root"][0]
    _publish_a_model(repository)
    stick, device = tmp_path / "stick", tmp_path / "device"
    _copy(repository, stick)
    _check(stick, device, bootstrap)
    before = {file.name: file.read_bytes() for file in device.iterdir() if file.is_file()}
    new = DATA[::-1]
    _publish_a_model(repository, new)
    repository.publish("root")
    _copy(repository, stick)
    chance = random.Random(4)
    files = sorted(path for path in stick.rglob("*") if path.is_file())
    installed = 0
    for _ in range(FLIPS):
        for name, data in before.items():
            (device / name).write_bytes(data)
        file = chance.choice(files)
        good = file.read_bytes()
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        try:
            path = _check(stick, device, bootstrap)
        except UpdateError:
            pass
        else:
            # The flip was in a file that was not asked for, or in bytes that no signature covers.
            assert path.read_bytes() == new
            path.unlink()
            installed += 1
        file.write_bytes(good)
        kept = {file.name for file in device.iterdir() if file.is_file()}
        assert kept == before.keys()
    assert installed < FLIPS / 2
    assert _check(stick, device, bootstrap).read_bytes() == new


def test_a_stolen_timestamp_key_cannot_install_anything(site: Site) -> None:
    _publish_a_model(site.repository)
    assert site.device.download("team/model") == 0
    thief = TufRepository()
    for role in ("root", "snapshot", "targets"):
        thief.rotate(role)
    thief.signers["timestamp"] = site.repository.signers["timestamp"]
    thief.signed["timestamp"].version = thief.signed["snapshot"].version = 10
    thief.published["snapshot"] = [b""] * 10
    _publish_a_model(thief, b"bad")
    site.server.find = lambda path: site.repository.find(path) if "root" in path else thief.find(path)
    assert site.device.download("team/model") == 1
    assert site.asked()[-1] == "11.snapshot.json"
    assert site.device.artifacts == [DATA]
    assert site.device.trusted["snapshot"] == 2


def test_stolen_snapshot_and_timestamp_keys_cannot_install_anything(site: Site) -> None:
    _publish_a_model(site.repository)
    assert site.device.download("team/model") == 0
    thief = TufRepository()
    thief.rotate("targets")
    for role in ("snapshot", "timestamp"):
        thief.signers[role] = site.repository.signers[role]
        thief.signed[role].version = 10
    thief.signed["targets"].version = 10
    thief.targets().version = 10
    _publish_a_model(thief, b"bad")
    newest = {f"{kind}.json": thief.published[role][-1] for role, kind in _names(thief).items()}

    def find(path: str) -> bytes | None:
        return site.repository.find(path) if "root" in path else newest.get(path.removeprefix("metadata/"))

    site.server.find = find
    assert site.device.download("team/model") == 1
    assert site.device.artifacts == [DATA]
    assert site.device.trusted["targets"] == 2


def test_a_slow_server_ends_a_check_within_its_deadline(site: Site) -> None:
    clock = FakeClock()

    def drip() -> Iterator[bytes]:
        for _ in range(200):
            clock.advance(29.0)
            yield b" "

    site.server.answer = lambda request: Answer(200, drip()) if "timestamp" in request.path else None
    client = TufClient(
        HttpFetcher(f"{site.server.url}metadata/", clock=clock),
        MetadataStore(site.device.metadata_dir),
        now_utc=NOW,
        pacer=Pacer(FetchLimits(total_s=300.0, min_bytes_per_s=0.0), clock),
    )
    with pytest.raises(DownloadError):
        client.refresh()
    assert site.device.trusted == {"root": 1}


def test_a_target_that_is_swapped_after_its_verification_is_found_when_it_is_taken_again(tmp_path: Path) -> None:
    repository = TufRepository()
    _publish_a_model(repository)
    stick, device = tmp_path / "stick", tmp_path / "device"
    _copy(repository, stick)
    path = _check(stick, device, repository.published["root"][0])
    path.unlink()
    path.write_bytes(b"bad")
    assert _check(stick, device, repository.published["root"][0]).read_bytes() == DATA


def test_links_and_ten_thousand_files_of_junk_on_a_stick_change_nothing(tmp_path: Path) -> None:
    repository = TufRepository()
    _publish_a_model(repository)
    stick = tmp_path / "stick"
    _copy(repository, stick)
    (tmp_path / "secret").write_bytes(b"secret")
    for number in range(10_000):
        (stick / "metadata" / f"{number}.junk.json").symlink_to(tmp_path / "secret")
    assert _check(stick, tmp_path / "device", repository.published["root"][0]).read_bytes() == DATA


@pytest.mark.parametrize("name", ["timestamp.json", "2.snapshot.json", "2.targets.json", "1.team.json"])
def test_a_link_on_a_stick_is_not_followed_even_to_the_right_bytes(tmp_path: Path, name: str) -> None:
    repository = TufRepository()
    _publish_a_model(repository)
    stick = tmp_path / "stick"
    _copy(repository, stick)
    file = stick / "metadata" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPublished):
        _check(stick, tmp_path / "device", repository.published["root"][0])


def test_five_thousand_hostile_names_open_nothing_outside_a_stick(tmp_path: Path) -> None:
    stick = tmp_path / "stick"
    stick.mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    chance = random.Random(5)
    parts = ["..", ".", "", "secret", "~", "\0", "a", "%2e%2e", "..\\", "\n", "C:", "x" * 300, str(tmp_path)]
    for _ in range(5000):
        path = "/".join(chance.choice(parts) for _ in range(chance.randrange(1, 6)))
        with pytest.raises(NotPublished):
            fetch_bytes(FolderFetcher(stick), path, max_bytes=100, pace=Pace(FetchLimits(total_s=100.0)))


def _names(repository: TufRepository) -> dict[str, str]:
    """Each role but the root, and the name of its newest file."""
    return {
        role: role if role == "timestamp" else f"{signed.version}.{role}"
        for role, signed in repository.signed.items()
        if role != "root"
    }


def _copy(repository: TufRepository, stick: Path) -> None:
    """The repository as files, as on a USB stick."""
    (stick / "metadata").mkdir(parents=True, exist_ok=True)
    (stick / "team").mkdir(exist_ok=True)
    for role, name in _names(repository).items():
        (stick / "metadata" / f"{name}.json").write_bytes(repository.published[role][-1])
    for number, data in enumerate(repository.published["root"], 1):
        (stick / "metadata" / f"{number}.root.json").write_bytes(data)
    target = repository.targets("team").targets["team/model"]
    (stick / "team" / f"{target.hashes['sha256']}.model").write_bytes(repository.artifacts["team/model"])


def _check(stick: Path, device: Path, bootstrap: bytes) -> Path:
    """One whole check, as a device does it: refresh, look up, fetch. Raises what it raises."""
    client = TufClient(FolderFetcher(stick / "metadata"), MetadataStore(device), now_utc=NOW, bootstrap=bootstrap)
    client.refresh()
    signed = client.look_up("team/model")
    if signed is None:
        raise EdgeRuntimeError("not found")
    store = ArtifactStore(device / "artifacts")
    return store.fetch(FolderFetcher(stick), signed.path, signed.expected, pace=Pace(FetchLimits(total_s=100.0)))
