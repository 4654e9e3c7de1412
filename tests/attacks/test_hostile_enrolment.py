"""Who stands between a device and its authority, who owns the device's state, and who keeps the authority busy."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from edge_runtime.cli.main import main
from edge_runtime.durable import write_atomically
from edge_runtime.enrolment.authority import Authority, AuthorityFolder
from edge_runtime.enrolment.certificates import new_key, signing_request
from edge_runtime.enrolment.device import Identity, enrol, renew
from edge_runtime.enrolment.door import EnrolmentDoor, retry_wait_s
from edge_runtime.enrolment.messages import Enrol, Enrolled
from edge_runtime.enrolment.server import BOUNDS, AuthorityServer
from edge_runtime.enrolment.settings import EnrolmentSettings
from edge_runtime.errors import ConfigError, DownloadError, Forbidden, StorageFailed, TrustError
from tests.contract.enrolment.test_enrolling import Site, serving
from tests.contract.running_daemon import ANSWER_S
from tests.fakes.clock import FakeClock
from tests.fakes.rights import NOBODY, open_folder


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serving(tmp_path / "authority") as site:
        yield site


# ---- in the middle --------------------------------------------------------------------------------------------------


class Impostor(Authority):
    """Says of itself that it is another authority, and itself. heard: the secrets that it was told."""

    def __init__(self, folder: AuthorityFolder, said: bytes) -> None:
        super().__init__(folder)
        self.said = said
        self.heard: list[str] = []

    @property
    def certificate(self) -> bytes:
        return self.said

    def enrol(self, call: Enrol) -> Enrolled:
        self.heard.append(call.secret)
        raise Forbidden("thank you")


@pytest.mark.parametrize(
    "said",
    [
        lambda real, own: real + own,
        lambda real, own: real + b"# \xff\n" + own,
        lambda real, _: real,
        lambda real, _: real + b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ],
    ids=["and-its-own", "and-no-text", "alone", "and-none"],
)
def test_a_device_tells_its_token_only_to_who_has_the_certificate_that_the_token_names(
    site: Site, tmp_path: Path, said: Callable[[bytes, bytes], bytes]
) -> None:
    identity = Identity(tmp_path / "identity")
    with serving(tmp_path / "rogue") as rogue:
        impostor = Impostor(rogue.folder, said(site.authority.certificate, rogue.authority.certificate))
        rogue.server.authority = impostor
        with pytest.raises((DownloadError, TrustError)):
            enrol(rogue.url, site.token(), "cam-7", identity)
        impostor.close()
    assert impostor.heard == []
    assert not identity.device.exists()


@pytest.mark.parametrize("device", ["cam-7", "cam-8"])
def test_a_device_takes_no_certificate_of_another_key_or_device(
    site: Site, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, identity = site.authority.enrol, Identity(tmp_path / "identity")

    def enrol_other(call: Enrol) -> Enrolled:
        request = signing_request(device, new_key()).decode()
        return msgspec.structs.replace(real(Enrol(call.secret, device, request)), device=call.device)

    monkeypatch.setattr(site.authority, "enrol", enrol_other)
    with pytest.raises(TrustError, match="for another device than cam-7, or for another key"):
        enrol(site.url, site.token(), "cam-7", identity)
    assert not identity.device.exists()


def test_a_device_trusts_no_public_authority_where_its_own_names_none(site: Site, tmp_path: Path) -> None:
    identity = Identity(tmp_path / "identity")
    enrol(site.url, site.token(), "cam-7", identity)
    site.folder.trusted.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no certificate"):
        renew(site.url, identity)
    identity.trusted.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no certificate"):
        renew(site.url, identity)


def test_a_device_takes_a_bundle_whose_remarks_are_in_any_letters(site: Site, tmp_path: Path) -> None:
    identity = Identity(tmp_path / "identity")
    site.folder.trusted.write_bytes("# Autorit\u00e9\n".encode() + site.folder.trusted.read_bytes())
    enrol(site.url, site.token(), "cam-7", identity)
    renew(site.url, identity)


# ---- who owns the state ---------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led to write where a user may not")


@pytest.fixture
def device() -> Iterator[Path]:
    """A device's root folder: `etc` and `victim` are root's, `state` is the daemon's user's."""
    with open_folder() as folder:
        for name in ("etc", "victim", "state"):
            (folder / name).mkdir()
        os.chown(folder / "state", NOBODY, NOBODY)
        yield folder


def enrol_as_root(site: Site, device: Path, *words: str, identity: str = "state/identity") -> int:
    at = ["--identity", str(device / identity), "--config", str(device / "etc" / "config.toml"), "--device-id", "cam-7"]
    return main(["enroll", site.url, "--token", str(site.token(device="cam-7")), *at, *words])


def owners(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.lstat().st_uid) for path in folder.rglob("*")}


@needs_root
def test_root_gives_the_identity_to_the_owner_of_the_state_and_keeps_root_of_trust_and_configuration(
    site: Site, device: Path
) -> None:
    assert enrol_as_root(site, device) == 0
    assert owners(device / "state") == {(name, NOBODY) for name in ("identity", "device.pem", "ca.crt")}
    assert owners(device / "etc") == {("config.toml", 0), ("1.root.json", 0)}
    assert f'root_file = "{device}/etc/1.root.json"' in (device / "etc" / "config.toml").read_text()


@needs_root
def test_root_writes_nothing_where_a_link_of_the_daemons_user_leads(
    site: Site, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (device / "state" / "identity").symlink_to(device / "victim")
    assert enrol_as_root(site, device) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert owners(device / "victim") == set()
    assert (device / "victim").stat().st_uid == 0
    assert site.authority.devices() == []


@needs_root
@pytest.mark.parametrize("name", ["device.pem", "ca.crt", "1.root.json", "enrolling.pem"])
def test_root_follows_no_link_in_the_place_of_a_file_when_it_enrols_again(site: Site, device: Path, name: str) -> None:
    assert enrol_as_root(site, device) == 0
    secret = device / "victim" / "shadow"
    secret.write_text("secret")
    secret.chmod(0o600)
    planted = device / "state" / "identity" / name
    planted.unlink(missing_ok=True)
    planted.symlink_to(secret)
    os.chown(planted, NOBODY, NOBODY, follow_symlinks=False)
    assert enrol_as_root(site, device, "--replace") == 0
    assert (secret.read_text(), secret.stat().st_uid) == ("secret", 0)


@needs_root
def test_root_keeps_no_root_of_trust_where_another_user_could_replace_it(
    site: Site, device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--identity", str(device / "state/identity"), "--config", str(device / "state/config.toml")]
    assert main(["enroll", site.url, "--token", str(site.token()), "--device-id", "cam-7", *at]) == 1
    assert f"belongs to user {NOBODY}" in capsys.readouterr().err
    assert owners(device / "state") == set()


# ---- an answer that is lost -----------------------------------------------------------------------------------------


def test_an_answer_that_is_lost_is_given_again_to_the_same_device_and_no_other(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, token, identity = site.authority.enrol, site.token(), Identity(tmp_path / "identity")
    lost: list[Enrolled] = []

    def lose(call: Enrol) -> Enrolled:
        lost.append(real(call))
        raise StorageFailed("the power fails here")

    monkeypatch.setattr(site.authority, "enrol", lose)
    with pytest.raises(DownloadError, match="the power fails here"):
        enrol(site.url, token, "cam-7", identity)
    monkeypatch.undo()
    for name in ("cam-7", "cam-8"):
        with pytest.raises(DownloadError, match="used up"):
            enrol(site.url, token, name, Identity(tmp_path / "thief"))
    # The process of the device ended too: all that it has is on its disk.
    assert enrol(site.url, token, "cam-7", Identity(identity.folder)).certificate == lost[0].certificate
    assert enrol(site.url, token, "cam-7", Identity(identity.folder)).certificate == lost[0].certificate
    assert len(site.authority.devices()) == 1
    renew(site.url, identity)
    with pytest.raises(DownloadError, match="used up"):
        enrol(site.url, token, "cam-7", identity)


def test_a_lost_answer_is_not_given_to_a_device_that_was_shut_out(site: Site, tmp_path: Path) -> None:
    token, identity = site.token(), Identity(tmp_path / "identity")
    enrol(site.url, token, "cam-7", identity)
    site.authority.revoke("cam-7")
    with pytest.raises(DownloadError, match="used up"):
        enrol(site.url, token, "cam-7", identity)


@pytest.mark.parametrize("fails", ["1.root.json", "config.toml"])
def test_a_device_whose_power_fails_before_the_end_repeats_enroll_and_keeps_its_first_configuration_beside(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    config = tmp_path / "etc" / "config.toml"
    config.parent.mkdir()
    config.write_text("# mine\n")

    def cut(path: Path, data: bytes) -> None:
        if path.name == fails:
            raise StorageFailed("the power fails here")
        write_atomically(path, data)

    words = ["enroll", site.url, "--token", str(site.token()), "--device-id", "cam-7", "--replace", "--config"]
    words += [str(config), "--identity", str(tmp_path / "state" / "identity")]
    monkeypatch.setattr("edge_runtime.enrolment.command.write_atomically", cut)
    assert main(words) == 1
    assert config.read_text() == "# mine\n"
    monkeypatch.undo()
    assert main(words) == 0
    assert (tmp_path / "etc" / "config.toml.before").read_text() == "# mine\n"
    assert sorted(path.name for path in (tmp_path / "state" / "identity").iterdir()) == ["ca.crt", "device.pem"]


# ---- requests that ask for more -------------------------------------------------------------------------------------


def request_of(
    *,
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | None = None,
    names: tuple[tuple[x509.ObjectIdentifier, str], ...] = (),
    says: tuple[x509.ExtensionType, ...] = (),
) -> str:
    """A signing request of cam-7, with more in it."""
    key = key or new_key()
    subject = x509.Name([x509.NameAttribute(oid, value) for oid, value in ((NameOID.COMMON_NAME, "cam-7"), *names)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    for extension in says:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


@pytest.mark.parametrize(
    "make",
    [
        lambda: request_of(key=rsa.generate_private_key(65537, 2048)),
        lambda: request_of(key=ec.generate_private_key(ec.SECP521R1())),
        lambda: request_of(key=ec.generate_private_key(ec.SECP256K1())),
        lambda: request_of(names=((NameOID.COMMON_NAME, "cam-8"),)),
        lambda: request_of(names=((NameOID.ORGANIZATION_NAME, "admins"),)),
        lambda: request_of(says=(x509.SubjectAlternativeName([x509.DNSName("broker.site")]),)),
        lambda: request_of(says=(x509.BasicConstraints(ca=True, path_length=None),)),
        lambda: request_of(says=(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"x" * 9000),)),
    ],
    ids=["rsa", "p521", "k1", "two-names", "organisation", "server-name", "authority", "unknown"],
)
def test_a_request_that_asks_for_more_than_a_devices_certificate_is_refused(
    site: Site, make: Callable[[], str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"the signing request (asks for more|has a key of another kind|is not signed)"
    ):
        site.authority.enrol(Enrol(site.token().secret, "cam-7", make()))
    assert site.authority.devices() == []


def test_a_certificate_says_nothing_but_what_the_authority_says(site: Site, tmp_path: Path) -> None:
    identity = Identity(tmp_path / "identity")
    enrol(site.url, site.token(), "cam-7", identity)
    found = identity.certificate()
    assert found.subject.rfc4514_string() == "CN=cam-7"
    assert {type(each.value) for each in found.extensions} == {
        x509.BasicConstraints, x509.ExtendedKeyUsage, x509.AuthorityKeyIdentifier, x509.SubjectKeyIdentifier,
    }  # fmt: skip


# ---- who keeps the server busy --------------------------------------------------------------------------------------


def test_slow_peers_on_every_place_do_not_stop_a_device_from_enrolling(site: Site, tmp_path: Path) -> None:
    tls = ssl.create_default_context(cafile=site.folder.certificate)
    server = AuthorityServer(site.authority, "127.0.0.1", 0, bounds=BOUNDS._replace(connections=3, spared_s=0.0))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with ExitStack() as stack:
            for says in (
                b"",
                b"\x16\x03\x01",
                b"GET / HTTP/1.1\r\n",
                b"POST /enrol HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
            ):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), ANSWER_S))
                if len(says) > 3:
                    peer = stack.enter_context(tls.wrap_socket(peer, server_hostname="127.0.0.1"))
                peer.sendall(says)
            enrol(f"https://127.0.0.1:{server.port}", site.token(), "cam-7", Identity(tmp_path / "identity"))
    finally:
        server.stop()
        thread.join()
        server.server_close()
    assert len(site.authority.devices()) == 1


def test_a_connection_is_answered_once(site: Site) -> None:
    tls = ssl.create_default_context(cafile=site.folder.certificate)
    plain = socket.create_connection(("127.0.0.1", site.server.port), ANSWER_S)
    with tls.wrap_socket(plain, server_hostname="127.0.0.1", suppress_ragged_eofs=True) as peer:
        peer.sendall(b"GET /ca HTTP/1.1\r\n\r\n" * 3)
        said = b""
        while data := peer.recv(65536):
            said += data
    assert said.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close" in said


# ---- renewals that cannot be, or hang -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "left_s", "wait_s"),
    [
        (0, 1e7, 3600),
        (1, 1e7, 3600),
        (2, 1e7, 7200),
        (5, 1e7, 57_600),
        (6, 1e7, 86_400),
        (10**6, 1e9, 86_400),
        (10, 160_000, 10_000),
        (10, 100, 3600),
        (10, 0, 3600),
    ],
)
def test_a_renewal_waits_twice_as_long_after_each_failure_within_bounds(
    failures: int, left_s: float, wait_s: float
) -> None:
    assert retry_wait_s(3600.0, failures, left_s) == wait_s


class Clocks:
    """A device's two clocks."""

    def __init__(self) -> None:
        self.monotonic = FakeClock()
        self.now_utc = datetime.now(timezone.utc)

    def pass_by(self, seconds: float) -> None:
        self.monotonic.advance(seconds)
        self.now_utc += timedelta(seconds=seconds)


def renewing(site: Site, identity: Identity, clocks: Clocks) -> EnrolmentDoor:
    settings = EnrolmentSettings(site.url, str(identity.folder))
    return EnrolmentDoor(settings, clocks.monotonic, now_utc=lambda: clocks.now_utc)


def test_a_device_whose_clock_is_ahead_renews_no_more_often_than_after_a_failure(site: Site, tmp_path: Path) -> None:
    identity, clocks = Identity(tmp_path / "identity"), Clocks()
    enrol(site.url, site.token(), "cam-7", identity)
    clocks.now_utc += timedelta(days=400)
    door = renewing(site, identity, clocks)
    for _ in range(5):
        door.look()
    assert door.status()["enrolment"]["renewals"] == 1
    assert "set the clock" in door.status()["enrolment"]["reason"]
    assert door.wait_s() > 2000
    clocks.pass_by(4500)
    door.look()
    assert door.status()["enrolment"]["renewals"] == 2
    clocks.now_utc -= timedelta(days=400)
    clocks.pass_by(10_000)
    assert door.wait_s() > 0
    door.close()


def test_a_device_whose_clock_is_behind_keeps_its_certificate_and_looks_again_soon(site: Site, tmp_path: Path) -> None:
    identity, clocks = Identity(tmp_path / "identity"), Clocks()
    enrol(site.url, site.token(), "cam-7", identity)
    clocks.now_utc -= timedelta(days=9000)
    door = renewing(site, identity, clocks)
    door.look()
    assert (door.wait_s(), door.status()["enrolment"]["renewals"]) == (3600.0, 0)
    door.close()


def test_a_device_asks_an_authority_that_refuses_it_less_and_less_often(site: Site, tmp_path: Path) -> None:
    identity, clocks = Identity(tmp_path / "identity"), Clocks()
    enrol(site.url, site.token(), "cam-7", identity)
    site.authority.revoke("cam-7")
    clocks.now_utc += timedelta(days=62)
    door = renewing(site, identity, clocks)
    waits = []
    for _ in range(4):
        clocks.pass_by(door.wait_s())
        door.look()
        while (wait_s := door.wait_s()) == 3600.0:
            clocks.pass_by(wait_s)
        waits.append(round(clocks.monotonic.monotonic_s() + wait_s))
        clocks.pass_by(wait_s)
    pauses = [after - before for before, after in itertools.pairwise(waits)]
    assert all(pause >= least for pause, least in zip(pauses, (5760, 11520, 23040), strict=True))
    assert "shut out" in door.status()["enrolment"]["reason"]
    door.close()


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x03\x40\x00\x02"], ids=["silence", "half-a-handshake"])
def test_a_door_closes_though_its_authority_hangs(site: Site, tmp_path: Path, says: bytes) -> None:
    identity, clocks = Identity(tmp_path / "identity"), Clocks()
    enrol(site.url, site.token(), "cam-7", identity)
    clocks.now_utc += timedelta(days=80)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        settings = EnrolmentSettings(url, str(identity.folder))
        door = EnrolmentDoor(settings, clocks.monotonic, now_utc=lambda: clocks.now_utc)
        door.start()
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(3)[:1] == b"\x16"
            peer.sendall(says)
            door.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-enrolment"]


def test_an_answer_that_drips_ends_with_its_question(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, seconds = Identity(tmp_path / "identity"), itertools.count()
    enrol(site.url, site.token(), "cam-7", identity)
    monkeypatch.setattr("edge_runtime.enrolment.device.time.monotonic", lambda: float(next(seconds)))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(site.folder.server, site.folder.server_key)

    def drip(listener: socket.socket) -> None:
        with suppress(OSError), tls.wrap_socket(listener.accept()[0], server_side=True) as peer:
            peer.recv(65536)
            while True:
                peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(DownloadError, match="no whole answer within 30 s"):
            renew(f"https://127.0.0.1:{listener.getsockname()[1]}", identity)
        thread.join()
