"""What a model in a host costs and survives: rates beside the best layout and beside the daemon, kills, memory, starts.

The best layout batches as the daemon does: a session called from as many threads as there are cores, with the better of
one row and the daemon's own number of rows a run, and no server around it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import zmq

from bench import footprint, makers
from bench.makers import BenchModel
from bench.scenarios import LAYOUTS, SLICES, Bench, say, start_s
from bench.servers import OK_BYTE, BenchError, Daemon, request_frames

ALWAYS, NEVER = 'isolation = "always"\n', 'isolation = "never"\n'

KILLS, QUICK_KILLS = 100, 5
BETWEEN_KILLS_S = 0.2
IN_FLIGHT = 4
"""Of the killed model: a queue that is worth losing, and short beside the time until it is served again."""


def hosts_rates(bench: Bench) -> None:
    """Models in a host beside the best layout, and beside the same model inside the daemon."""
    figures = bench.figures
    for model in (makers.small5ms(), makers.mobilenetv2(), makers.resnet18()):
        request, key = bench.request(model), f"hosts.{model.name}"
        daemons = {"host": bench.daemon(model, settings=ALWAYS), "inside": bench.daemon(model, settings=NEVER)}
        for daemon in daemons.values():
            daemon.start_and_settle(request)
        rows = daemons["host"].calibrated_rows(model.name)
        for number in bench.rounds(f"hosts, {model.name}"):
            best = max(_best_rate(bench, model, each) for each in {1, rows})
            for in_flight in (1, 16, 64):
                loads = {
                    name: bench.rate(daemons[name].endpoint, request, in_flight)
                    for name in sorted(daemons, reverse=bool(number % 2))
                }
                if in_flight > 1:
                    figures.add(f"{key}.{in_flight}.ratio", loads["host"].rate / best)
                    figures.add(f"{key}.{in_flight}.inside_ratio", loads["host"].rate / loads["inside"].rate)
                else:
                    one, every = (bench.raw(model, layout).p50_ms for layout in ("one", "all-quiet"))
                    raw_ms = every if loads["host"].p50_ms < 0.95 * one else one
                    figures.add(f"{key}.1.p50_ratio", loads["host"].p50_ms / raw_ms)
                    figures.add(f"{key}.1.added_ms", loads["host"].p50_ms - raw_ms)
        figures.note(f"hosts {model.name}", f"batch limit {rows}")
        for daemon in daemons.values():
            daemon.stop()


def hosts_mlp(bench: Bench) -> None:
    """A model that costs nothing, forced into a host, beside the same inline."""
    model, figures = makers.mlp(), bench.figures
    request = bench.request(model)
    hosted, inline = bench.daemon(model, settings=ALWAYS), bench.daemon(model)
    for daemon in (hosted, inline):
        daemon.start_and_settle(request)
    for number in bench.rounds("hosts, mlp", SLICES):
        for in_flight in (1, 64):
            pair = (hosted, inline) if number % 2 else (inline, hosted)
            loads = {daemon: bench.rate(daemon.endpoint, request, in_flight, 1 / SLICES) for daemon in pair}
            figures.add(f"hosts.mlp.{in_flight}.rate", loads[hosted].rate)
            figures.add(f"hosts.mlp.{in_flight}.inline_ratio", loads[hosted].rate / loads[inline].rate)
    for daemon in (hosted, inline):
        daemon.stop()


def hosts_killed(bench: Bench) -> None:
    """A host is killed again and again under load, beside another model in a host of its own."""
    killed, other, figures = makers.mobilenetv2(), makers.small5ms(), bench.figures
    daemon = bench.daemon(killed, other, settings=ALWAYS)
    daemon.start_and_settle(bench.request(killed))
    count = QUICK_KILLS if bench.is_quick else KILLS
    say(f"hosts: {count} kills under load")
    is_over = threading.Event()
    failed = answered = 0

    def ask_other() -> None:
        nonlocal failed, answered
        while not is_over.is_set():
            load = bench.generator.closed(daemon.endpoint, bench.request(other), 4, 2.0, warm_s=0.0)
            failed += load.refused + load.lost + load.stray
            answered += load.answered

    beside = threading.Thread(target=ask_other)
    beside.start()
    try:
        with _KeptInFlight(daemon.endpoint, bench.request(killed), IN_FLIGHT) as load:
            for _ in range(count):
                load.keep_for(BETWEEN_KILLS_S)
                os.kill(_host_pid(daemon, killed.name), signal.SIGKILL)
                figures.add("hosts.killed.back_s", load.wait_for_answer())
            load.finish()
    finally:
        is_over.set()
        beside.join()
    figures.add("hosts.killed.worst_s", max(figures.values["hosts.killed.back_s"]))
    figures.add("hosts.killed.lost", load.lost)
    figures.add("hosts.killed.failed", load.failed)
    figures.add("hosts.killed.others_failed", failed)
    figures.note("hosts_killed", f"{count} kills; {load.answered} answered, {answered} of the other model; {load.said}")
    daemon.stop()


def hosts_memory(bench: Bench) -> None:
    """What a host takes for a model of 10 KB, and the daemon with all its children."""
    model, figures = makers.mlp(), bench.figures
    for backend in ("onnxruntime", "openvino"):
        daemon = bench.daemon(model, settings=f'{ALWAYS}backend = "{backend}"\n')
        try:
            daemon.start_and_settle(bench.request(model))
        except BenchError as error:
            figures.note("hosts_memory", f"{backend} not measured: {error}")
            daemon.stop()
            continue
        time.sleep(_PARENT_LEAVES_S)
        pid = _host_pid(daemon, model.name)
        figures.add(f"hosts.memory.{backend}.private_mib", footprint.private_mib(pid))
        figures.add(f"hosts.memory.{backend}.pss_mib", footprint.memory_mib(daemon.pid)[0])
        daemon.stop()
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    time.sleep(_PARENT_LEAVES_S)
    figures.add("hosts.memory.idle_pss_mib", footprint.memory_mib(daemon.pid)[0])
    figures.add("hosts.memory.idle_children", len(psutil.Process(daemon.pid).children(recursive=True)))
    daemon.stop()


def hosts_shared(bench: Bench) -> None:
    """A hundred quiet models in hosts: the time until all are ready, memory, processes; and once more each alone."""
    model, figures = makers.hosted_mlp(), bench.figures
    for key, settings in (("shared", ""), ("alone", ALWAYS)):
        models = {f"quiet{number}": (model, settings) for number in range(_QUIET)}
        daemon = Daemon(bench.children, models)
        begin_s = time.perf_counter()
        daemon.start()
        _wait_for_ready(daemon, _QUIET)
        figures.add(f"hosts.{key}.ready_s", time.perf_counter() - begin_s)
        daemon.settle()
        children = psutil.Process(daemon.pid).children(recursive=True)
        figures.add(f"hosts.{key}.pss_mib", footprint.memory_mib(daemon.pid)[0])
        figures.add(f"hosts.{key}.processes", 1 + len(children))
        daemon.stop()


def hosts_cold(bench: Bench) -> None:
    """From starting the process to the first answer of a model in a host."""
    for _ in bench.rounds("hosts, cold"):
        for model in (makers.mlp(), makers.mobilenetv2()):
            daemon = bench.daemon(model, settings=ALWAYS)
            bench.figures.add(f"hosts.cold.{model.name}_s", start_s(daemon, bench.request(model)))


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "hosts_rates": hosts_rates,
    "hosts_mlp": hosts_mlp,
    "hosts_killed": hosts_killed,
    "hosts_memory": hosts_memory,
    "hosts_shared": hosts_shared,
    "hosts_cold": hosts_cold,
}


# ---- private --------------------------------------------------------------------------------------------------------

_QUIET = 100

_PARENT_LEAVES_S = 13.0
"""After this the process that prepares hosts has ended where there are none."""


def _best_rate(bench: Bench, model: BenchModel, rows: int) -> float:
    return max(bench.raw(model, layout, rows=rows).rows_per_s for layout in LAYOUTS if layout != "one")


def _host_pid(daemon: Daemon, model: str) -> int:
    limit_s = time.monotonic() + 10.0
    while time.monotonic() < limit_s:
        for entry in daemon.control("models"):
            if entry["name"] == model and entry["host"] is not None and entry["host"]["pid"]:
                return int(entry["host"]["pid"])
    raise BenchError(f"{model} has no host")


def _wait_for_ready(daemon: Daemon, count: int) -> None:
    """Wait until so many versions are ready."""
    limit_s = time.monotonic() + 120.0
    while time.monotonic() < limit_s:
        with contextlib.suppress(BenchError):  # its endpoint is not there yet
            if sum(entry["state"] == "ready" for entry in daemon.control("models")) == count:
                return
        time.sleep(0.02)
    raise BenchError(f"{count} models were not ready within 120 s")


class _KeptInFlight:
    """Keeps some requests in flight, each with an id of its own, and counts what comes of them."""

    def __init__(self, endpoint: str, request: Path, in_flight: int) -> None:
        self.answered = self.failed = self.lost = 0
        self.said = ""
        self._header, _, *self._tensors = request_frames(request)
        self._in_flight = in_flight
        self._out: set[bytes] = set()
        self._last = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def __enter__(self) -> _KeptInFlight:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def keep_for(self, seconds: float) -> None:
        """Send and receive for a while."""
        until_s = time.perf_counter() + seconds
        while (left_s := until_s - time.perf_counter()) > 0:
            self._send()
            self._receive(left_s)

    def wait_for_answer(self) -> float:
        """Seconds until the next answer, of those that had not come by now."""
        while self._receive(0.0):
            pass
        begin_s = time.perf_counter()
        self._send()
        answered = self.answered
        while self.answered == answered:
            if not self._receive(30.0):
                raise BenchError("no answer within 30 s of a host's end")
        return time.perf_counter() - begin_s

    def finish(self) -> None:
        """Wait for what is out; the rest is lost."""
        while self._out and self._receive(10.0):
            pass
        self.lost = len(self._out)

    def _send(self) -> None:
        while len(self._out) < self._in_flight:
            self._last += 1
            number = self._last.to_bytes(8, "little")
            self._out.add(number)
            self._socket.send_multipart([self._header, number, *self._tensors])

    def _receive(self, wait_s: float) -> bool:
        if not self._socket.poll(int(wait_s * 1e3)):
            return False
        header, number, *_ = self._socket.recv_multipart()
        self._out.discard(number)
        if header[0] == OK_BYTE:
            self.answered += 1
        else:
            self.failed += 1
            self.said = header.decode(errors="replace")
        return True
