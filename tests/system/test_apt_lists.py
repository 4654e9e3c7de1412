"""The signed lists of an apt repository, as this machine's apt takes them: good for some days, and then renewed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from tests.device.apt_site import LIMIT_S, AptSite, empty_package, own_keys

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt-get")


@pytest.fixture(scope="module")
def key() -> Iterator[str]:
    with own_keys() as (ours, _):
        yield ours


@pytest.fixture
def site(tmp_path: Path, key: str) -> AptSite:
    """A repository of one package, whose lists are not written yet."""
    site = AptSite(tmp_path / "site", key)
    site.pool.mkdir(parents=True)
    empty_package(site.pool, "edge-runtime", "1.0~bookworm")
    return site


class Apt:
    """The apt of a device, in a folder of its own: `file:` sources alone, and nothing of this machine's."""

    def __init__(self, folder: Path, site: AptSite) -> None:
        for part in ("state/lists/partial", "cache/archives/partial", "etc"):
            (folder / part).mkdir(parents=True)
        (folder / "status").write_text("")
        ring = site.folder / "edge-runtime-archive-keyring.gpg"
        source = folder / "etc/sources.list"
        source.write_text(f"deb [signed-by={ring} arch=amd64] file:{site.folder} {site.suite} main\n")
        options = {
            "Dir::State": folder / "state", "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "/dev/null", "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": "/dev/null", "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null", "APT::Sandbox::User": "root", "APT::Architecture": "amd64",
            "Acquire::Check-Valid-Until": "true", "Acquire::Check-Date": "true",  # apt's defaults
        }  # fmt: skip
        self._words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def update(self) -> str:
        """`apt-get update`; its words, and "failed" at their end where it failed."""
        done = subprocess.run(
            ["apt-get", *self._words, "--error-on=any", "update"],
            capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return f"{done.stdout}{done.stderr}{'' if done.returncode == 0 else 'failed'}"

    def knows(self, package: str) -> bool:
        """Whether its lists have a package."""
        done = subprocess.run(
            ["apt-cache", *self._words, "show", package],
            capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return f"Package: {package}" in done.stdout


def fields(site: AptSite) -> dict[str, str]:
    """The fields of the Release file, which its signature covers."""
    text = (site.folder / "dists" / site.suite / "InRelease").read_text()
    return dict(re.findall(r"^([\w-]+): (.+)$", text, re.MULTILINE))


def test_lists_are_good_for_thirty_days_from_when_they_were_signed(site: AptSite) -> None:
    now_utc = datetime(2026, 11, 27, 12, 0, 0, tzinfo=timezone.utc)
    site.publish(now_utc=now_utc)
    found = fields(site)
    assert parsedate_to_datetime(found["Date"]) == now_utc
    assert parsedate_to_datetime(found["Valid-Until"]) == now_utc + timedelta(days=30)
    assert (found["Architectures"], found["Components"]) == ("amd64", "main")


def test_lists_that_are_replayed_after_their_end_are_refused_and_renewed_ones_are_taken(
    site: AptSite, tmp_path: Path
) -> None:
    from deploy.apt.repository import renew

    now_utc = datetime.now(timezone.utc)
    site.publish(phase=10, now_utc=now_utc - timedelta(days=31))
    apt = Apt(tmp_path / "apt", site)
    said = apt.update()
    assert "expired" in said
    assert said.endswith("failed")
    assert not apt.knows("edge-runtime")
    index = site.folder / "dists" / site.suite / "main/binary-amd64/Packages"
    before = index.read_bytes()
    renew(site.repository, site.suite, now_utc=now_utc)
    assert index.read_bytes() == before, "who is in the phase stays so"
    assert not apt.update().endswith("failed")
    assert apt.knows("edge-runtime")


def test_lists_without_an_end_are_written_where_that_is_asked_for(site: AptSite) -> None:
    from deploy.apt.repository import renew

    site.publish()
    renew(site.repository, site.suite, days=0)
    assert "Valid-Until" not in fields(site)


def test_a_renewal_of_what_was_never_published_says_so(site: AptSite) -> None:
    from deploy.apt.repository import renew

    with pytest.raises(ValueError, match="has no packages yet; run it without RENEW=1"):
        renew(site.repository, site.suite)
