"""What it costs to be seen: the device's page with viewers, the fleet's of 10 000 devices, a scrape of 1 000 models,
and traces for a collector that takes them, or is dead.

A browser is Chromium, driven as the tests of pages do; its other viewers are streams that a thread reads.
"""

from __future__ import annotations

import gzip
import selectors
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from bench import fleet, makers, mqtt_scenarios
from bench.browser import browser, missing, paint
from bench.scenarios import SLICES, Bench
from bench.servers import BenchError, Daemon
from edge_runtime import Client

VIEWERS = 10
IDLE_S = 15.0
"""Three overviews for each viewer."""

MODELS, SCRAPES = 1_000, 10
READ_BYTES = 1 << 16

PROMETHEUS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Accept-Encoding": "gzip"}
"""Headers of its scrapes."""


def page(bench: Bench) -> None:
    """The device's page: its first paint, the CPU of viewers, and the lean path while ten look."""
    model, figures = makers.mlp(), bench.figures
    request, address = bench.request(model), _free_address()
    daemon = Daemon(bench.children, {model.name: (model, "")}, doors=("--http", address))
    daemon.start_and_settle(request)
    for count in (0, 1, VIEWERS):
        with _looking(address, count):
            figures.add(f"page.idle.{count}.cores", _cores(daemon, bench))
    for number in bench.rounds("page", SLICES):
        rates = {}
        for count in (0, VIEWERS)[:: -1 if number % 2 else 1]:
            with _looking(address, count):
                rates[count] = bench.rate(daemon.endpoint, request, 64, 1 / SLICES)
        figures.add("page.rate_ratio", rates[VIEWERS].rate / rates[0].rate)
        figures.add("page.p99_ratio", rates[VIEWERS].p99_ms / rates[0].p99_ms)
    if reason := missing():
        figures.note("page", reason)
    else:
        with browser() as chromium, _looking(address, VIEWERS - 1):
            for _ in bench.rounds("page, painted"):
                first_s, shown_s = paint(chromium, f"http://{address}/#/", "main tbody tr", 1)
                figures.add("page.paint_s", first_s)
                figures.add("page.shown_s", shown_s)
    daemon.stop()


def fleet_page(bench: Bench) -> None:
    """The fleet's page of 10 000 simulated devices, which go on to publish."""
    if reason := mqtt_scenarios.missing():
        bench.figures.note("fleet", reason)
        return
    found = fleet.measure(*((500, 5, 3) if bench.is_quick else (10_000, 5, 20)))
    for name in ("loaded_s", "devices_s", "memory_mib", "cores"):
        bench.figures.add(f"fleet.{name}", found[name])
    bench.figures.add("fleet.change_s", max(found["change_s"]))
    for name in ("paint_s", "listed_s"):
        for value in found.get(name, ()):
            bench.figures.add(f"fleet.{name}", value)
    if reason := missing():
        bench.figures.note("fleet", reason)


def scrape(bench: Bench) -> None:
    """A scrape by Prometheus of a daemon with 1 000 models that are all asked, ten of them asked for in detail."""
    model, figures = makers.mlp(), bench.figures
    count = 50 if bench.is_quick else MODELS
    config = bench.children.folder / "scrape.toml"
    port = int(_free_address().rpartition(":")[2])
    config.write_text(f"calibrate = false\nwatch = false\n[metrics]\nport = {port}\n")
    names = [f"model-{number:03}" for number in range(count)]
    daemon = Daemon(bench.children, dict.fromkeys(names, (model, "")), config=config)
    daemon.start()
    url = f"http://127.0.0.1:{port}/metrics?" + "&".join(f"model={name}" for name in names[-10:])
    with Client(daemon.endpoint) as client:
        client.wait_ready(300.0)
        for _ in range(SCRAPES):
            for name in names:
                client.infer(name, {"x": np.zeros((1, 16), np.float32)}, timeout_ms=60_000)
            began_s, used_s = time.perf_counter(), daemon.cpu_s()
            text = _scraped(url)
            figures.add("scrape.ms", (time.perf_counter() - began_s) * 1e3)
            figures.add("scrape.cpu_ms", (daemon.cpu_s() - used_s) * 1e3)
            figures.add("scrape.series", sum(not line.startswith(b"#") for line in text.splitlines()))
            figures.add("scrape.bytes", len(text))
    daemon.stop()


def tracing(bench: Bench) -> None:
    """The lean path with traces: its rate, and how long requests take one by one beside a collector that is dead.

    Dead ones: a port that nobody listens on, and a socket that accepts and never answers.
    """
    model, figures = makers.mlp(), bench.figures
    request = bench.request(model)
    with ExitStack() as stack:
        taking, silent = (stack.enter_context(_collector(answers=each)) for each in (True, False))
        closed = f"http://{_free_address()}"
        kinds = {
            "off": "",
            "few": _tracing_table(taking, 0.001),
            "all": _tracing_table(taking, 1.0),
            "closed": _tracing_table(closed, 1.0),
            "silent": _tracing_table(silent, 1.0),
        }
        daemons: dict[str, Daemon] = {}
        for kind, table in kinds.items():
            config = bench.children.folder / f"tracing-{kind}.toml"
            config.write_text(f"calibrate = false\n{table}")
            daemons[kind] = Daemon(bench.children, {model.name: (model, "")}, config=config)
            daemons[kind].start_and_settle(request)
        took_ms: dict[str, list[float]] = {kind: [] for kind in ("off", "closed", "silent")}
        for number in bench.rounds("tracing", SLICES):
            order = list(kinds)[:: -1 if number % 2 else 1]
            rates = {each: bench.rate(daemons[each].endpoint, request, 64, 1 / SLICES).rate for each in order}
            for kind in ("few", "all"):
                figures.add(f"tracing.{kind}.rate_ratio", rates[kind] / rates["off"])
            for kind in took_ms:
                took_ms[kind] += _took_ms(daemons[kind], bench.seconds / SLICES)
        for kind, took in took_ms.items():
            figures.add(f"tracing.{kind}.p99_ms", float(np.percentile(took, 99)))
            figures.add(f"tracing.{kind}.most_ms", max(took))
        for kind in ("closed", "silent"):
            added_ms = figures.median(f"tracing.{kind}.p99_ms") - figures.median("tracing.off.p99_ms")
            figures.add(f"tracing.{kind}.added_ms", added_ms)
        for daemon in daemons.values():
            daemon.stop()


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "page": page,
    "fleet": fleet_page,
    "scrape": scrape,
    "tracing": tracing,
}


# ---- private --------------------------------------------------------------------------------------------------------


def _scraped(url: str) -> bytes:
    """The answer to a scrape with what Prometheus asks for."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=PROMETHEUS), timeout=60) as answer:
        return gzip.decompress(answer.read())


def _cores(daemon: Daemon, bench: Bench) -> float:
    """CPU time of the daemon per time, while nothing is asked."""
    began_s, used_s = time.perf_counter(), daemon.cpu_s()
    time.sleep(2.0 if bench.is_quick else IDLE_S)
    return (daemon.cpu_s() - used_s) / (time.perf_counter() - began_s)


def _tracing_table(endpoint: str, rate: float) -> str:
    return f'[tracing]\nendpoint = "{endpoint}"\nrate = {rate}\nmetrics_s = 2.0\nlogs = "info"\n'


def _took_ms(daemon: Daemon, seconds: float) -> list[float]:
    """Milliseconds that each of requests one by one takes, with a pause after each, so that the daemon sleeps."""
    took, x = [], np.zeros((1, 16), np.float32)
    with Client(daemon.endpoint) as client:
        for _ in range(20):
            client.infer("mlp", {"x": x})
        until_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < until_s:
            client.infer("mlp", {"x": x})
            took.append((time.perf_counter() - began_s) * 1e3)
            time.sleep(0.0005)
    return took


@contextmanager
def _collector(*, answers: bool) -> Iterator[str]:
    """The address of a collector that takes all bodies, or accepts connections and never answers."""
    is_over = threading.Event()

    def take(peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            while not is_over.is_set() and stream.readline():
                length = 0
                while line := stream.readline().strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                stream.read(length)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def serve() -> None:
        peers = []
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                break
            peers.append(peer)
            if answers:
                threading.Thread(target=take, args=(peer,), daemon=True).start()
        for peer in peers:
            peer.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "http://{}:{}".format(*server.getsockname())
        finally:
            is_over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


@contextmanager
def _looking(address: str, count: int) -> Iterator[None]:
    """So many viewers' streams are open, and read. Raises BenchError: one was not let in."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(count):
            stream = stack.enter_context(socket.create_connection((host, int(port)), timeout=10.0))
            stream.sendall(f"GET /page/stream HTTP/1.1\r\nhost: {address}\r\n\r\n".encode())
            if b" 200 " not in (head := stream.recv(READ_BYTES)):
                raise BenchError(f"a viewer was not let in: {head[:200]!r}")
            selector.register(stream, selectors.EVENT_READ)
        is_over = threading.Event()

        def read() -> None:
            while count and not is_over.is_set():
                for key, _ in selector.select(0.1):
                    peer: Any = key.fileobj
                    peer.recv(READ_BYTES)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            is_over.set()
            reader.join()
