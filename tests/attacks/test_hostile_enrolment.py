"""Who stands between a device and its authority, who owns the device's state, and who keeps the authority busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from edge_runtime.enrolment.authority import Authority, AuthorityFolder
from edge_runtime.enrolment.certificates import new_key, signing_request
from edge_runtime.enrolment.device import Identity, enrol, renew
from edge_runtime.enrolment.messages import Enrol, Enrolled
from edge_runtime.errors import ConfigError, DownloadError, Forbidden, TrustError
from tests.contract.enrolment.test_enrolling import Site, serving


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
    assert not identity.folder.exists()


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
    assert not identity.folder.exists()


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
