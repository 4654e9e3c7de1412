"""`repo add-config`, `configure` and `move`: what is signed, by whom, and what is refused before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Targets

from edge_runtime.errors import PublishError
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.configurations import add_configuration, configure, move, read_groups
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.roles import add_group
from tests.fakes.publishing import Publisher, TufDevice

OVERLAY = '[log]\nlevel = "debug"\n'


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    """With the group "line"."""
    publisher = Publisher(tmp_path / "repository").found()
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys()))
    return publisher


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "overlay.toml"
    file.write_text(OVERLAY)
    return file


def test_configuration_is_signed_by_a_role_of_its_own(publisher: Publisher, file: Path, tmp_path: Path) -> None:
    publisher.carry_out(lambda repository: add_configuration(repository, "line", NewKeys()))
    change = publisher.carry_out(lambda repository: configure(repository, "line", file))
    assert [signing.role for signing in change.signings] == ["config-line", "snapshot", "timestamp"]
    device = TufDevice(publisher.path, tmp_path / "device", publisher.root_1)
    assert device.fetch("config/line/overlay.toml") == OVERLAY.encode()


def test_configuration_needs_its_keys_first_and_a_group(publisher: Publisher, file: Path) -> None:
    with pytest.raises(PublishError, match="repo add-config line"):
        publisher.carry_out(lambda repository: configure(repository, "line", file))
    with pytest.raises(PublishError, match="no group 'other'"):
        publisher.carry_out(lambda repository: add_configuration(repository, "other", NewKeys()))
    publisher.carry_out(lambda repository: add_configuration(repository, "line", NewKeys()))
    with pytest.raises(PublishError, match="is there already"):
        publisher.carry_out(lambda repository: add_configuration(repository, "line", NewKeys()))


def test_configuration_that_devices_would_refuse_is_not_signed(publisher: Publisher, file: Path) -> None:
    publisher.carry_out(lambda repository: add_configuration(repository, "line", NewKeys()))
    file.write_text("[zmq]\ninsecure = true\n")
    with pytest.raises(PublishError, match=r"overlay.toml: zmq: a signed configuration may not say this"):
        publisher.carry_out(lambda repository: configure(repository, "line", file))
    file.write_text("# " + "x" * 70_000)
    with pytest.raises(PublishError, match="devices take 65536"):
        publisher.carry_out(lambda repository: configure(repository, "line", file))


def test_devices_are_moved_by_targets_and_back(publisher: Publisher, tmp_path: Path) -> None:
    change = publisher.carry_out(lambda repository: move(repository, ["cam-7", "cam-8", "cam-7"], "line"))
    assert [signing.role for signing in change.signings] == ["targets", "snapshot", "timestamp"]
    with publisher.opened() as repository:
        assert read_groups(repository) == {"cam-7": "line", "cam-8": "line"}
    publisher.carry_out(lambda repository: move(repository, ["cam-8"], None))
    with publisher.opened() as repository:
        assert read_groups(repository) == {"cam-7": "line"}
    newest = max(publisher.path.glob("metadata/*.targets.json"), key=lambda path: int(path.name.partition(".")[0]))
    assert list(Metadata[Targets].from_file(str(newest)).signed.targets) == ["groups.json"]


@pytest.mark.parametrize(
    ("devices", "group", "says"),
    [
        (["cam 7"], "line", "cannot be the id of a device"),
        (["cam-7"], "lime", "no group 'lime'; known: line"),
        (["cam-7"], None, "nothing to take back"),
    ],
)
def test_move_that_cannot_be_signs_nothing(
    publisher: Publisher, devices: list[str], group: str | None, says: str
) -> None:
    with pytest.raises(PublishError, match=says):
        publisher.carry_out(lambda repository: move(repository, devices, group))


def test_bundle_of_a_group_holds_its_configuration_and_the_groups(
    publisher: Publisher, file: Path, tmp_path: Path
) -> None:
    publisher.carry_out(lambda repository: add_configuration(repository, "line", NewKeys()))
    publisher.carry_out(lambda repository: configure(repository, "line", file))
    publisher.carry_out(lambda repository: move(repository, ["cam-7"], "line"))
    with publisher.opened() as repository:
        write_bundle(repository, "line", tmp_path / "stick")
    device = TufDevice(tmp_path / "stick", tmp_path / "device", publisher.root_1)
    assert device.fetch("config/line/overlay.toml") == OVERLAY.encode()
    assert b"cam-7" in (device.fetch("groups.json") or b"")
