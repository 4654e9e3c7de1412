"""The command line as an outsider runs it: a process of its own, 0 for success and exactly 1 for each failure."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from shutil import which

import pytest

from edge_runtime.updates.store import MetadataStore
from tests.fakes.http_server import Answer, HttpServer
from tests.fakes.tuf_device import CHILD_LIMIT_S, Device, Site, new_device
from tests.fakes.tuf_repository import NOW, TufRepository, serve


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    repository = TufRepository()
    repository.delegate("targets", "team", ["team/*"])
    repository.add_target("team/model", b"content", "team")
    repository.add_target("file", b"more")
    repository.publish_all()
    with serve(repository) as server:
        yield Site(repository, server, new_device(tmp_path, server, repository, as_child=True))


def command(*words: str, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, sys.executable, "-m", "edge_runtime.updates.tuf_cli", *words],
        timeout=CHILD_LIMIT_S,
        check=False,
        capture_output=True,
        text=True,
    )


def test_init_refresh_and_download_succeed_one_after_another(site: Site) -> None:
    assert site.device.refresh() == 0
    assert site.device.download("team/model", "file") == 0
    assert site.device.artifacts == [b"more", b"content"]
    assert site.device.trusted == {"root": 1, "snapshot": 2, "targets": 2, "timestamp": 2, "team": 1}
    site.asked()
    assert site.device.download("team/model", "file") == 0
    assert site.asked() == ["2.root.json", "timestamp.json"]


def test_each_failure_exits_with_1_and_says_why(site: Site) -> None:
    url, folder = site.server.url, str(site.device.metadata_dir)
    base = ["--metadata-url", f"{url}metadata", "--metadata-dir", folder]
    target = ["--target-dir", str(site.device.target_dir), "--target-base-url", f"{url}targets"]
    for words, reason in {
        (*base, "--target-name", "nowhere", *target, "download"): "no role that may speak of it names it",
        (*base, *target, "download"): "download also needs --target-name",
        ("--metadata-dir", folder, "refresh"): "refresh also needs --metadata-url",
        ("--metadata-dir", folder, "init", "/no/such/file"): "No such file",
        ("refresh",): "--metadata-dir",
        ("--metadata-dir", folder, "conquer"): "invalid choice",
        (): "--metadata-dir",
        ("--metadata-url", "http://192.0.2.1/", "--metadata-dir", folder, "refresh"): "wanted https",
        ("--metadata-url", "ftp://127.0.0.1/", "--metadata-dir", folder, "refresh"): "wanted https",
        ("--metadata-url", "http://127.0.0.1:1/", "--metadata-dir", folder, "refresh"): "refused",
    }.items():
        done = command(*words)
        assert (done.returncode, reason in done.stderr) == (1, True), (words, done.stderr)
        assert "Traceback" not in done.stderr


def test_addresses_may_end_in_a_slash_or_not(site: Site) -> None:
    base = ["--metadata-url", f"{site.server.url}metadata", "--metadata-dir", str(site.device.metadata_dir)]
    assert command(*base, "refresh").returncode == 0
    target = ["--target-dir", str(site.device.target_dir), "--target-base-url", f"{site.server.url}targets"]
    assert command(*base, "--target-name", "file", *target, "download").returncode == 0
    assert not any("//" in path for path in site.server.paths)


def test_a_folder_serves_as_well_as_a_server(site: Site, tmp_path: Path) -> None:
    stick = tmp_path / "stick"
    for name in ["timestamp.json", "2.snapshot.json", "2.targets.json", "1.team.json"]:
        data = site.repository.find(f"metadata/{name}")
        assert data is not None
        (stick / "metadata").mkdir(parents=True, exist_ok=True)
        (stick / "metadata" / name).write_bytes(data)
    digest = site.repository.targets("team").targets["team/model"].hashes["sha256"]
    (stick / "targets" / "team").mkdir(parents=True)
    (stick / "targets" / "team" / f"{digest}.model").write_bytes(b"content")
    done = command(
        "--metadata-url", str(stick / "metadata"), "--metadata-dir", str(site.device.metadata_dir),
        "--target-name", "team/model", "--target-dir", str(site.device.target_dir),
        "--target-base-url", str(stick / "targets"), "download",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert site.device.artifacts == [b"content"]
    assert site.asked() == []


def test_a_download_that_is_killed_leaves_no_artifact_and_the_next_goes_on_with_it(site: Site) -> None:
    data = bytes(1_000_000)
    site.repository.add_target("large", data)
    site.repository.publish_all()
    killed = threading.Event()

    def half() -> Iterator[bytes]:
        yield data[:400_000]
        killed.wait(CHILD_LIMIT_S)

    site.server.answer = lambda request: Answer(200, half()) if request.path.startswith("targets/") else None
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime.updates.tuf_cli", "--metadata-url", f"{site.server.url}metadata",
         "--metadata-dir", str(site.device.metadata_dir), "--target-name", "large",
         "--target-dir", str(site.device.target_dir), "--target-base-url", f"{site.server.url}targets", "download"]
    )  # fmt: skip
    try:
        part = _await_part(site.device.metadata_dir, 400_000)
    finally:
        child.kill()
        child.wait()
        killed.set()
    assert site.device.artifacts == []
    assert part.stat().st_size == 400_000
    site.server.answer = lambda _request: None
    assert site.device.download("large") == 0
    assert site.server.requests[-1].headers["Range"] == "bytes=400000-"
    assert site.device.artifacts == [data]
    assert not part.exists()


def _await_part(folder: Path, size: int) -> Path:
    """The part of a download, once it has grown to a size. Raises TimeoutError."""
    end_s = time.monotonic() + CHILD_LIMIT_S
    while time.monotonic() < end_s:
        for part in folder.glob("artifacts/parts/*.part"):
            if part.stat().st_size >= size:
                return part
        time.sleep(0.01)
    raise TimeoutError(f"no part of {size} bytes in {folder} after {CHILD_LIMIT_S} s")


def test_two_processes_do_not_use_one_folder_at_a_time(site: Site) -> None:
    with MetadataStore(site.device.metadata_dir).lock():
        assert site.device.refresh() == 1
        assert site.asked() == []
    assert site.device.refresh() == 0


@pytest.mark.skipif(which("faketime") is None, reason="faketime is not installed. Do: sudo apt-get install faketime")
def test_a_clock_that_is_set_to_another_time_is_what_expiry_is_judged_by(site: Site) -> None:
    words = ["--metadata-url", f"{site.server.url}metadata", "--metadata-dir", str(site.device.metadata_dir), "refresh"]
    before, after = (f"{NOW + timedelta(days=days)}" for days in (29, 31))
    assert command(*words, program=("faketime", before)).returncode == 0
    assert command(*words, program=("faketime", after)).returncode == 1


def test_a_device_is_made_where_its_folder_does_not_exist_yet(tmp_path: Path) -> None:
    root = tmp_path / "root.json"
    root.write_bytes(TufRepository().published["root"][0])
    folder = tmp_path / "not" / "yet"
    assert command("--metadata-dir", str(folder), "init", str(root)).returncode == 0
    assert (folder / "root.json").read_bytes() == root.read_bytes()


def test_a_second_init_takes_another_repository(site: Site, tmp_path: Path) -> None:
    assert site.device.refresh() == 0
    other = TufRepository()
    other.rotate("root")
    for role in ("timestamp", "snapshot", "targets"):
        other.rotate(role)
    other.published["root"].clear()
    other.republish("root")
    other.publish_all()
    with HttpServer(other.find) as server:
        (tmp_path / "other").mkdir()
        device = Device(tmp_path / "other", server)
        device.metadata_dir.rmdir()
        site.device.metadata_dir.rename(device.metadata_dir)
        assert device.init(other.published["root"][0]) == 0
        assert device.refresh() == 0
    assert device.trusted["timestamp"] == 2
