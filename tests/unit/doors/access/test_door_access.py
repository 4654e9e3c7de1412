"""Who may use the HTTP and gRPC doors: addresses, exposure, tokens, web pages."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.access.rules import DoorAccess, DoorAddress, door_access, parse_door_address
from edge_runtime.doors.access.tokens import Rights, TokenFile
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.errors import ConfigError, Forbidden, Unauthenticated
from tests.fakes.certificates import Certificates

LOOPBACK = DoorAddress("127.0.0.1", 8000)


def _access(**settings: Any) -> DoorAccess:
    access = door_access(HttpSettings(**{"endpoint": "127.0.0.1:8000", **settings}), "http")
    assert access is not None
    return access


def _tokens(tmp_path: Path, **may: str) -> tuple[str, dict[str, str]]:
    """Write a file of tokens; return its path and the header for each name."""
    file, headers = TokenFile(), {}
    for name, rights in may.items():
        file, token = file.with_token(name, rights.split(","))  # type: ignore[arg-type]
        headers[name] = f"Bearer {token}"
    path = tmp_path / "tokens.toml"
    path.write_text(file.text())
    return str(path), headers


@pytest.mark.parametrize(
    ("text", "address", "is_here"),
    [
        ("127.0.0.1:8000", DoorAddress("127.0.0.1", 8000), True),
        ("localhost:0", DoorAddress("localhost", 0), True),
        ("[::1]:8000", DoorAddress("::1", 8000), True),
        ("[::]:8000", DoorAddress("::", 8000), False),
        ("0.0.0.0:8000", DoorAddress("0.0.0.0", 8000), False),
        ("camera-7.site:443", DoorAddress("camera-7.site", 443), False),
        ("unix:/run/a/http.sock", DoorAddress(path="/run/a/http.sock"), True),
    ],
)
def test_an_address_says_where_and_whether_others_reach_it(text: str, address: DoorAddress, is_here: bool) -> None:
    assert parse_door_address(text, "http.endpoint") == address
    assert address.is_this_machine is is_here
    assert str(address) == text


def test_three_slashes_mean_the_same_socket() -> None:
    assert parse_door_address("unix:///run/x", "k") == parse_door_address("unix:/run/x", "k")


@pytest.mark.parametrize(
    "text",
    ["", "8000", "127.0.0.1", ":8000", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "a:٣",
     "127.0.0.1:" + "9" * 5000, "http://127.0.0.1:8000", "::1:8000", "[::1]", "[x]:8000", "[::1:8000", "a b:1", "a/b:1",
     "*:8000", "unix:", "unix:run/x", "unix:/", "unix:/a/", "unix://host/x", "unix:/a\0b", "unix:/" + "a" * 107],
)  # fmt: skip
def test_another_address_is_refused_with_key_and_what_came(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^http\.endpoint: .*(wanted|brackets|shorter)"):
        parse_door_address(text, "http.endpoint")


def test_a_door_without_an_address_is_off() -> None:
    assert door_access(HttpSettings(), "http") is None
    assert door_access(HttpSettings(control=True), "http") is None


def test_control_may_have_an_address_of_its_own() -> None:
    endpoint, control = _access(control="unix:/run/c").addresses
    assert (endpoint.is_control, control.is_control, control.path) == (False, True, "/run/c")
    (alone,) = _access(endpoint=None, control="127.0.0.1:1").addresses
    assert alone.is_control


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"endpoint": "0.0.0.0:1"}, "http.cert_file, http.key_file, http.tokens_file, .*http.insecure = true"),
        ({"endpoint": "0.0.0.0:1", "insecure": True, "control": True}, "http.control: .*http.tokens_file"),
        ({"control": "0.0.0.0:1"}, "http.control: .*0.0.0.0:1.*loopback"),
        ({"control": "127.0.0.1:8000"}, "http.control: .*control = true"),
        ({"cert_file": "/x"}, "http.cert_file: .*http.key_file"),
        ({"key_file": "/x"}, "http.key_file: .*http.cert_file"),
        ({"client_ca_file": "/x"}, "http.client_ca_file: .*http.cert_file"),
        ({"cert_file": "/nowhere", "key_file": "/nowhere"}, "http.cert_file: there is no file '/nowhere'"),
        ({"tokens_file": "/nowhere"}, "http.tokens_file: /nowhere.*edge-runtime token add"),
        ({"allowed_origins": ("example.com",)}, "http.allowed_origins: got 'example.com'"),
    ],
)
def test_an_unsafe_or_broken_setting_is_refused_with_the_keys(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        _access(**settings)


def test_off_the_machine_needs_all_of_certificate_key_and_tokens(tmp_path: Path) -> None:
    pem = Certificates(tmp_path)
    files = {"cert_file": str(pem.server), "key_file": str(pem.server_key), "tokens_file": _tokens(tmp_path)[0]}
    (address,) = _access(endpoint="0.0.0.0:1", **files).addresses
    assert address.is_tls
    for name in files:
        with pytest.raises(ConfigError, match=r"http\."):
            _access(endpoint="0.0.0.0:1", **{**files, name: None})
    (plain,) = _access(endpoint="0.0.0.0:1", insecure=True).addresses
    assert not plain.is_tls


def test_tls_is_new_and_asks_for_a_certificate_where_it_is_configured_who_signs_them(tmp_path: Path) -> None:
    pem = Certificates(tmp_path)
    files = {"cert_file": str(pem.server), "key_file": str(pem.server_key)}
    context = _access(**files).ssl_context()
    assert context is not None
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_2, ssl.CERT_NONE)
    asking = _access(**files, client_ca_file=str(pem.ca))
    assert (asked := asking.ssl_context()) is not None
    assert asked.verify_mode == ssl.CERT_REQUIRED
    assert _access().ssl_context() is None


@pytest.mark.parametrize("broken", ["cert_file", "key_file", "client_ca_file"])
def test_a_broken_certificate_is_refused_by_its_key(tmp_path: Path, broken: str) -> None:
    pem = Certificates(tmp_path)
    files = {"cert_file": str(pem.server), "key_file": str(pem.server_key), "client_ca_file": str(pem.ca)}
    (tmp_path / "broken").write_text("no PEM")
    access = _access(**{**files, broken: str(tmp_path / "broken")})
    with pytest.raises(ConfigError, match=rf"http\.{broken}.*broken.*wanted"):
        access.ssl_context()


def test_without_tokens_the_address_decides() -> None:
    (endpoint,) = _access().addresses
    assert _access().caller(endpoint, None) == Rights(may_infer=True, may_control=False, may_view=True)
    (control,) = _access(control=True).addresses
    assert _access(control=True).caller(control, "Basic x") == Rights(may_infer=True, may_control=True, may_view=True)


def test_a_token_decides_what_its_bearer_may_do(tmp_path: Path) -> None:
    path, headers = _tokens(tmp_path, camera="infer", admin="infer,control", reload="control", guard="view")
    access = _access(tokens_file=path, control=True)
    (address,) = access.addresses
    assert access.caller(address, headers["camera"]) == Rights(True, False, "camera")
    assert access.caller(address, headers["admin"].replace("Bearer", "bearer")) == Rights(True, True, "admin")
    assert access.caller(address, headers["reload"]) == Rights(False, True, "reload")
    assert access.caller(address, headers["guard"]) == Rights(False, False, "guard", may_view=True)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Bearer x", "Basic x", "Bearer \udcff", "é"])
def test_a_missing_or_unknown_token_is_refused(tmp_path: Path, authorization: str | None) -> None:
    access = _access(tokens_file=_tokens(tmp_path, camera="infer")[0])
    with pytest.raises(Unauthenticated, match="token"):
        access.caller(access.addresses[0], authorization)


def test_a_control_address_wants_no_token_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    path, headers = _tokens(tmp_path, camera="infer")
    access = _access(tokens_file=path, control="unix:/run/c")
    control = access.addresses[1]
    assert access.caller(control, None) == Rights(True, True, may_view=True)
    assert access.caller(control, headers["camera"]) == Rights(True, True, "camera", may_view=True)
    with pytest.raises(Unauthenticated):
        access.caller(control, "Bearer x")


def test_tokens_are_read_again_and_a_broken_file_keeps_them(tmp_path: Path) -> None:
    path, old = _tokens(tmp_path, camera="infer")
    access = _access(tokens_file=path)
    (address,) = access.addresses
    _, new = _tokens(tmp_path, other="infer")
    access.caller(address, old["camera"])
    access.reload_tokens()
    assert access.caller(address, new["other"]).name == "other"
    with pytest.raises(Unauthenticated):
        access.caller(address, old["camera"])
    Path(path).write_text("[tokens.x]\nmay = []\n")
    with pytest.raises(ConfigError, match=r"tokens\.x\.sha256"):
        access.reload_tokens()
    assert access.caller(address, new["other"]).name == "other"


@pytest.mark.parametrize(
    "host", [None, "localhost", "LOCALHOST:9", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000", "localhost."]
)
def test_loopback_answers_to_its_own_names(host: str | None) -> None:
    _access().check_browser(LOOPBACK, None, host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.0.2.1", "[::2]", "localhost.evil.example"],
)
def test_a_page_that_dns_turned_to_loopback_is_refused(host: str) -> None:
    with pytest.raises(Forbidden, match=r"Host: .*http.allowed_origins"):
        _access().check_browser(LOOPBACK, None, host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "localhost:8000"),
        ("http://localhost:3000", "localhost:8000"),
        ("https://localhost:8000", "localhost:8000"),
        ("null", "localhost:8000"),
        ("", "localhost:8000"),
        ("http://", None),
    ],
)
def test_a_strange_page_is_refused(origin: str, host: str | None) -> None:
    with pytest.raises(Forbidden, match=r"Origin: .*http.allowed_origins"):
        _access().check_browser(LOOPBACK, origin, host)


def test_allowed_pages_and_our_own_may_call() -> None:
    access = _access(allowed_origins=("https://Shop.example/",))
    access.check_browser(LOOPBACK, "https://shop.example", "localhost:8000")
    access.check_browser(LOOPBACK, "https://shop.example", "shop.example")
    access.check_browser(LOOPBACK, "http://localhost:8000", "localhost:8000")
    _access(allowed_origins=("*",)).check_browser(LOOPBACK, "https://evil.example", "evil.example")


def test_off_the_machine_any_name_may_be_ours_but_no_page_calls() -> None:
    access = _access(endpoint="0.0.0.0:1", insecure=True)
    (address,) = access.addresses
    access.check_browser(address, None, "digits.default.svc.cluster.local")
    access.check_browser(address, "http://192.0.2.1:1", "192.0.2.1:1")
    for origin, host in (("http://evil.example:1", "evil.example:1"), ("http://evil.example", "192.0.2.1:1")):
        with pytest.raises(Forbidden):
            access.check_browser(address, origin, host)


def test_a_unix_socket_takes_any_host() -> None:
    access = _access(endpoint="unix:/run/x")
    access.check_browser(access.addresses[0], None, "anything")
