"""A new device and its authority, over real TLS: what it gets, whom it believes, who is refused."""

from __future__ import annotations

import base64
import json
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.addresses import read_proxy
from edge_runtime.cli.main import main
from edge_runtime.config.loading import load_config
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.socket import tls_context
from edge_runtime.enrolment.authority import GRACE, Authority, AuthorityFolder
from edge_runtime.enrolment.certificates import key_pem, new_key, signing_request
from edge_runtime.enrolment.device import AuthorityLink, Identity, enrol, renew
from edge_runtime.enrolment.door import EnrolmentDoor
from edge_runtime.enrolment.messages import MAX_BODY_BYTES, SECRET_BYTES, Token, new_secret, parse_token
from edge_runtime.enrolment.server import AuthorityServer
from edge_runtime.enrolment.settings import EnrolmentSettings
from edge_runtime.errors import ConfigError, DownloadError, TrustError
from tests.contract.running_daemon import ANSWER_S
from tests.fakes.proxy import Proxy

ROOT = b'{"signed": "a root file"}'

DIGEST = "b" * 43

AUTHORITY = "authority.test"
"""A name of the authority that no resolver knows."""

HALF_TOKENS = ["", "x", "a.b", "a.b.c", f"a.{DIGEST}", f"a.{DIGEST}.{'+' * 43}", f".{DIGEST}.{DIGEST}"]

TEMPLATE = """
[mqtt]
url = "mqtts://127.0.0.1:8883/@DEVICE@"
ca_file = "@IDENTITY@/ca.crt"
cert_file = "@IDENTITY@/device.pem"
key_file = "@IDENTITY@/device.pem"

[enrolment]
url = "@ENROLMENT_URL@"
identity = "@IDENTITY@"

[update]
root_file = "@ROOT_FILE@"
group = "@GROUP@"
"""


class Site:
    """An authority with its server. `shift`: how far its clock is ahead."""

    def __init__(self, folder: Path) -> None:
        self.shift = timedelta()
        self.folder = AuthorityFolder(folder)
        self.folder.make(
            names=["127.0.0.1", AUTHORITY],
            root=ROOT,
            configuration=TEMPLATE,
            issuer=None,
            trusted=None,
            now_utc=self.now_utc(),
        )
        self.authority = Authority(self.folder, now_utc=self.now_utc)
        self.server = AuthorityServer(self.authority, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{self.server.port}"
        self._thread = threading.Thread(target=self.server.serve)
        self._thread.start()

    def now_utc(self) -> datetime:
        return datetime.now(timezone.utc) + self.shift

    def token(self, **said: Any) -> Token:
        return parse_token(str(self.authority.add_token("", **{"group": "line-1", "uses": 1, "days": 7, **said})))

    def close(self) -> None:
        self.server.stop()
        self._thread.join()
        self.server.server_close()
        self.authority.close()


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serving(tmp_path / "authority") as site:
        yield site


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    (tmp_path / "device").mkdir()
    return Identity(tmp_path / "device" / "identity")


@pytest.mark.smoke
def test_enrolling_gives_a_device_its_certificate_its_configuration_and_its_root(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, config, folder = tmp_path / "token", tmp_path / "config.toml", tmp_path / "identity"
    token.write_text(f"{site.token()}\n")
    words = ["--token-file", str(token), "--device-id", "cam-7", "--config", str(config), "--identity", str(folder)]
    assert main(["enroll", site.url, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["group"] == "line-1"
    read = load_config(config, {})
    assert read.update is not None
    assert (read.update.group, Path(read.update.root_file).read_bytes()) == ("line-1", ROOT)
    assert read.table("enrolment") == EnrolmentSettings(site.url, str(folder))
    access = broker_access(read.table("mqtt"))
    assert access.address.device_id == "cam-7"
    assert tls_context(access).get_ca_certs()
    assert stat.S_IMODE((folder / "device.pem").stat().st_mode) == 0o600
    (known,) = site.authority.devices()
    assert (known.device, known.group, known.is_revoked) == ("cam-7", "line-1", False)


def test_enrolling_keeps_a_configuration_that_is_there_unless_it_is_to_be_replaced(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("# mine\n")
    words = ["--device-id", "cam-7", "--config", str(config), "--identity", str(tmp_path / "identity")]
    assert main(["enroll", site.url, "--token", str(site.token(uses=2)), *words]) == 1
    assert "add --replace" in capsys.readouterr().err
    assert site.authority.devices() == []
    assert main(["enroll", site.url, "--token", str(site.token(uses=2)), *words, "--replace"]) == 0
    assert (tmp_path / "config.toml.before").read_text() == "# mine\n"


def test_enrolling_tells_another_authority_no_secret(site: Site, identity: Identity, tmp_path: Path) -> None:
    with serving(tmp_path / "other") as other:
        with pytest.raises(TrustError, match="not the authority that made this token"):
            enrol(other.url, site.token(), "cam-7", identity)
        assert other.server.count == 0
    assert not identity.device.exists()


def test_enrolling_takes_no_other_root_than_the_token_says(site: Site, identity: Identity) -> None:
    token = site.token()._replace(root=bytes(32))
    with pytest.raises(TrustError, match="another root file than the token says"):
        enrol(site.url, token, "cam-7", identity)
    assert not identity.device.exists()


@pytest.mark.parametrize(
    ("make", "device", "says"),
    [
        (lambda site: site.token()._replace(secret="guessed"), "cam-7", "not known here"),
        (lambda site: site.token(days=-1), "cam-7", "has expired"),
        (lambda site: site.token(device="cam-8"), "cam-7", "for cam-8 alone"),
        (lambda site: site.token(uses=0), "cam-7", "used up"),
    ],
)
def test_enrolling_without_a_good_token_is_refused(
    site: Site, identity: Identity, make: Callable[[Site], Token], device: str, says: str
) -> None:
    with pytest.raises(DownloadError, match=says):
        enrol(site.url, make(site), device, identity)
    assert site.authority.devices() == []


def test_enrolling_counts_each_use_of_a_token_once(site: Site, tmp_path: Path) -> None:
    token = site.token(uses=3)
    refused: list[str] = []

    def enrol_one(number: int) -> None:
        try:
            enrol(site.url, token, f"cam-{number}", Identity(tmp_path / f"{number}"))
        except DownloadError as error:
            refused.append(error.message)

    threads = [threading.Thread(target=enrol_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_S)
    assert len(site.authority.devices()) == 3
    assert len(refused) == 5


def test_enrolling_gives_an_id_that_is_taken_to_nobody_but_by_a_token_of_its_own(
    site: Site, identity: Identity, tmp_path: Path
) -> None:
    token = site.token(uses=9)
    enrol(site.url, token, "cam-7", identity)
    with pytest.raises(DownloadError, match="is enrolled already"):
        enrol(site.url, token, "cam-7", Identity(tmp_path / "thief"))
    again = Identity(tmp_path / "again")
    enrol(site.url, site.token(device="cam-7"), "cam-7", again)
    with pytest.raises(DownloadError, match="was enrolled again since"):
        renew(site.url, identity)
    renew(site.url, again)


@pytest.mark.parametrize(
    "text", ["", "x", "a.b", "a.b.c", f"a.{DIGEST}", f"a.{DIGEST}.{'+' * 43}", f".{DIGEST}.{DIGEST}"]
)
def test_enrolling_by_half_a_token_is_refused_before_anything_is_asked(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SECRET\.AUTHORITY\.ROOT"):
        parse_token(text)


def test_a_token_is_never_an_option_of_the_command_line() -> None:
    assert new_secret(b"\xfb" * SECRET_BYTES)[0].isalpha()


ADDRESSES = ["http://127.0.0.1:1", "https://", "x", "https://u:p@127.0.0.1", "https://[", "https://h/?a"]


@pytest.mark.parametrize("url", ADDRESSES)
def test_enrolling_at_an_address_that_is_none_is_refused(site: Site, identity: Identity, url: str) -> None:
    with pytest.raises(ConfigError, match="not an authority's address"):
        enrol(url, site.token(), "cam-7", identity)


def test_enrolling_and_renewing_go_through_the_devices_proxy(site: Site, tmp_path: Path) -> None:
    proxy, folder, config = Proxy(("127.0.0.1", site.server.port)), tmp_path / "identity", tmp_path / "config.toml"
    try:
        words = ["--device-id", "cam-7", "--config", str(config), "--identity", str(folder), "--proxy", proxy.url]
        assert main(["enroll", f"https://{AUTHORITY}", "--token", str(site.token()), *words]) == 0
        renew(f"https://{AUTHORITY}", Identity(folder), AuthorityLink(read_proxy(proxy.url)))
        proxy.says = b"HTTP/1.1 407 Who\r\n\r\n"
        with pytest.raises(DownloadError, match=f"the proxy leads to no {AUTHORITY}:443: HTTP/1.1 407 Who"):
            renew(f"https://{AUTHORITY}", Identity(folder), AuthorityLink(read_proxy(proxy.url)))
    finally:
        proxy.close()
    assert all(head.startswith(f"CONNECT {AUTHORITY}:443 HTTP/1.1\r\n".encode()) for head in proxy.heads)
    assert len(proxy.heads) == 4


# ---- renewal --------------------------------------------------------------------------------------------------------


def test_renewal_gives_a_new_key_and_may_be_lost_on_its_way_once(site: Site, identity: Identity) -> None:
    enrol(site.url, site.token(), "cam-7", identity)
    before = identity.device.read_bytes()
    first = renew(site.url, identity)
    assert first.public_key() != identity_of(before)
    identity.device.write_bytes(before)  # as if the answer had not come
    second = renew(site.url, identity)
    assert second.serial_number != first.serial_number
    identity.device.write_bytes(before)
    renew(site.url, identity)
    renew(site.url, identity)
    identity.device.write_bytes(before)
    with pytest.raises(DownloadError, match="was enrolled again since"):
        renew(site.url, identity)


def identity_of(data: bytes) -> object:
    from cryptography import x509

    return x509.load_pem_x509_certificate(data).public_key()


def test_renewal_is_made_by_the_daemon_before_the_end_and_the_next_connection_shows_it(
    site: Site, identity: Identity
) -> None:
    site.shift = -timedelta(days=80)
    enrol(site.url, site.token(), "cam-7", identity)
    site.shift = timedelta()
    old = identity.certificate()
    door = EnrolmentDoor(EnrolmentSettings(site.url, str(identity.folder)))
    left_s = door.left_s()
    door.start()
    try:
        door.ready()
        waited = threading.Event()
        for _ in range(int(ANSWER_S * 20)):
            if door.status()["enrolment"]["renewals"] or waited.wait(0.05):
                break
        assert door.status()["enrolment"]["reason"] == ""
        assert door.left_s() > left_s + 70 * 86_400
        assert identity.certificate().serial_number != old.serial_number
    finally:
        door.stop_admitting(1.0)
        door.close()
    ssl.create_default_context().load_cert_chain(identity.device)


def test_renewal_that_fails_keeps_the_certificate_and_says_why(site: Site, identity: Identity) -> None:
    enrol(site.url, site.token(), "cam-7", identity)
    before = identity.device.read_bytes()
    site.authority.revoke("cam-7")
    with pytest.raises(DownloadError, match="shut out"):
        renew(site.url, identity)
    assert identity.device.read_bytes() == before


def test_renewal_is_possible_for_a_while_after_the_end_and_no_longer(site: Site, identity: Identity) -> None:
    enrol(site.url, site.token(), "cam-7", identity)
    end = timedelta(days=90)
    site.shift = end + GRACE + timedelta(hours=1)
    with pytest.raises(DownloadError, match="ended more than 30 days ago"):
        renew(site.url, identity)
    site.shift = end + GRACE - timedelta(hours=1)
    renew(site.url, identity)


def test_renewal_with_a_strangers_key_or_certificate_is_refused(site: Site, identity: Identity, tmp_path: Path) -> None:
    enrol(site.url, site.token(), "cam-7", identity)
    certificate = identity.device.read_bytes().partition(b"-----BEGIN PRIVATE KEY-----")[0]
    identity.device.write_bytes(certificate + key_pem(new_key()))
    with pytest.raises(DownloadError, match="not its owner who asks"):
        renew(site.url, identity)
    with serving(tmp_path / "other") as other:
        stranger = Identity(tmp_path / "stranger")
        enrol(other.url, other.token(), "cam-7", stranger)
    stranger.trusted.write_bytes(identity.trusted.read_bytes())
    with pytest.raises(DownloadError, match="not a certificate of this authority's"):
        renew(site.url, stranger)
    server = Identity(tmp_path / "server")
    server.folder.mkdir()
    server.trusted.write_bytes(identity.trusted.read_bytes())
    chain = site.folder.server.read_bytes().partition(b"-----END CERTIFICATE-----\n")
    server.device.write_bytes(chain[0] + chain[1] + site.folder.server_key.read_bytes())
    with pytest.raises((DownloadError, ValueError)):
        renew(site.url, server)


# ---- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/enrol", b"{", 400),
        ("/enrol", b"[]", 400),
        ("/enrol", json.dumps({"secret": "x", "device": "../x", "request": ""}).encode(), 400),
        ("/enrol", json.dumps({"secret": "x", "device": "x", "request": "no PEM"}).encode(), 400),
        ("/renew", json.dumps({"certificate": "", "request": "", "signature": ""}).encode(), 400),
        ("/enrol", b"x" * (MAX_BODY_BYTES + 1), 413),
        ("/other", b"{}", 404),
        ("/ca", b"{}", 404),
    ],
)
def test_server_answers_what_makes_no_sense_with_a_reason(site: Site, path: str, body: bytes, status: int) -> None:
    tls = ssl.create_default_context(cafile=site.folder.certificate)
    connection = HTTPSConnection("127.0.0.1", site.server.port, context=tls, timeout=ANSWER_S)
    try:
        connection.request("POST", path, body)
        reply = connection.getresponse()
        assert reply.status == status
        assert json.loads(reply.read())["error"]
    finally:
        connection.close()


def test_server_gives_no_certificate_for_another_devices_request(site: Site) -> None:
    request = signing_request("cam-8", new_key()).decode()
    tls = ssl.create_default_context(cafile=site.folder.certificate)
    connection = HTTPSConnection("127.0.0.1", site.server.port, context=tls, timeout=ANSWER_S)
    body = {"secret": site.token().secret, "device": "cam-7", "request": request}
    try:
        connection.request("POST", "/enrol", json.dumps(body))
        assert json.loads(connection.getresponse().read())["code"] == "config"
    finally:
        connection.close()
    assert site.authority.devices() == []


# ---- verbs ----------------------------------------------------------------------------------------------------------


def test_verbs_make_an_authority_a_token_and_a_brokers_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], identity: Identity
) -> None:
    root, config, folder = tmp_path / "1.root.json", tmp_path / "device.toml", tmp_path / "authority"
    root.write_bytes(ROOT)
    config.write_text(TEMPLATE)
    made = ["authority", "init", str(folder), "--name", "127.0.0.1", "--root", str(root), "--config", str(config)]
    assert main(made) == 0
    assert main(made) == 1
    at = ["--authority", str(folder)]
    assert main(["authority", "certify", "broker.site", "127.0.0.1", "--out", str(tmp_path / "broker"), *at]) == 0
    ssl.create_default_context().load_cert_chain(tmp_path / "broker" / "server.crt", tmp_path / "broker" / "server.key")
    capsys.readouterr()
    assert main(["authority", "token", "--group", "line-1", *at, "--json"]) == 0
    token = parse_token(json.loads(capsys.readouterr().out)["token"])
    authority = Authority(AuthorityFolder(folder))
    server = AuthorityServer(authority, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        enrol(f"https://127.0.0.1:{server.port}", token, "cam-7", identity)
        assert main(["authority", "revoke", "cam-7", *at]) == 0
        assert main(["authority", "revoke", "cam-8", *at]) == 1
        capsys.readouterr()
        assert main(["authority", "devices", *at, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["revoked"]
    finally:
        server.stop()
        thread.join()
        server.server_close()
        authority.close()
    assert stat.S_IMODE((folder / "authority.key").stat().st_mode) == 0o600
    assert base64.b64decode(base64.b64encode(ROOT)) == root.read_bytes()
