"""A fleet shows a repository's assignments as a device would verify them, and changes nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_runtime.errors import ConfigError, EdgeRuntimeError, TrustError
from edge_runtime.fleet.repository import FleetRepository
from edge_runtime.updates.groups import encode_groups
from edge_runtime.updates.release_paths import GROUPS_FILE
from tests.fakes.http_server import HttpServer
from tests.fakes.publishing import Publisher
from tests.fakes.update_site import GROUP, UpdateSite, adder


@contextmanager
def opened(place: str, root_file: str | None = None) -> Iterator[FleetRepository]:
    repository = FleetRepository(place, root_file)
    try:
        yield repository
    finally:
        repository.close()


@pytest.fixture
def site() -> UpdateSite:
    return UpdateSite()


def lines(repository: FleetRepository) -> list[tuple[str, str, int, int | None, float]]:
    return [(each.group, each.model, each.release, each.version, each.percent) for each in repository.read().assigned]


def test_assignments_of_an_address_are_read_and_follow_changes(site, tmp_path):
    first, second = site.publish(adder(tmp_path, 1)), site.publish(adder(tmp_path, 2))
    site.assign_shares((first, 100.0), (second, 10.0))
    with HttpServer(site.find) as server, opened(server.url) as repository:
        assert sorted(lines(repository)) == [(GROUP, "adder", 1, 1, 100.0), (GROUP, "adder", 2, 2, 10.0)]
        site.assign(second)
        assert lines(repository) == [(GROUP, "adder", 2, 2, 100.0)]


def test_signed_groups_and_published_releases_are_read_beside_assignments(site, tmp_path):
    first, second = site.publish(adder(tmp_path, 1)), site.publish(adder(tmp_path, 2))
    site.assign(second)
    site.repository.add_target(GROUPS_FILE, encode_groups({"cam-7": GROUP}))
    site.repository.publish("targets", "snapshot", "timestamp")
    with HttpServer(site.find) as server, opened(server.url) as repository:
        signed = repository.read()
    assert signed.published == {"adder": {first.release.counter, second.release.counter}}
    assert signed.moved == {"cam-7": GROUP}


def test_assignments_of_a_folder_are_read_and_nothing_is_written_there(site, tmp_path):
    site.release(adder(tmp_path, 1))
    folder = site.write(tmp_path / "repository")
    before = sorted(folder.rglob("*"))
    with opened(str(folder)) as repository:
        assert lines(repository) == [(GROUP, "adder", 1, 1, 100.0)]
    assert sorted(folder.rglob("*")) == before


def test_a_repository_of_another_root_is_not_believed(site, tmp_path):
    root = tmp_path / "root.json"
    root.write_bytes(Publisher(tmp_path / "other").found().root_1)
    with HttpServer(site.find) as server, opened(server.url, str(root)) as repository:
        with pytest.raises(TrustError):
            repository.read()
        root.write_bytes(site.root)
    with HttpServer(site.find) as server, opened(server.url, str(root)) as repository:
        assert lines(repository) == []


@pytest.mark.parametrize("place", ["/nowhere/at/all", "mqtt://x", "", "repository"])
def test_a_place_that_is_no_repository_is_told(place):
    with opened(place) as repository, pytest.raises(ConfigError, match="is not a repository"):
        repository.read()


def test_a_repository_that_is_away_is_a_failure_until_it_is_back(site, tmp_path):
    site.release(adder(tmp_path, 1))
    folder = site.write(tmp_path / "repository")
    moved = Path(f"{folder}.away")
    with opened(str(folder)) as repository:
        assert len(lines(repository)) == 1
        folder.rename(moved)
        with pytest.raises(EdgeRuntimeError):
            repository.read()
        moved.rename(folder)
        assert len(lines(repository)) == 1
