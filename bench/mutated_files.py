"""A daemon that serves one good model while mutated files of every kind are dropped in beside it.

    python -m bench.mutated_files --each 2000 --minutes 60
    python -m bench.mutated_files --kinds tflite,saved_model --each 100

Owns: the daemon, what is dropped in, and the bars: the daemon never ends, the good model answers all the while, each
file ends with a state and, unless it is served, a reason; nothing but the daemon's state is written, and no host stays.
What is served is asked once with zeros. tests/system/test_mutated_files.py runs a small share of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.operator_soak import ASKED, GOOD, GoodModel, rss_mib, start_daemon, stop_daemon, wait_ready
from edge_runtime import Client
from edge_runtime.tensors import DATATYPES
from tests.models import onnx_models
from tests.models.mutated_files import FOLDERS, MISSING, REAL, TEXTS, mutate, write_real

SETTLE_S = 600.0
"""Until every file of one drop has a state: a conversion may take minutes, and they run one at a time."""

STILL_S = 3.0
"""A list of models that stays the same for so long, with nothing loading, says all that it will."""

END_S = 30.0
"""Until the last host and its prepared parent are gone: an idle parent stays ten seconds."""

ASK_MS = 30_000.0
"""For the harness itself, which may run beside other work at the lowest priority."""

SETTLED = frozenset(("ready", "failed", "not_served"))


class Drops:
    """A running daemon, and what became of the files that were dropped in. Thread: one."""

    def __init__(self, folder: Path, daemon: subprocess.Popen[bytes], client: Client) -> None:
        self.states: dict[str, Counter[str]] = {}
        self.replies: Counter[str] = Counter()
        self.faults: list[str] = []
        self._folder = folder
        self._daemon = daemon
        self._client = client
        self._before = self._outside()

    def drop(self, models: Sequence[tuple[str, int]], real: Path) -> None:
        """Put mutations in, wait until each has its state, ask those that serve, and take all away again.

        models: kind and seed of each.
        """
        root = self._folder / "models"
        names = {f"{kind}-{seed}": kind for kind, seed in models}
        for (kind, seed), name in zip(models, names, strict=True):
            hidden = root / f".{name}"
            shutil.copytree(real / kind, hidden if kind in TEXTS else hidden / "1")
            mutate(hidden if kind in TEXTS else hidden / "1", seed, TEXTS.get(kind))
        kept = {name: _stamps(root / f".{name}") for name in names}
        for name in names:
            (root / f".{name}").rename(root / name)
        told = self._settled(set(names))
        for name, kind in names.items():
            entry = told.get(name, {})
            state = str(entry.get("state", "not listed"))
            self.states.setdefault(kind, Counter())[state] += 1
            if state not in SETTLED:
                self.faults.append(f"{name}: {state} {entry.get('reason', '')}"[:300])
            elif state != "ready" and not entry.get("reason"):
                self.faults.append(f"{name}: {state} without a reason")
            elif state == "ready":
                self._ask(name)
            if _stamps(root / name) != kept[name]:
                self.faults.append(f"{name}: its files were written to")
        if (now := self._outside()) != self._before:
            self.faults.append(f"written outside: {sorted(now ^ self._before)[:5]}")
            self._before = now
        for name in names:
            shutil.rmtree(root / name)

    def check_hosts_are_gone(self) -> None:
        """Hold that no host outlives what it served."""
        end_s = time.monotonic() + END_S
        while children := psutil.Process(self._daemon.pid).children(recursive=True):
            if time.monotonic() > end_s:
                self.faults.append(f"{len(children)} processes stay: {[each.cmdline()[-3:] for each in children][:3]}")
                return
            time.sleep(0.1)

    def _ask(self, name: str) -> None:
        try:
            described = self._client.metadata(name)
            inputs = {
                each["name"]: np.zeros([abs(size) for size in each["shape"]], DATATYPES[each["datatype"]].dtype)
                for each in described["inputs"]
            }
            self._client.infer(name, inputs)
            self.replies["answered"] += 1
        except ASKED as error:
            self.replies[getattr(error, "code", "no daemon")] += 1
        except (TypeError, ValueError, MemoryError) as error:  # of what the client cannot send
            self.replies[type(error).__name__] += 1

    def _settled(self, names: set[str]) -> dict[str, dict[str, Any]]:
        end_s = time.monotonic() + SETTLE_S
        found: dict[str, dict[str, Any]] = {}
        still_since_s, last = time.monotonic(), ""
        while time.monotonic() < end_s and self._daemon.poll() is None:
            try:
                found = {each["name"]: dict(each) for each in self._client.models() if each["name"] in names}
            except ASKED:
                continue
            if any(str(each.get("reason")).startswith("was found just now") for each in found.values()):
                time.sleep(0.1)  # not looked at yet
                continue
            states = {each["state"] for each in found.values()}
            if len(found) == len(names) and states <= SETTLED:
                return found
            text = json.dumps(sorted((name, each["state"], each.get("reason")) for name, each in found.items()))
            if text != last:
                still_since_s, last = time.monotonic(), text
            if found and states <= SETTLED and time.monotonic() - still_since_s > STILL_S:
                return found
            time.sleep(0.1)
        return found

    def _outside(self) -> frozenset[str]:
        """All that lies in the daemon's folder beside the models and its state."""
        own = (self._folder / "models", self._folder / "state")
        paths = (path for path in self._folder.rglob("*") if not any(path.is_relative_to(each) for each in own))
        return frozenset(map(str, paths))


def soak(folder: Path, kinds: Sequence[str], each: int, at_once: int, end_s: float, first: int = 0) -> dict[str, Any]:
    """Run until every kind had its mutations, or the time is over. Returns the figures; `faults` must be empty."""
    models, real = folder / "models", folder.with_name(folder.name + "-real")
    onnx_models.mlp(models / GOOD / "1")
    for kind in kinds:
        write_real(kind, real / kind)
    (folder / "config.toml").write_text("calibrate = false\n")
    daemon = start_daemon(folder)
    started_s = time.monotonic()
    try:
        endpoint = f"ipc://{folder}/i.sock"
        with Client(endpoint, timeout_ms=ASK_MS) as client:
            wait_ready(client, daemon)
            good = GoodModel(endpoint)
            good.start()
            drops = Drops(folder, daemon, client)
            try:
                # A share of each kind in turn, so that a run that is cut short has seen them all.
                todo = [(kind, seed) for seed in range(first, first + each) for kind in kinds]
                for begin in range(0, len(todo), at_once):
                    if time.monotonic() > end_s or daemon.poll() is not None:
                        break
                    drops.drop(todo[begin : begin + at_once], real)
                    print(f"{begin + at_once} of {len(todo)}, {len(drops.faults)} faults, good: {len(good.times_s)} "
                          f"asked, {len(good.failures)} failed", file=sys.stderr, flush=True)  # fmt: skip
            finally:
                good.stop()
            if daemon.poll() is None:
                drops.check_hosts_are_gone()
        times = np.array(good.times_s)
        return {
            "seconds": round(time.monotonic() - started_s, 1),
            "left_out": {kind: f"needs {module}" for kind, module in MISSING.items()},
            "daemon_ended": daemon.poll(),
            "good_requests": len(times), "good_failed": len(good.failures), "good_failures": good.failures[:10],
            "good_ms": {str(q): round(float(np.percentile(times, q)) * 1e3, 2) for q in (50, 99, 100)},
            "states": {kind: dict(states) for kind, states in drops.states.items()},
            "replies": dict(drops.replies),
            "faults": drops.faults[:50], "fault_count": len(drops.faults),
            "daemon_rss_mib": rss_mib(daemon.pid) if daemon.poll() is None else None,
        }  # fmt: skip
    finally:
        stop_daemon(daemon)
        shutil.rmtree(real, ignore_errors=True)


def is_good(report: dict[str, Any]) -> bool:
    """Whether a run held every bar."""
    return report["daemon_ended"] is None and not report["good_failed"] and not report["fault_count"]


def _stamps(folder: Path) -> frozenset[tuple[str, int, int]]:
    found = ((path, path.stat()) for path in folder.rglob("*"))
    return frozenset((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns) for path, status in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutated_files", description=__doc__)
    parser.add_argument("--kinds", default=",".join(kind for kind in (*REAL, *FOLDERS) if kind not in MISSING))
    parser.add_argument("--each", type=int, default=2000, help="mutations of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=int, default=48, help="files that are there together")
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        home = Path(folder, "daemon")
        home.mkdir()
        end_s = time.monotonic() + arguments.minutes * 60
        kinds = arguments.kinds.split(",")
        report = soak(home, kinds, arguments.each, arguments.at_once, end_s, arguments.first)
        log = (home / "log").read_text(errors="replace").splitlines()
        print("\n".join(log[-5:]), file=sys.stderr)
    print(json.dumps(report, indent=1))
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main())
