"""What it costs a device to follow a repository when nothing happens: bytes, requests, CPU and memory of a check."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from bench import footprint
from bench.following import adder_request, apply_updates, following, install, served, unsigned
from bench.scenarios import Bench
from bench.servers import BenchError, Daemon
from edge_runtime.publish.static_server import StaticServer
from edge_runtime.updates.manifest import Assignment, encode_assignments
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.release_series import publish_series
from tests.fakes.releases import sha256
from tests.fakes.update_site import GROUP, UpdateSite, X, adder, onnx_release
from tests.models.onnx_models import add_weights, numpy_helper

CHECKS = 20
OTHER_TEAMS, GROUPS, TEAM_RELEASES = 10, 20, 303
"""Of three files each: 909 targets a team, 10 000 in all, and 32 roles below `targets`."""

CPU_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel's clock numbers (linux/posix-timers.h)."""


def update_check(bench: Bench) -> None:
    """A check that finds nothing new, with what there is to verify ed25519 by: the cryptography package, and Python."""
    series = publish_series(bench.children.folder / "published", "adder", _publishable, 1)
    absent = bench.children.folder / "absent"
    absent.mkdir()
    (absent / "cryptography.py").write_text("raise ImportError('left out by the bench')\n")
    with _web_server(series.eras[0]) as port, FaultProxy(port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/"
        for key, environment in (("update.check", None), ("update.check.pure", {"PYTHONPATH": str(absent)})):
            daemon = following(bench, url, series.root, environment=environment)
            install(daemon)
            _count_checks(bench, key, daemon, proxy)
            daemon.stop()


def update_memory(bench: Bench) -> None:
    """10 000 targets, and a group that is assigned something of every team: each check reads all of their roles."""
    site = UpdateSite()
    site.publish(release := adder(bench.children.folder / "made", 1))
    _crowd(site, Assignment("adder", release.path, release.release.manifest_sha256, 100.0))
    with served(site) as url:
        plain, follower = unsigned(bench, release), following(bench, url, site.root)
        plain.start_and_settle(adder_request(bench))
        install(follower)
        for _ in range(3):
            apply_updates(follower)
        follower.settle()
        plain_peak, peak = _peak_mib(plain.pid), _peak_mib(follower.pid)
        plain_kept, kept = (footprint.memory_mib(daemon.pid)[1] for daemon in (plain, follower))
        follower.stop()
        plain.stop()
    bench.figures.add("update.memory.peak_mib", peak - plain_peak)
    bench.figures.add("update.memory.kept_mib", kept - plain_kept)
    bench.figures.note(
        "update_memory",
        f"RSS in MiB: at most {peak:.0f}, {kept:.0f} after; without [update] {plain_peak:.0f}, {plain_kept:.0f}",
    )


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"update_check": update_check, "update_memory": update_memory}


# ---- private --------------------------------------------------------------------------------------------------------


def _count_checks(bench: Bench, key: str, daemon: Daemon, proxy: FaultProxy) -> None:
    """Requests (each on a connection of its own), bytes and CPU time of checks, one by one."""
    for _ in range(CHECKS):
        connections, down, cpu_s = proxy.connections, proxy.bytes_down, _cpu_time_s(daemon.pid)
        if (outcome := apply_updates(daemon))[0] != "runs":
            raise BenchError(f"nothing is new, and yet: {outcome}")
        bench.figures.add(f"{key}.cpu_ms", (_cpu_time_s(daemon.pid) - cpu_s) * 1e3)
        bench.figures.add(f"{key}.requests", proxy.connections - connections)
        bench.figures.add(f"{key}.bytes", proxy.bytes_down - down)


@contextmanager
def _web_server(folder: Path) -> Iterator[int]:
    """The port of `edge-runtime repo serve`."""
    with StaticServer(folder) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield urlsplit(server.url).port or 0
        finally:
            server.stop()
            thread.join()


def _publishable(folder: Path, number: int) -> None:
    add_weights(folder, numpy_helper.from_array(np.full(2, number, np.float32), "w"))


def _crowd(site: UpdateSite, assignment: Assignment) -> None:
    """Fill a repository, and let the group run the assigned release and one of each team, which fits no device."""
    repository, assignments = site.repository, [assignment]
    _fill(site, "vision")
    for number in range(OTHER_TEAMS):
        team = f"team{number}"
        repository.delegate("targets", f"team-{team}", [f"team/{team}/*/*/*"])
        _fill(site, team)
        assignments.append(_of_tomorrow(site, team))
    for number in range(GROUPS):
        repository.delegate("targets", f"fleet-group{number}", [f"fleet/group{number}/assign.json"])
        repository.add_target(f"fleet/group{number}/assign.json", b"[]", f"fleet-group{number}")
    repository.add_target(f"fleet/{GROUP}/assign.json", encode_assignments(assignments), f"fleet-{GROUP}")
    repository.publish_all()


def _fill(site: UpdateSite, team: str) -> None:
    for counter in range(1, TEAM_RELEASES + 1):
        for name in ("manifest.json", "model.onnx", "golden.bin"):
            path = f"team/{team}/filler/{counter}/{name}"
            site.repository.add_target(path, path.encode(), f"team-{team}")


def _of_tomorrow(site: UpdateSite, team: str) -> Assignment:
    """A release that wants a later runtime: its manifest is read, and no more."""
    made = onnx_release(b"", {"x": X}, {"y": X}, model=team, min_runtime="99.0")
    path, data = (
        made.path.replace("vision", team),
        made.manifest_data.replace(b"team/vision/", f"team/{team}/".encode()),
    )
    site.repository.add_target(path, data, f"team-{team}")
    return Assignment(team, path, sha256(data), 100.0)


def _cpu_time_s(pid: int) -> float:
    """Of all threads of a process, in nanoseconds' steps, where /proc has hundredths of a second."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK)  # clock_getcpuclockid(3)


def _peak_mib(pid: int) -> float:
    """The most memory that a process had since it began (RSS)."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
