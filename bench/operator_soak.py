"""A daemon that serves one good model while models of every operator are dropped in beside it and asked with edge data.

    python -m bench.operator_soak --library onnxruntime --of standard,schema --every 10 --minutes 10

Owns: the daemon, the folder that models come into and go from, and the one that asks the good model all the while. The
bars: the daemon never ends, no request to the good model fails, every request to the others gets one reply.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers import REPOSITORY
from bench.single_operators import add_case_arguments, make_cases
from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.models import onnx_models
from tests.models.single_operators import Case

GOOD = "good"
INPUTS = {"x": np.ones((1, 16), np.float32)}
SETTLE_S = 180.0
"""Until all models of one drop are ready or failed: some kill their host three times, others wait for a limit."""

ASK_MS = 3_000.0

ASKED = (EdgeRuntimeError, ConnectionError, TimeoutError)


class GoodModel(threading.Thread):
    """Asks the good model every few milliseconds, and keeps each failure and the time of each answer."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="good-model")
        self.times_s: list[float] = []
        self.failures: list[str] = []
        self._endpoint = endpoint
        self._over = threading.Event()

    def run(self) -> None:
        with Client(self._endpoint, timeout_ms=10_000) as client:
            while not self._over.wait(0.01):
                started_s = time.perf_counter()
                try:
                    client.infer(GOOD, INPUTS)
                except ASKED as error:
                    self.failures.append(f"{type(error).__name__}: {error}"[:300])
                self.times_s.append(time.perf_counter() - started_s)

    def stop(self) -> None:
        self._over.set()
        self.join()


def soak(
    folder: Path, library: str, isolation: str, cases: Sequence[Case], at_once: int, end_s: float
) -> dict[str, Any]:
    """Run until all cases are through, or the time is over. Returns the figures."""
    models = folder / "models"
    onnx_models.mlp(models / GOOD / "1")
    (folder / "config.toml").write_text(f'isolation = "{isolation}"\n\n[[backends]]\nname = "{library}"\n')
    replies: Counter[str] = Counter()
    states: Counter[str] = Counter()
    done, ended = 0, []
    daemon = start_daemon(folder)
    try:
        endpoint = f"ipc://{folder}/i.sock"
        with Client(endpoint, timeout_ms=ASK_MS) as client:
            wait_ready(client, daemon)
            good = GoodModel(endpoint)
            good.start()
            started_s = time.monotonic()
            try:
                for first in range(0, len(cases), at_once):
                    if time.monotonic() > end_s or daemon.poll() is not None:
                        break
                    some = cases[first : first + at_once]
                    done += _drop(client, models, some, first, replies, states, daemon)
                    print(f"{done} models, {dict(states)}, {dict(replies)}, good: {len(good.times_s)} asked, "
                          f"{len(good.failures)} failed", file=sys.stderr, flush=True)  # fmt: skip
            finally:
                good.stop()
        if daemon.poll() is not None:
            ended.append(daemon.returncode)
        times = np.array(good.times_s)
        return {
            "library": library, "isolation": isolation, "models": done,
            "seconds": round(time.monotonic() - started_s, 1),
            "daemon_ended": ended, "good_requests": len(times), "good_failed": len(good.failures),
            "good_failures": good.failures[:10],
            "good_ms": {str(q): round(float(np.percentile(times, q)) * 1e3, 2) for q in (50, 99, 100)},
            "states": dict(states), "replies": dict(replies),
            "daemon_rss_mib": rss_mib(daemon.pid) if not ended else None,
        }  # fmt: skip
    finally:
        stop_daemon(daemon)


def _drop(
    client: Client, models: Path, some: Sequence[Case], first: int, replies: Counter[str], states: Counter[str],
    daemon: subprocess.Popen[bytes],
) -> int:  # fmt: skip
    """Put some models beside the good one, ask each what its case sends, and take them away again."""
    names = {f"m{first + number}": case for number, case in enumerate(some)}
    for name, case in names.items():
        path = models / f".{name}" / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(case.model)
        (models / f".{name}").rename(models / name)
    listed = _settled(client, set(names), daemon)
    states.update(listed.values())
    for name, case in names.items():
        if listed.get(name) != "ready":
            continue
        for feed in case.feeds:
            try:
                client.infer(name, dict(feed))
                replies["answered"] += 1
            except ASKED as error:
                replies[getattr(error, "code", "no daemon")] += 1
            except (TypeError, ValueError) as error:  # of what the client cannot send
                replies[type(error).__name__] += 1
    for name in names:
        shutil.rmtree(models / name)
    return len(some)


def _settled(client: Client, names: set[str], daemon: subprocess.Popen[bytes]) -> dict[str, str]:
    """Wait until every one of these models is ready or failed, and return their states."""
    end_s = time.monotonic() + SETTLE_S
    found: dict[str, str] = {}
    while time.monotonic() < end_s and daemon.poll() is None:
        try:
            found = {each["name"]: each["state"] for each in client.models() if each["name"] in names}
        except ASKED:
            continue
        if len(found) == len(names) and set(found.values()) <= {"ready", "failed"}:
            return found
        time.sleep(0.2)
    return {name: found.get(name, "not listed") for name in names}


def start_daemon(folder: Path) -> subprocess.Popen[bytes]:
    """Start a daemon whose models, state, socket, configuration and log lie in one folder, which is its home too."""
    command = [
        sys.executable, "-m", "edge_runtime", "serve", "--models", str(folder / "models"),
        "--state", str(folder / "state"), "--zmq", f"ipc://{folder}/i.sock", "--config", str(folder / "config.toml"),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        paths = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "converters")))  # these, not installed ones
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HOME": str(folder), "PYTHONPATH": paths}
        return subprocess.Popen(command, cwd=folder, stderr=log, env=environment)


def stop_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """End it as systemd does; one that does not end within a minute is killed."""
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def wait_ready(client: Client, daemon: subprocess.Popen[bytes]) -> None:
    """Wait until the good model answers. Raises SystemExit."""
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s and daemon.poll() is None:
        try:
            client.infer(GOOD, INPUTS)
        except ASKED:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the daemon does not serve the good model; look into its log")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operator_soak", description=__doc__)
    add_case_arguments(parser)
    parser.add_argument("--isolation", choices=("auto", "always"), default="auto")
    parser.add_argument("--at-once", type=int, default=40, help="models that are there together")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--harmful", type=Path, help="only models that did harm in this report of single_operators")
    arguments = parser.parse_args()
    cases = make_cases(arguments)
    if arguments.harmful:
        names = {each["name"] for each in json.loads(arguments.harmful.read_text())["harm"]}
        cases = [case for case in cases if case.name in names]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        end_s = time.monotonic() + arguments.minutes * 60
        report = soak(Path(folder), arguments.library, arguments.isolation, cases, arguments.at_once, end_s)
        log = Path(folder, "log").read_text(errors="replace").splitlines()
        print("\n".join(log[-5:]), file=sys.stderr)
    print(json.dumps(report, indent=1))
    return 1 if report["daemon_ended"] or report["good_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
