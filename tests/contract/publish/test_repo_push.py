"""`repo push` to Debian's docker-registry, and devices that follow it: logins, redirects, changed and missing blobs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.errors import PublishError
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.registry import Pushed, push
from edge_runtime.publish.repository import open_repository
from edge_runtime.updates.oci import RegistryLogin, parse_address
from tests.contract.updates.updated_device import Fleet
from tests.fakes.docker_registry import NEEDS_REGISTRY, PASSWORD, USER, DockerRegistry, TokenServer
from tests.fakes.http_server import HttpServer

pytestmark = NEEDS_REGISTRY


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path)
    fleet.release(1)
    return fleet


def pushed(fleet: Fleet, registry: DockerRegistry, auth_file: Path | None = None) -> Pushed:
    """Push the repository as it is now."""
    address = parse_address(registry.address)
    login = RegistryLogin(address, None if auth_file is None else str(auth_file), "--auth-file")
    with open_repository(fleet.mirror, Passphrases()) as repository:
        return push(repository, address, login, None, lambda _tag: None)


def logins(folder: Path, registry: DockerRegistry, password: str = PASSWORD) -> Path:
    """What `podman login --authfile` writes."""
    file = folder / "auth.json"
    pair = base64.b64encode(f"{USER}:{password}".encode()).decode()
    file.write_text(json.dumps({"auths": {f"127.0.0.1:{registry.port}": {"auth": pair}}}))
    return file


@pytest.mark.smoke
def test_a_device_takes_releases_from_a_registry_and_a_second_push_sends_what_is_new(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DockerRegistry(tmp_path / "registry") as registry:
        words = ["repo", "push", registry.address, "--repo", str(fleet.mirror), "--json"]
        assert main(words) == 0
        first: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert first["to"] == registry.address
        assert first["sent"] > first["tags"]  # each has its file of metadata, and roles have targets
        again = pushed(fleet, registry)
        assert (again.tags, again.sent) == (first["tags"], 0)
        with fleet.device(folder=None, url=registry.address) as device:
            assert device.outcome()[0] == "installed"
            assert device.outcome() == ("runs", "")
            fleet.release(2)
            after = pushed(fleet, registry)
            assert 0 < after.sent < first["sent"]
            assert device.outcome()[0] == "installed"
            assert device.adds() == 2.0
        assert device.status()["source"] == registry.address


def test_a_registry_that_wants_tokens_and_leads_to_a_store_is_followed_with_a_login_and_no_further(
    fleet: Fleet, tmp_path: Path
) -> None:
    def find(path: str) -> bytes | None:
        file = tmp_path / "registry/root" / path
        return file.read_bytes() if file.is_file() else None

    with (
        HttpServer(find) as files,
        TokenServer() as tokens,
        DockerRegistry(tmp_path / "registry", tokens=tokens, leads_to=files.url) as registry,
    ):
        with pytest.raises(PublishError, match="look at --auth-file"):
            pushed(fleet, registry)
        with pytest.raises(PublishError, match="look at --auth-file"):
            pushed(fleet, registry, logins(tmp_path, registry, "wrong"))
        auth_file = logins(tmp_path, registry)
        assert pushed(fleet, registry, auth_file).sent > 0
        assert any({*scope.rpartition(":")[2].split(",")} == {"pull", "push"} for scope in tokens.asked)
        store = files.url.split("/")[2]
        changes: dict[str, Any] = {"folder": None, "url": registry.address}
        with fleet.device(**changes, redirect_hosts=(store, tokens.host)) as device:
            told = device.apply()
            assert not told["is_ok"]
            assert "update.auth_file" in told["reason"]
        changes["auth_file"] = str(auth_file)
        with fleet.device(**changes, redirect_hosts=(store,)) as device:
            told = device.apply()
            assert not told["is_ok"]
            assert f"another server, {tokens.host}" in told["reason"]
        with fleet.device(**changes, redirect_hosts=(tokens.host,)) as device:
            told = device.apply()
            assert not told["is_ok"]
            assert f"another server, {store}" in told["reason"]
        with fleet.device(**changes, redirect_hosts=(store, tokens.host)) as device:
            assert device.outcome()[0] == "installed"
        assert files.requests
        assert not any("Authorization" in request.headers for request in files.requests)


def test_a_registry_is_not_believed_what_no_key_signed_and_its_clean_up_spares_what_is(
    fleet: Fleet, tmp_path: Path
) -> None:
    with DockerRegistry(tmp_path / "registry") as registry:
        made = fleet.release(2)
        pushed(fleet, registry)
        (model,) = (target for target in fleet.mirror.rglob("*.model.onnx") if "/2/" in target.as_posix())
        sha256 = model.name.partition(".")[0]
        with fleet.device(folder=None, url=registry.address) as device:
            whole = registry.blob(sha256).read_bytes()
            registry.blob(sha256).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            action, reason = device.outcome()
            assert action == "put off"
            assert "changed the file" in reason
            registry.blob(sha256).write_bytes(whole)
            left = registry.blob("0" * 64)
            left.parent.mkdir(parents=True)
            left.write_bytes(b"of no tag")
            registry.collect_garbage()
            assert not left.exists()
            assert device.outcome()[0] == "installed"
        assert made.release.version == 2


def test_a_file_that_was_changed_after_it_was_signed_is_not_pushed_and_the_tags_stay_as_they_were(
    fleet: Fleet, tmp_path: Path
) -> None:
    with DockerRegistry(tmp_path / "registry") as registry:
        pushed(fleet, registry)
        fleet.release(2)
        (model,) = (target for target in fleet.mirror.rglob("*.model.onnx") if "/2/" in target.as_posix())
        model.write_bytes(b"another model")
        with pytest.raises(PublishError, match="was changed after it was signed"):
            pushed(fleet, registry)
        with fleet.device(folder=None, url=registry.address) as device:
            assert device.outcome()[0] == "installed"
            assert device.adds() == 1.0
