"""How soon a device answers that has releases: after a start, and after a release took the whole daemon down."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bench import footprint
from bench.following import MODEL, ROW_SHAPE, adder_request, following, install, served, unsigned
from bench.scenarios import Bench
from bench.servers import START_LIMIT_S, BenchError, Daemon
from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.fakes.update_site import UpdateSite, adder

CRASHES, QUICK_CRASHES = 10, 2
RESTART_S = 0.1
"""systemd's RestartSec where nothing else is said (systemd.service(5))."""

ASK_AGAIN_S = 0.002
INPUTS = {"x": np.zeros((1, *ROW_SHAPE), np.float32)}


def update_idle(bench: Bench) -> None:
    """Cold start and idle memory of a daemon that follows a repository, beside one with the same model in a folder."""
    figures, site, folder = bench.figures, UpdateSite(), bench.children.folder
    made = site.release(adder(folder / "made", 1))
    with served(site) as url:
        first, plain = following(bench, url, site.root), unsigned(bench, made)
        install(first)
        plain.start_and_settle(adder_request(bench))
        for daemon in (first, plain):
            daemon.stop()
        for number in bench.rounds("update_idle"):
            pair = {
                "": following(bench, url, site.root, state=_copy(first.state, folder / f"state-{number}")),
                "plain_": unsigned(bench, made, state=_copy(plain.state, folder / f"plain-{number}")),
            }
            for key, daemon in pair.items():
                started_s = time.perf_counter()
                daemon.start()
                first_answer(daemon, 1)
                figures.add(f"update.idle.{key}start_s", time.perf_counter() - started_s)
                daemon.settle()
                figures.add(f"update.idle.{key}pss_mib", footprint.memory_mib(daemon.pid)[0])
                daemon.stop()


def update_crash(bench: Bench) -> None:
    """The process aborts while it observes a release; its supervisor starts it again; what answers first, and when."""
    site, folder = UpdateSite(), bench.children.folder
    site.release(adder(folder / "made" / "1", 1))
    with served(site) as url:
        first = following(bench, url, site.root)
        install(first)
        first.stop()
        site.release(adder(folder / "made" / "2", 2))
        for number in range(QUICK_CRASHES if bench.is_quick else CRASHES):
            state = _copy(first.state, folder / f"state-{number}")
            daemon = following(bench, url, site.root, state=state, auto=True, window_s=3600.0)
            daemon.start()
            first_answer(daemon, 2)
            crashed_s = time.perf_counter()
            daemon.crash()
            time.sleep(RESTART_S)
            daemon.start()
            if (version := first_answer(daemon)) != 1:
                raise BenchError(f"after the crash version {version} answers, wanted the one before it")
            bench.figures.add("update.crash.back_s", time.perf_counter() - crashed_s)
            daemon.stop()
    longest_s = max(bench.figures.values["update.crash.back_s"])
    bench.figures.note(
        "update_crash", f"the longest of {number + 1} took {longest_s:.2f} s, of which {RESTART_S} s are systemd's"
    )


def first_answer(daemon: Daemon, version: int | None = None) -> int:
    """Ask until somebody answers, or until that version does; the version. Raises BenchError: wrongly, or too late."""
    until_s = time.monotonic() + START_LIMIT_S
    with Client(daemon.endpoint) as client:
        while time.monotonic() < until_s:
            try:
                result = client.infer(MODEL, INPUTS)
            except (ConnectionError, EdgeRuntimeError):
                time.sleep(ASK_AGAIN_S)
                continue
            if float(result["y"][0, 0]) != result.version:
                raise BenchError(f"version {result.version} answers {result['y']}")
            if version in (None, result.version):
                return result.version
    raise BenchError(f"{daemon.endpoint}: no answer of version {version or 'any'} within {START_LIMIT_S:.0f} s")


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"update_idle": update_idle, "update_crash": update_crash}


# ---- private --------------------------------------------------------------------------------------------------------


def _copy(state: Path, to: Path) -> Path:
    return Path(shutil.copytree(state, to, symlinks=True, ignore=shutil.ignore_patterns("*.sock")))
