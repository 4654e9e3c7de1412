"""What is measured through the doors of the Open Inference Protocol: HTTP/1.1 and gRPC, beside the libraries' own echo.

As in scenarios.py, rounds are interleaved. An echo answers with the very bytes that the daemon gave. The generator is
native for both (oip_load.c): a client in Python would be the slower end.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import zmq

from bench import footprint, makers
from bench.load import Load
from bench.makers import BenchModel
from bench.oip_load import (
    HERE,
    Door,
    ask_grpc,
    ask_http,
    call_http,
    find_oip_generator,
    write_grpc_request,
    write_http_request,
    write_region_request,
)
from bench.scenarios import IMAGE_DEADLINE_MS, SLICES, Background, Bench, say
from bench.servers import BenchError, Daemon

CPU_CLOCK = 0b010
"""Of a process, all threads: clock_getcpuclockid(3)."""
SPIN_CONFIG = b'[[backends]]\nname = "onnxruntime"\nspin = true\n'
JSON_IN_FLIGHT, JSON_REQUESTS = 64, 20_000
DOORS: tuple[Door, ...] = ("http", "grpc")
WRITERS = {"http": write_http_request, "grpc": write_grpc_request}
ASKERS = {"http": ask_http, "grpc": ask_grpc}
ECHOES = {"http": "http_echo.py", "grpc": "grpc_echo.py"}


def http(bench: Bench) -> None:
    """Binary HTTP, a model that costs nothing: the daemon beside an echo on the same library."""
    _beside_echo(bench, "http")


def grpc(bench: Bench) -> None:
    """The same over gRPC, beside grpcio's own echo."""
    _beside_echo(bench, "grpc")


def oip_images(bench: Bench) -> None:
    """600 KB: one daemon asked over ZeroMQ, HTTP, gRPC, and with the tensor in memory that the client named."""
    model, figures, generator = makers.mobilenetv2(), bench.figures, find_oip_generator()
    with _open_daemon(bench, model, more=("--client-shared-memory",)) as (daemon, addresses):
        requests = {door: _request(bench, door, model) for door in DOORS}
        with _region(bench, addresses["http"], model) as region:
            for number in bench.rounds("oip_images"):
                for in_flight in (16, 64):
                    runs: dict[str, Callable[[], Load]] = {
                        "zmq": partial(bench.rate, daemon.endpoint, bench.request(model), in_flight),
                        **{
                            door: partial(
                                generator.closed, door, addresses[door], requests[door], in_flight, bench.seconds
                            )
                            for door in DOORS
                        },
                    }
                    if region is not None:
                        runs["region"] = partial(
                            generator.closed, "http", addresses["http"], region, in_flight, bench.seconds
                        )
                    loads: dict[str, Load] = {}
                    cpu_s: dict[str, float] = {}
                    for name in sorted(runs, reverse=bool(number % 2)):
                        used_s = daemon.cpu_s()
                        loads[name] = runs[name]()
                        cpu_s[name] = (daemon.cpu_s() - used_s) / max(loads[name].sent, 1)
                    if region is not None:
                        figures.add(f"oip.images.region.{in_flight}.cpu_ratio", cpu_s["region"] / cpu_s["http"])
                    for name, load in loads.items():
                        figures.add(f"oip.images.{name}.{in_flight}.rate", load.rate)
                        figures.add(f"oip.images.{name}.{in_flight}.ratio", load.rate / loads["zmq"].rate)


def oip_overload(bench: Bench) -> None:
    """Twice what each door can serve, 500 ms: answered in time ÷ its own capacity."""
    model, figures, generator = makers.mobilenetv2(), bench.figures, find_oip_generator()
    with _open_daemon(bench, model) as (_, addresses):
        for number in bench.rounds("oip_overload"):
            for door in DOORS:
                address, plain = addresses[door], _request(bench, door, model)
                capacity = max(
                    generator.closed(door, address, plain, in_flight, bench.seconds).rate for in_flight in (16, 64)
                )
                load = generator.open(
                    door,
                    address,
                    _request(bench, door, model, IMAGE_DEADLINE_MS),
                    2 * capacity,
                    bench.overload_seconds,
                    IMAGE_DEADLINE_MS,
                    number,
                )
                figures.add(f"oip.overload.{door}.capacity", capacity)
                figures.add(f"oip.overload.{door}.goodput_ratio", load.goodput / capacity)
                figures.add(f"oip.overload.{door}.lost", load.lost + load.stray)
                figures.add(f"oip.overload.{door}.p99_ms", load.p99_ms)
                figures.add(f"oip.overload.{door}.unsent", load.unsent)
                codes = {code: int(words["count"]) for code, words in load.codes.items()}
                figures.note("oip_overload", f"{door}, round {number + 1}: {load.answered} answered, {codes}")


def spin(bench: Bench) -> None:
    """One request at a time where the configuration says `spin`, beside a session with every core that spins too."""
    model, figures, generator = makers.mobilenetv2(), bench.figures, find_oip_generator()
    config = _kept(bench, "spin.toml", SPIN_CONFIG)
    with _open_daemon(bench, model, more=("--config", str(config))) as (daemon, addresses):
        requests = {door: _request(bench, door, model) for door in DOORS}
        for number in bench.rounds("spin"):
            runs: dict[str, Callable[[], Load]] = {
                "zmq": partial(bench.rate, daemon.endpoint, bench.request(model), 1),
                **{
                    door: partial(generator.closed, door, addresses[door], requests[door], 1, bench.seconds)
                    for door in DOORS
                },
            }
            p50s = {name: runs[name]().p50_ms for name in sorted(runs, reverse=bool(number % 2))}
            raw_ms = bench.raw(model, "all").p50_ms
            for name, p50_ms in p50s.items():
                figures.add(f"spin.{name}.p50_ratio", p50_ms / raw_ms)
                figures.add(f"spin.{name}.added_ms", p50_ms - raw_ms)


def oip_idle(bench: Bench) -> None:
    """ZeroMQ's own figures with both doors open and idle; and what an open door adds to a daemon's memory."""
    model, figures = makers.mlp(), bench.figures
    closed = bench.daemon(model)
    closed.start_and_settle(bench.request(model))
    with _open_daemon(bench, model) as (opened, _):
        targets = {"open": opened.endpoint, "closed": closed.endpoint}
        for number in bench.rounds("oip_idle", SLICES):
            for in_flight in (1, 16, 64):
                order = sorted(targets, reverse=bool(number % 2))
                loads = {name: bench.rate(targets[name], bench.request(model), in_flight, 1 / SLICES) for name in order}
                figures.add(f"oip.idle.{in_flight}.rate_ratio", loads["open"].rate / loads["closed"].rate)
                figures.add(f"oip.idle.{in_flight}.p50_ratio", loads["open"].p50_ms / loads["closed"].p50_ms)
    bare_mib = _pss_of([sys.executable, "-c", "import time; time.sleep(600)"], bench)
    for door in DOORS:
        with _open_daemon(bench, model, (door,)) as (daemon, addresses):
            request = _request(bench, door, model)
            answer = _kept(bench, f"{door}.answer", ASKERS[door](addresses[door], request))
            added_mib = footprint.memory_mib(daemon.pid)[0] - footprint.memory_mib(closed.pid)[0]
        with _echo(bench, door, answer, request) as (_, pid):
            echo_mib = footprint.memory_mib(pid)[0] - bare_mib
        figures.add(f"oip.idle.{door}.added_mib", added_mib)
        figures.add(f"oip.idle.{door}.above_echo_mib", added_mib - echo_mib)
        figures.note("oip_idle", f"{door}: {added_mib:.1f} MiB on a daemon, {echo_mib:.1f} MiB an echo on bare Python")
    closed.stop()


def oip_json(bench: Bench) -> None:
    """JSON requests of 64 floats over ZeroMQ, 64 in flight: the daemon's CPU for each; msgpack's for comparison."""
    model, figures = makers.mlp(), bench.figures
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    values = [round(0.001 * number, 3) for number in range(4 * 16)]
    x = {"name": "x", "datatype": "FP32", "shape": [4, 16], "data": values}
    message = json.dumps({"model": model.name, "inputs": [x]}).encode()
    _ask_json(daemon.endpoint, message, 2_000)
    for _ in bench.rounds("oip_json"):
        began_s = _cpu_s(daemon.pid)
        count = JSON_REQUESTS // 10 if bench.is_quick else JSON_REQUESTS
        _ask_json(daemon.endpoint, message, count)
        figures.add("oip.json.cpu_us", (_cpu_s(daemon.pid) - began_s) / count * 1e6)
        began_s = _cpu_s(daemon.pid)
        load = bench.rate(daemon.endpoint, bench.request(model), 64)
        figures.add("oip.json.frames_cpu_us", (_cpu_s(daemon.pid) - began_s) / load.sent * 1e6)
    daemon.stop()


def oip_flood(bench: Bench) -> None:
    """mlp over ZeroMQ, one at a time, beside mobilenetv2 flooded over HTTP at twice its capacity."""
    flooded, tiny, figures, generator = makers.mobilenetv2(), makers.mlp(), bench.figures, find_oip_generator()
    with _open_daemon(bench, flooded, ("http",), tiny) as (daemon, addresses):
        address, plain = addresses["http"], _request(bench, "http", flooded)
        urgent = _request(bench, "http", flooded, IMAGE_DEADLINE_MS)
        for number in bench.rounds("oip_flood"):
            capacity = max(generator.closed("http", address, plain, each, bench.seconds).rate for each in (16, 64))
            seconds = max(bench.seconds, 3.0)
            alone = bench.generator.closed(daemon.endpoint, bench.request(tiny), 1, seconds)
            flood = Background(
                partial(generator.open, "http", address, urgent, 2 * capacity, seconds + 1.0, IMAGE_DEADLINE_MS, number)
            )
            beside = bench.generator.closed(daemon.endpoint, bench.request(tiny), 1, seconds, warm_s=1.5)
            figures.add("oip.flood.goodput_ratio", flood.result().goodput / capacity)
            figures.add("oip.flood.p99_ms", beside.p99_ms)
            figures.add("oip.flood.p99_ratio", beside.p99_ms / alone.p99_ms)
            figures.add("oip.flood.p50_ratio", beside.p50_ms / alone.p50_ms)
            figures.add("oip.flood.failed", beside.refused + beside.lost)


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "http": http,
    "grpc": grpc,
    "oip_images": oip_images,
    "oip_overload": oip_overload,
    "oip_idle": oip_idle,
    "oip_json": oip_json,
    "oip_flood": oip_flood,
    "spin": spin,
}


# ---- private --------------------------------------------------------------------------------------------------------


def _beside_echo(bench: Bench, door: Door) -> None:
    model, figures, generator = makers.mlp(), bench.figures, find_oip_generator()
    request = _request(bench, door, model)
    with _open_daemon(bench, model, (door,)) as (daemon, addresses):
        answer = _kept(bench, f"{door}.answer", ASKERS[door](addresses[door], request))
        with _echo(bench, door, answer, request) as (echo, echo_pid):
            targets = {"ours": (addresses[door], daemon.pid), "echo": (echo, echo_pid)}
            for number in bench.rounds(door, SLICES):
                for in_flight in (1, 16, 64):
                    loads, cpu_us = {}, {}
                    for name in sorted(targets, reverse=bool(number % 2)):
                        address, pid = targets[name]
                        began_s = _cpu_s(pid)
                        seconds = max(0.5, bench.seconds / SLICES)
                        loads[name] = generator.closed(door, address, request, in_flight, seconds)
                        cpu_us[name] = (_cpu_s(pid) - began_s) / loads[name].sent * 1e6
                    key = f"{door}.{in_flight}"
                    figures.add(f"{key}.rate", loads["ours"].rate)
                    figures.add(f"{key}.echo_rate", loads["echo"].rate)
                    figures.add(f"{key}.rate_ratio", loads["ours"].rate / loads["echo"].rate)
                    figures.add(f"{key}.p99_ms", loads["ours"].p99_ms)
                    figures.add(f"{key}.cpu_us", cpu_us["ours"])
                    figures.add(f"{key}.echo_cpu_us", cpu_us["echo"])
                    figures.add(f"{key}.failed", sum(load.refused + load.lost for load in loads.values()))


@contextmanager
def _open_daemon(
    bench: Bench, model: BenchModel, doors: tuple[Door, ...] = DOORS, *others: BenchModel, more: tuple[str, ...] = ()
) -> Iterator[tuple[Daemon, dict[str, str]]]:
    """A daemon with doors open, once it answers over ZeroMQ; and the doors' addresses."""
    addresses = {door: _free_address() for door in doors}
    options = [word for door, address in addresses.items() for word in (f"--{door}", address)]
    served = {each.name: (each, "") for each in (model, *others)}
    daemon = Daemon(bench.children, served, doors=[*options, *more])
    daemon.start_and_settle(bench.request(model))
    try:
        yield daemon, addresses
    finally:
        daemon.stop()


@contextmanager
def _echo(bench: Bench, door: Door, answer: Path, request: Path) -> Iterator[tuple[str, int]]:
    """The address and process of an echo that gives `answer`, once it has done so."""
    address = _free_address()
    child = bench.children.start(
        [sys.executable, str(HERE / ECHOES[door]), address, str(answer)], bench.children.new_name("echo")
    )
    try:
        end_s = time.monotonic() + 30
        while True:
            try:
                ASKERS[door](address, request)
                break
            except (OSError, BenchError):
                if time.monotonic() > end_s or child.poll() is not None:
                    raise
                time.sleep(0.05)
        yield address, child.pid
    finally:
        bench.children.stop(child)


@contextmanager
def _region(bench: Bench, address: str, model: BenchModel) -> Iterator[Path | None]:
    """A request whose tensor lies in a registered region; None where the daemon takes none."""
    name = f"er-bench-{os.getpid()}"
    file = Path("/dev/shm", name)
    nbytes = -(-model.row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    file.write_bytes((b"\x00\x00\x00\x3f" * (model.row_bytes // 4)).ljust(nbytes, b"\0"))
    try:
        call_http(
            address,
            "/v2/systemsharedmemory/region/bench/register",
            {"key": f"/{name}", "offset": 0, "byte_size": nbytes},
        )
        request = write_region_request(bench.children.folder / "region.req", model, "bench")
        ask_http(address, request)
    except BenchError as error:
        bench.figures.note("oip_images", f"memory named by the client was not measured: {error}")
        yield None
    else:
        yield request
    finally:
        file.unlink()


def _request(bench: Bench, door: Door, model: BenchModel, timeout_ms: float | None = None) -> Path:
    name = f"{door}-{model.name}-{timeout_ms or 0:g}.req"
    if name not in bench.requests:
        bench.requests[name] = WRITERS[door](bench.children.folder / name, model, timeout_ms=timeout_ms)
    return bench.requests[name]


def _kept(bench: Bench, name: str, content: bytes) -> Path:
    path = bench.children.folder / name
    path.write_bytes(content)
    return path


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def _cpu_s(pid: int) -> float:
    """CPU of all threads of a process so far, in nanoseconds' steps, where /proc has hundredths of a second."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK)


def _pss_of(command: list[str], bench: Bench) -> float:
    child = bench.children.start(command, bench.children.new_name("bare"))
    time.sleep(1.0)
    found = statistics.median(footprint.memory_mib(child.pid)[0] for _ in range(3))
    bench.children.stop(child)
    return found


def _ask_json(endpoint: str, message: bytes, count: int) -> None:
    """Send a JSON request so often, JSON_IN_FLIGHT at a time. Raises BenchError for a refusal."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as asking:
        asking.set(zmq.LINGER, 0)
        asking.connect(endpoint)
        for _ in range(min(JSON_IN_FLIGHT, count)):
            asking.send(message)
        for number in range(count):
            if not asking.poll(30_000):
                raise BenchError("a JSON request was not answered within 30 s")
            reply = asking.recv_multipart()[-1]
            if b'"error"' in reply:
                raise BenchError(f"refused: {reply[:300]!r}")
            if number + JSON_IN_FLIGHT < count:
                asking.send(message)
    say(f"oip_json: {count} answered")
