"""A registry's addresses, logins and challenges as values, and replies that no `repo push` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import ConfigError, DownloadError, NotPublished
from edge_runtime.updates.fetch import FetchLimits, Pace, fetch_bytes
from edge_runtime.updates.http_fetch import HttpFetcher
from edge_runtime.updates.oci import (
    Challenge,
    OciMetadata,
    OciTargets,
    Registry,
    RegistryLogin,
    parse_address,
    read_challenges,
    read_token,
)
from edge_runtime.updates.source import configured_source
from tests.fakes.http_server import Answer, HttpServer, Request

SHA256 = "ab" * 32


@pytest.mark.parametrize(
    ("url", "api"),
    [
        ("oci://registry.lan/models", "https://registry.lan/v2/models/"),
        ("oci://registry.lan:5000/line-1/models/", "https://registry.lan:5000/v2/line-1/models/"),
        ("oci+http://127.0.0.1:5000/a.b/c__d", "http://127.0.0.1:5000/v2/a.b/c__d/"),
    ],
)
def test_an_address_names_a_host_and_a_repository(url: str, api: str) -> None:
    address = parse_address(url)
    assert address.api == api
    assert str(address) == url.rstrip("/")


@pytest.mark.parametrize("url", ["oci://", "oci://host", "oci://host/", "oci://host/Models", "oci://host/models:1",
                                 "oci://host/a//b", "oci://host/../x", "https://host/models"])  # fmt: skip
def test_an_address_without_a_name_or_with_a_tag_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted oci://HOST/NAME"):
        parse_address(url)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (['Bearer realm="https://a/token",service="s",scope="repository:x:pull"'],
         Challenge("https://a/token", "s", "repository:x:pull")),
        (['Basic realm="r"'], Challenge()),
        (['Basic realm="r"', 'bearer service="s", realm="https://a"'], Challenge("https://a", "s")),
        (["Negotiate", 'Bearer service="s"'], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_challenge_for_a_token_comes_before_one_for_a_password(values: list[str], found: Challenge | None) -> None:
    assert read_challenges(values) == found


@pytest.mark.parametrize(
    "value",
    [f'Bearer realm="https://a",x="{"a" * 4096}"', f"Bearer {'a' * 65_000}", f'Bearer {"a" * 33}realm="https://a"'],
)
def test_a_challenge_that_takes_long_to_read_is_passed_over(value: str) -> None:
    assert read_challenges([value]) is None
    assert read_challenges([value, 'Bearer realm="https://b"']) == Challenge("https://b")


def test_a_tokens_address_has_the_service_and_the_scope() -> None:
    asked = Challenge("https://a/t", "s", "repository:x:pull").token_url("x", "pull")
    assert asked == "https://a/t?service=s&scope=repository%3Ax%3Apull"
    assert (
        Challenge("https://a/t?k=1").token_url("x", "pull,push") == "https://a/t?k=1&scope=repository%3Ax%3Apull%2Cpush"
    )


def test_a_token_has_either_name_and_is_never_two_lines() -> None:
    assert read_token(b'{"token": "a.b"}') == "Bearer a.b"
    assert read_token(b'{"access_token": "c", "expires_in": 60}') == "Bearer c"
    for data in (b"{}", b'{"token": "a\\r\\nX: y"}', b"[]", b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 (each library says it in its own words)
            read_token(data)


def test_a_login_is_found_by_the_registrys_host(tmp_path: Path) -> None:
    file = tmp_path / "auth.json"
    file.write_text(
        json.dumps({"auths": {"https://hub.lan/v1/": {"auth": "YTpi"}, "other": {"username": "a", "password": "b"}}})
    )
    assert RegistryLogin(parse_address("oci://hub.lan/x"), str(file), "key").basic() == "Basic YTpi"
    assert RegistryLogin(parse_address("oci://other/x"), str(file), "key").basic() == "Basic YTpi"
    assert RegistryLogin(parse_address("oci://third/x"), None, "key").basic() is None
    with pytest.raises(ConfigError, match="has no login for third"):
        RegistryLogin(parse_address("oci://third/x"), str(file), "key")
    with pytest.raises(ConfigError, match="tells every listener"):
        RegistryLogin(parse_address("oci+http://other/x"), str(file), "key")
    file.write_text("[]")
    with pytest.raises(ConfigError, match="podman login"):
        RegistryLogin(parse_address("oci://other/x"), str(file), "key")
    with pytest.raises(ConfigError, match="No such file"):
        RegistryLogin(parse_address("oci://other/x"), str(tmp_path / "none"), "key")


def test_a_login_is_for_registries_alone(tmp_path: Path) -> None:
    settings = UpdateSettings(root_file="r", url="https://host/models", auth_file=str(tmp_path / "auth.json"))
    with pytest.raises(ConfigError, match="is for registries"):
        configured_source(settings, SystemClock())


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"not JSON", "is not what `repo push` writes"),
        (b"{}", "is not what `repo push` writes"),
        (b'{"layers": []}', "is not what `repo push` writes"),
        (b'{"layers": [{"digest": "sha256:../../etc"}]}', "wanted sha256: and 64 hex digits"),
        (b" " * ((4 << 20) + 1), "more than the 4194304 bytes"),
    ],
)
def test_a_manifest_that_no_push_wrote_is_a_failed_download(manifest: bytes, says: str) -> None:
    with HttpServer(lambda path: manifest if path == "v2/x/manifests/timestamp.json" else None) as server:
        with pytest.raises(DownloadError, match=says):
            fetched(OciMetadata(registry(server)), "timestamp.json")
        assert server.paths == ["v2/x/manifests/timestamp.json"]


def test_a_file_of_metadata_is_the_first_layer_of_a_tag_and_a_target_is_a_blob_of_its_hash() -> None:
    manifest = json.dumps({"layers": [{"digest": f"sha256:{SHA256}"}, {"digest": f"sha256:{'c' * 64}"}]}).encode()
    files = {"v2/x/manifests/2.team-vision.json": manifest, f"v2/x/blobs/sha256:{SHA256}": b"signed"}
    with HttpServer(files.get) as server:
        place = registry(server)
        assert fetched(OciMetadata(place), "2.team-vision.json") == b"signed"
        assert fetched(OciTargets(place), f"team/vision/digits/1/{SHA256}.model.onnx") == b"signed"
        with OciTargets(place).open(f"{SHA256}.x", start_bytes=4, deadline_s=float("inf")) as body:
            assert (body.start_bytes, body.read(9)) == (4, b"ed")
        for path in ("../../x", "2%2Froot.json", "a/b"):
            with pytest.raises(NotPublished):
                fetched(OciMetadata(place), path)
        with pytest.raises(NotPublished, match="begins with its SHA-256"):
            fetched(OciTargets(place), "team/vision/model.onnx")
        with pytest.raises(NotPublished, match="404"):
            fetched(OciMetadata(place), "3.root.json")


def test_a_registry_that_asks_again_and_again_is_asked_twice() -> None:
    def answer(request: Request) -> Answer:
        if "token" in request.path:
            return Answer(200, b'{"token": "t"}')
        return Answer(401, b"", {"WWW-Authenticate": f'Bearer realm="{server.url}token"'})

    with HttpServer(lambda _path: None) as server:
        server.answer = answer
        with pytest.raises(DownloadError, match="401"):
            fetched(OciTargets(registry(server)), f"{SHA256}.x")
        blob = f"v2/x/blobs/sha256:{SHA256}"
        assert [path.partition("?")[0] for path in server.paths] == [blob, "token", blob]
        assert server.requests[-1].headers["Authorization"] == "Bearer t"


def registry(server: HttpServer) -> Registry:
    address = parse_address(f"oci+http://{server.url.split('/')[2]}/x")
    return Registry(HttpFetcher(address.api), address, RegistryLogin(address, None, "update.auth_file"))


def fetched(place: OciMetadata | OciTargets, path: str) -> bytes:
    return fetch_bytes(place, path, max_bytes=1 << 20, pace=Pace(FetchLimits(total_s=60.0)))
