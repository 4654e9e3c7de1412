"""What is measured: one function a scenario, each in interleaved rounds against what it is compared with.

A scenario starts its servers once and lets both run: the one that is not asked sleeps and takes nothing, and a warm
server is what a bar is about. Within a round the order alternates, so that a drift of the machine favours neither.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from bench import footprint, makers
from bench.bars import Figures
from bench.load import Generator, Load, SharedRequest, write_request, write_shared_request
from bench.makers import BenchModel
from bench.raw import Layout, RawResult, RawRun
from bench.servers import REPOSITORY, BenchError, Children, ControlConnection, Daemon, Yardstick, answer_time_s

HERE = Path(__file__).parent
BF16_SETTINGS = 'backend = "openvino"\nprecision = "bf16"\nisolation = "always"\n'
INT8_SETTINGS = 'backend = "openvino"\nisolation = "always"\n'
IMAGE_DEADLINE_MS = 500.0
SLICES = 3
"""Of a round, where a run settles at once: a virtual machine's wake-ups take 30 or 100 us by turns of some seconds, and
only targets measured within one such turn compare."""
LAYOUTS: tuple[Layout, ...] = ("all", "all-quiet", "callers", "one")
LEAST_SMALL_DEADLINE_MS = 50.0


@dataclass(slots=True)
class Bench:
    """What every scenario needs: how long, how often, with which generator, and where results go."""

    children: Children
    generator: Generator
    figures: Figures
    bare_loop: Path
    round_count: int = 3
    seconds: float = 3.0
    overload_seconds: float = 10.0
    reload_count: int = 500
    is_quick: bool = False
    before: Path | None = None
    requests: dict[str, Path] = field(default_factory=dict)

    def rounds(self, scenario: str, slices: int = 1) -> Iterator[int]:
        """Round numbers, told on stderr as they begin; each round cut into so many `slices`."""
        count = self.round_count * slices
        for number in range(count):
            say(f"{scenario}: round {number + 1} of {count}")
            yield number

    def request(self, model: BenchModel, timeout_ms: float | None = None) -> Path:
        """The file with one request's frames."""
        name = f"{model.name}-{timeout_ms or 0:g}.req"
        if name not in self.requests:
            self.requests[name] = write_request(self.children.folder / name, model, timeout_ms=timeout_ms)
        return self.requests[name]

    def daemon(
        self,
        *models: BenchModel,
        state: Path | None = None,
        settings: str = "",
        mqtt: str = "",
        checkout: Path = REPOSITORY,
    ) -> Daemon:
        """A daemon that serves `models`, through a broker too where `mqtt` is its URL; not started."""
        served = {model.name: (model, settings) for model in models}
        return Daemon(self.children, served, state=state, mqtt=mqtt, checkout=checkout)

    def bare(self, model: BenchModel, max_rows: int = 32) -> Yardstick:
        """The bare loop on `model`."""
        endpoint = self._endpoint("bare")
        shape = ",".join(str(length) for length in model.row_shape)
        command = [sys.executable, str(self.bare_loop), endpoint, str(model.path), shape, str(max_rows)]
        return Yardstick(self.children, command, endpoint, self.request(model))

    def echo(self, model: BenchModel) -> Yardstick:
        """The echo server for requests of `model`, with replies of the size it would give."""
        endpoint = self._endpoint("echo")
        command = self.generator.echo(endpoint, model.output_elements * 4)
        return Yardstick(self.children, command, endpoint, self.request(model))

    def raw(self, model: BenchModel, layout: Layout, **words: object) -> RawResult:
        """One layout of a backend in a process of its own."""
        run = RawRun(str(model.path), model.row_shape, layout, seconds=self.seconds, **words)  # type: ignore[arg-type]
        found = subprocess.run(
            [sys.executable, str(HERE / "raw.py"), json.dumps(asdict(run))],
            capture_output=True,
            text=True,
            timeout=self.seconds * 4 + 60,
            check=False,
        )
        if found.returncode:
            raise BenchError(f"raw {run.backend} {layout} failed: {found.stderr.strip()[-500:]}")
        return RawResult(**json.loads(found.stdout))

    def rate(self, endpoint: str, request: Path | SharedRequest, in_flight: int, part: float = 1.0) -> Load:
        """A closed loop of a part of `seconds`. Raises BenchError when nothing was answered, twice."""
        seconds = max(0.5, self.seconds * part)
        for span_s in (seconds, 4 * seconds):  # a busy machine can keep a server off its cores for half a second
            load = self.generator.closed(endpoint, request, in_flight, span_s, warm_s=0.3)
            if load.answered:
                return load
        raise BenchError(
            f"{endpoint}: nothing answered with {in_flight} in flight: {dict(load.codes)}, {load.lost} lost"
        )

    def capacity(self, endpoint: str, request: Path) -> float:
        """The best closed-loop rate."""
        return max(self.rate(endpoint, request, in_flight).rate for in_flight in (16, 64))

    def _endpoint(self, stem: str) -> str:
        return f"ipc://{self.children.folder}/{self.children.new_name(stem)}.sock"


def say(sentence: str) -> None:
    """Progress, for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {sentence}", file=sys.stderr, flush=True)


# ---- rates ----------------------------------------------------------------------------------------------------------


def mlp(bench: Bench) -> None:
    """A model that costs nothing: the daemon beside the bare loop, at 1 to 256 in flight."""
    model, figures = makers.mlp(), bench.figures
    request, daemon = bench.request(model), bench.daemon(model)
    depths = (1, 64) if bench.is_quick else (1, 16, 64, 256)
    daemon.start_and_settle(request)
    with bench.bare(model) as bare, bench.echo(model) as echo:
        targets = [("ours", daemon.endpoint), ("bare", bare.endpoint), ("echo", echo.endpoint)]
        for number in bench.rounds("mlp", SLICES):
            # Alone a request costs two wake-ups and little else, so those take the most samples.
            for in_flight in (1, 1, *depths):
                order = targets[::-1] if number % 2 else targets
                loads = {name: bench.rate(endpoint, request, in_flight, 1 / SLICES) for name, endpoint in order}
                ours, yardstick = loads["ours"], loads["bare"]
                figures.add(f"mlp.{in_flight}.rate", ours.rate)
                figures.add(f"mlp.{in_flight}.bare_rate", yardstick.rate)
                figures.add(f"mlp.{in_flight}.p50_ms", ours.p50_ms)
                figures.add(f"mlp.{in_flight}.p99_ms", ours.p99_ms)
                figures.add(f"mlp.{in_flight}.bare_p99_ms", yardstick.p99_ms)
                figures.add(f"mlp.{in_flight}.rate_ratio", ours.rate / yardstick.rate)
                figures.add(f"mlp.{in_flight}.p50_ratio", ours.p50_ms / yardstick.p50_ms)
                figures.add(f"mlp.{in_flight}.p99_ratio", ours.p99_ms / yardstick.p99_ms)
                figures.add(f"generator.{in_flight}.rate", loads["echo"].rate)
    daemon.stop()
    most = max(figures.median(f"generator.{in_flight}.rate") for in_flight in depths)
    figures.add("generator.max", most)
    names = [f"mlp.{in_flight}.{name}" for in_flight in depths for name in ("rate", "bare_rate")]
    figures.add("generator.share", max(figures.median(name) for name in names) / most)
    at = ", ".join(f"{in_flight}: {figures.median(f'generator.{in_flight}.rate'):,.0f}/s" for in_flight in depths)
    figures.note("mlp", f"the generator against its echo, by requests in flight: {at}")


def overload(bench: Bench) -> None:
    """Ten times what it can serve, with no deadline to refuse by: it must go on serving, and be unharmed afterwards."""
    model, figures = makers.mlp(), bench.figures
    request, daemon = bench.request(model), bench.daemon(model)
    daemon.start_and_settle(request)
    for number in bench.rounds("overload"):
        own = bench.rate(daemon.endpoint, request, 256).rate
        before = bench.rate(daemon.endpoint, request, 64).rate
        flood = bench.generator.open(
            daemon.endpoint, request, own * 10, bench.overload_seconds, seed=number, warm_s=0.0
        )
        after = bench.rate(daemon.endpoint, request, 64).rate
        served = flood.answered_in_time_span / bench.overload_seconds
        figures.add("overload.served_ratio", served / own)
        figures.add("overload.lost", flood.lost + flood.stray)
        figures.add("overload.after_ratio", after / before)
        figures.add("overload.refused", flood.refused)
        figures.add("overload.sent_per_s", flood.sent / bench.overload_seconds)
    daemon.stop()
    share = bench.figures.median("overload.sent_per_s")
    figures.note("overload", f"the generator sent {share:,.0f}/s: at most 131 072 are out at once, later arrivals wait")


def small(bench: Bench) -> None:
    """About 5 ms a run, small frames: what scheduling costs when transport costs nothing."""
    model, figures = makers.small5ms(), bench.figures
    request, daemon = bench.request(model), bench.daemon(model)
    daemon.start_and_settle(request)
    for _ in bench.rounds("small"):
        best = _best_layout(bench, model, "small")
        for in_flight in (16, 64):
            load = bench.rate(daemon.endpoint, request, in_flight)
            figures.add(f"small.{in_flight}.rate", load.rate)
            figures.add(f"small.{in_flight}.ratio", load.rate / best)
            figures.add(f"small.{in_flight}.p99_ms", load.p99_ms)
    daemon.stop()


def images(bench: Bench) -> None:
    """600 KB frames, the client on the same cores."""
    figures = bench.figures
    for model in (makers.mobilenetv2(), makers.resnet18()):
        key = f"images.{model.name}"
        request, daemon = bench.request(model), bench.daemon(model)
        daemon.start_and_settle(request)
        for _ in bench.rounds(f"images, {model.name}"):
            best = _best_layout(bench, model, key)
            for in_flight in (16, 64):
                load = bench.rate(daemon.endpoint, request, in_flight)
                figures.add(f"{key}.{in_flight}.rate", load.rate)
                figures.add(f"{key}.{in_flight}.ratio", load.rate / best)
                figures.add(f"{key}.{in_flight}.p99_ms", load.p99_ms)
            single = bench.rate(daemon.endpoint, request, 1)
            one, every = (figures.values[f"{key}.raw.{layout}.p50_ms"][-1] for layout in ("one", "all-quiet"))
            # Faster than one core can be means that it used them all, so that is what it is held against.
            is_wide = single.p50_ms < 0.95 * one
            figures.add(f"{key}.1.p50_ms", single.p50_ms)
            figures.add(f"{key}.1.p50_ratio", single.p50_ms / (every if is_wide else one))
            figures.note(
                "images", f"{model.name}, one at a time: held against {'all cores' if is_wide else 'one core'}"
            )
        daemon.stop()
    _generator_share_with_images(bench)


def shared(bench: Bench) -> None:
    """600 KB to a host, sent in frames, and lying in memory shared with the daemon, by turns."""
    figures = bench.figures
    if not bench.generator.shares_memory:
        figures.note("shared", "not measured: it needs load.c, which needs a C compiler")
        return
    model = makers.mobilenetv2()
    daemon = bench.daemon(model, settings='isolation = "always"\n')  # inside, the daemon must copy such inputs
    requests: dict[str, Path | SharedRequest] = {
        "frames": bench.request(model),
        "shared": write_shared_request(bench.children.folder / f"{model.name}-shared.req", model),
    }
    daemon.start_and_settle(bench.request(model))
    for number in bench.rounds("shared"):
        best = _best_layout(bench, model, "shared")
        for in_flight in (1, 16, 64):
            order = sorted(requests, reverse=bool(number % 2))
            loads = {name: bench.rate(daemon.endpoint, requests[name], in_flight) for name in order}
            for name, load in loads.items():
                figures.add(f"shared.{in_flight}.{name}_rate", load.rate)
                figures.add(f"shared.{in_flight}.{name}_ratio", load.rate / best)
                figures.add(f"shared.{in_flight}.{name}_p50_ms", load.p50_ms)
            figures.add(f"shared.{in_flight}.gain", loads["shared"].rate / loads["frames"].rate)
            figures.add(f"shared.{in_flight}.p50_gain", loads["frames"].p50_ms / loads["shared"].p50_ms)
        _shared_overload(bench, daemon, model, number)
    daemon.stop()


def _shared_overload(bench: Bench, daemon: Daemon, model: BenchModel, seed: int) -> None:
    """2 x capacity, each with a deadline."""
    figures, path = bench.figures, bench.children.folder / f"{model.name}-shared-deadline.req"
    request = write_shared_request(path, model, IMAGE_DEADLINE_MS)
    capacity = max(figures.values["shared.16.shared_rate"][-1], figures.values["shared.64.shared_rate"][-1])
    load = bench.generator.open(
        daemon.endpoint, request, 2 * capacity, bench.overload_seconds, deadline_ms=IMAGE_DEADLINE_MS, seed=seed
    )
    figures.add("shared.overload.goodput_ratio", load.goodput / capacity)
    figures.add("shared.overload.neither", load.lost + load.stray)
    if load.refused_p99_ms is not None:
        figures.add("shared.overload.refused_p99_ms", load.refused_p99_ms)


def bf16(bench: Bench) -> None:
    """OpenVINO in bf16, against the same library in process."""
    figures = bench.figures
    try:
        import openvino  # noqa: F401
    except ImportError:
        figures.note("bf16", "not measured: openvino is not installed")
        return
    for model in (makers.mobilenetv2(), makers.resnet18()):
        key = f"bf16.{model.name}"
        request, daemon = bench.request(model), bench.daemon(model, settings=BF16_SETTINGS)
        placed = write_shared_request(bench.children.folder / f"{model.name}-shared.req", model)
        daemon.start_and_settle(request)
        for _ in bench.rounds(f"bf16, {model.name}"):
            raws = [bench.raw(model, layout, backend="openvino", precision="bf16") for layout in ("all", "callers")]
            best = max(raw.rows_per_s for raw in raws)
            load = bench.rate(daemon.endpoint, request, 16)
            figures.add(f"{key}.raw", best)
            figures.add(f"{key}.rate", load.rate)
            figures.add(f"{key}.ratio", load.rate / best)
            if bench.generator.shares_memory:
                figures.add(f"{key}.shared_ratio", bench.rate(daemon.endpoint, placed, 16).rate / best)
            if raws[0].precision != "bf16":
                figures.note("bf16", f"this CPU runs {raws[0].precision} when asked for bf16")
        daemon.stop()


def int8(bench: Bench) -> None:
    """OpenVINO on an int8 model, in frames and in shared memory, against the same library in process."""
    figures = bench.figures
    try:
        import openvino  # noqa: F401

        model = makers.int8_mobilenetv2()
    except ImportError as missing:
        figures.note("int8", f"not measured: {missing}")
        return
    request, daemon = bench.request(model), bench.daemon(model, settings=INT8_SETTINGS)
    placed = write_shared_request(bench.children.folder / f"{model.name}-shared.req", model)
    daemon.start_and_settle(request)
    (entry,) = daemon.control("models")
    figures.note("int8", f"served in {entry['precision']}, batch limit {daemon.calibrated_rows(model.name)}")
    for number in bench.rounds("int8"):
        ways = {"frames": request, "shared": placed} if bench.generator.shares_memory else {"frames": request}
        rates = {way: bench.rate(daemon.endpoint, ways[way], 16).rate for way in sorted(ways, reverse=bool(number % 2))}
        best = max(bench.raw(model, layout, backend="openvino").rows_per_s for layout in ("all", "callers"))
        figures.add("int8.mobilenetv2.raw", best)
        for way, rate in rates.items():
            figures.add(f"int8.mobilenetv2.{way}_ratio", rate / best)
    daemon.stop()


def before(bench: Bench) -> None:
    """This daemon beside that of another checkout (--before), asked by turns: rate, p50 and CPU a request."""
    if bench.before is None:
        bench.figures.note("before", "not measured: name another checkout with --before")
        return
    settled = {"mlp": (1, 16, 64, 256), "small5ms": (1, 16, 64), "mobilenetv2": (1, 16, 64), "resnet18": (16,)}
    for model in (makers.mlp(), makers.small5ms(), makers.mobilenetv2(), makers.resnet18()):
        request = bench.request(model)
        daemons = {"now": bench.daemon(model), "before": bench.daemon(model, checkout=bench.before)}
        for daemon in daemons.values():
            daemon.start_and_settle(request)
        for number in bench.rounds(f"before, {model.name}", SLICES):
            for in_flight in settled[model.name]:
                key, loads, cpu_s = f"before.{model.name}.{in_flight}", {}, {}
                for name in sorted(daemons, reverse=bool(number % 2)):
                    used_s = daemons[name].cpu_s()
                    loads[name] = bench.rate(daemons[name].endpoint, request, in_flight, 1 / SLICES)
                    cpu_s[name] = (daemons[name].cpu_s() - used_s) / max(loads[name].sent, 1)
                now, then = loads["now"], loads["before"]
                bench.figures.add(f"{key}.rate", now.rate)
                bench.figures.add(f"{key}.rate_ratio", now.rate / then.rate)
                bench.figures.add(f"{key}.p50_ratio", now.p50_ms / then.p50_ms)
                bench.figures.add(f"{key}.cpu_ratio", cpu_s["now"] / cpu_s["before"])
        for daemon in daemons.values():
            daemon.stop()


# ---- arrivals that do not wait --------------------------------------------------------------------------------------


def poisson_small(bench: Bench) -> None:
    """Open loop at 0.5, 0.9 and 2 times capacity; small frames; the deadline follows from the model's run."""
    model = makers.small5ms()
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    limit = daemon.calibrated_rows(model.name)
    run_ms = bench.raw(model, "one", rows=limit).p50_ms
    deadline_ms = round(max(4 * run_ms, LEAST_SMALL_DEADLINE_MS), 1)
    bench.figures.note(
        "poisson_small", f"batch limit {limit}, a run of it {run_ms:.1f} ms alone, deadline {deadline_ms:g} ms"
    )
    _poisson(bench, daemon, model, deadline_ms)
    daemon.stop()


def poisson_images(bench: Bench) -> None:
    """The same with 600 KB frames and 500 ms."""
    model = makers.mobilenetv2()
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    _poisson(bench, daemon, model, IMAGE_DEADLINE_MS)
    daemon.stop()


def two_models(bench: Bench) -> None:
    """A flood on one model must not spoil another: mlp and small5ms, one at a time, beside mobilenetv2 at 2 x."""
    flooded, tiny, medium = makers.mobilenetv2(), makers.mlp(), makers.small5ms()
    figures, daemon = bench.figures, bench.daemon(flooded, tiny, medium)
    daemon.start_and_settle(bench.request(flooded))
    flood_request = bench.request(flooded, IMAGE_DEADLINE_MS)
    for number in bench.rounds("two_models"):
        capacity = bench.capacity(daemon.endpoint, bench.request(flooded))
        run_ms = bench.raw(flooded, "one").p50_ms
        figures.add("two.flooded_run_ms", run_ms)
        for neighbour in (tiny, medium):
            request, key = bench.request(neighbour), f"two.{neighbour.name}"
            seconds = max(bench.seconds, 3.0 if bench.is_quick else 6.0)
            alone = bench.generator.closed(daemon.endpoint, request, 1, seconds)
            flooding = Background(
                partial(
                    bench.generator.open,
                    daemon.endpoint,
                    flood_request,
                    2 * capacity,
                    seconds + 1.0,
                    deadline_ms=IMAGE_DEADLINE_MS,
                    seed=number,
                )
            )
            beside = bench.generator.closed(daemon.endpoint, request, 1, seconds, warm_s=1.5)
            flood = flooding.result()
            figures.add(f"{key}.alone_p50_ms", alone.p50_ms)
            figures.add(f"{key}.alone_p99_ms", alone.p99_ms)
            figures.add(f"{key}.p50_ms", beside.p50_ms)
            figures.add(f"{key}.p99_ms", beside.p99_ms)
            figures.add(f"{key}.p50_ratio", beside.p50_ms / alone.p50_ms)
            figures.add(f"{key}.p99_in_runs", (beside.p99_ms - alone.p99_ms) / run_ms)
            figures.add(f"{key}.failed", beside.refused + beside.lost)
            if neighbour is tiny:
                figures.add("two.flood.goodput_ratio", flood.goodput / capacity)
    daemon.stop()
    for name in ("mlp", "small5ms"):
        alone_ms, beside_ms = figures.median(f"two.{name}.alone_p99_ms"), figures.median(f"two.{name}.p99_ms")
        figures.note("two_models", f"{name}: p99 {alone_ms:.2f} ms alone, {beside_ms:.2f} ms beside the flood")


HOSTILE_RATE = 1_000
"""Bad messages a second: more would measure how the generator and the attacker share two cores."""


def hostile(bench: Bench) -> None:
    """A good client beside a hostile one: 200 silent connections, 1 000 bad messages a second, replies never read."""
    model, figures = makers.mlp(), bench.figures
    request, daemon = bench.request(model), bench.daemon(model)
    daemon.start_and_settle(request)
    attack = [sys.executable, str(Path(__file__).with_name("hostile.py")), daemon.endpoint, str(HOSTILE_RATE)]
    for _ in bench.rounds("hostile"):
        _, before_mib = footprint.memory_mib(daemon.pid)
        alone = bench.generator.closed(daemon.endpoint, request, 16, bench.seconds)
        attacker = bench.children.start(attack, bench.children.new_name("hostile"))
        beside = bench.generator.closed(daemon.endpoint, request, 16, bench.seconds, warm_s=1.0)
        bench.children.stop(attacker)
        figures.add("hostile.p99_ratio", beside.p99_ms / alone.p99_ms)
        figures.add("hostile.rate_ratio", beside.rate / alone.rate)
        figures.add("hostile.failed", beside.refused + beside.lost)
        figures.add("hostile.growth_mib", footprint.memory_mib(daemon.pid)[1] - before_mib)
    daemon.stop()


# ---- life -----------------------------------------------------------------------------------------------------------


def reloads(bench: Bench) -> None:
    """Reload a model again and again under load, by the control endpoint; nothing may be lost or fail."""
    model, figures = makers.mlp(), bench.figures
    request, daemon = bench.request(model), bench.daemon(model)
    daemon.start_and_settle(request)
    say(f"reloads: {bench.reload_count} under load")
    problem: list[BaseException] = []
    done = 0

    def reload_all() -> None:
        nonlocal done
        try:
            with ControlConnection(daemon.control_endpoint) as connection:
                for _ in range(bench.reload_count):
                    connection.ask("load", model.name)
                    done += 1
        except BaseException as error:  # noqa: BLE001 (told by the main thread)
            problem.append(error)

    # 64 in flight keeps requests in every phase of a swap.
    thread = threading.Thread(target=reload_all)
    thread.start()
    failed = answered = 0
    codes: dict[str, int] = {}
    while thread.is_alive():
        load = bench.generator.closed(daemon.endpoint, request, 64, min(bench.seconds, 3.0), warm_s=0.0)
        failed += load.refused + load.lost + load.stray
        answered += load.answered
        for code, words in load.codes.items():
            codes[code] = codes.get(code, 0) + int(words["count"])
    thread.join()
    daemon.stop()
    if problem:
        figures.note("reloads", f"stopped after {done}: {problem[0]}")
    figures.add("reloads.done", done)
    figures.add("reloads.failed", failed)
    figures.note("reloads", f"{answered:,} requests answered over {done} reloads" + (f"; {codes}" if codes else ""))


def cold_start(bench: Bench) -> None:
    """From starting the process to its first answer, to a client that was there before."""
    figures = bench.figures
    models = (makers.mlp(),) if bench.is_quick else (makers.mlp(), makers.mobilenetv2())
    kept: dict[str, Path] = {}
    for model in models:  # once unmeasured: files come into the page cache, and what is calibrated is kept
        daemon = bench.daemon(model)
        daemon.start_and_settle(bench.request(model))
        daemon.settle(quiet_s=3.0)
        daemon.stop()
        kept[model.name] = daemon.state
        if not any(file.is_file() for file in daemon.state.rglob("*")):
            figures.note("cold_start", f"{model.name}: nothing was kept in the state folder")
    for _ in bench.rounds("cold_start"):
        for model in models:
            for _ in range(1 if bench.is_quick else 3):
                figures.add(f"cold.{model.name}.fresh_s", _start_s(bench, model, None))
                figures.add(f"cold.{model.name}.cached_s", _start_s(bench, model, kept[model.name]))


def idle(bench: Bench) -> None:
    """Memory and CPU with one tiny model, after its first answer."""
    model, figures = makers.mlp(), bench.figures
    daemon = bench.daemon(model)
    daemon.start_and_settle(bench.request(model))
    say("idle: waiting")
    pss, rss = footprint.memory_mib(daemon.pid)
    figures.add("idle.pss_mib", pss)
    figures.add("idle.rss_mib", rss)
    figures.add("idle.cpu_percent", footprint.cpu_percent(daemon.pid, 5.0 if bench.is_quick else 20.0))
    daemon.stop()


def size(bench: Bench) -> None:
    """Bytes that an installation takes, from the packages installed here."""
    for key, extras in (("onnxruntime", {"onnxruntime"}), ("openvino", {"onnxruntime", "openvino"})):
        try:
            sizes = footprint.installed_bytes(extras)
        except PackageNotFoundError as missing:
            bench.figures.note("size", f"with {key} not measured: {missing}")
            continue
        bench.figures.add(f"size.{key}_mb", sum(sizes.values()) / 1e6)
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        parts = ", ".join(f"{name} {nbytes / 1e6:.0f}" for name, nbytes in largest)
        bench.figures.note("size", f"{key}, MB: {parts}")


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "mlp": mlp,
    "overload": overload,
    "small": small,
    "images": images,
    "shared": shared,
    "bf16": bf16,
    "int8": int8,
    "poisson_small": poisson_small,
    "poisson_images": poisson_images,
    "two_models": two_models,
    "hostile": hostile,
    "reloads": reloads,
    "cold_start": cold_start,
    "idle": idle,
    "size": size,
    "before": before,
}
QUICK = ("mlp", "overload", "poisson_small", "reloads", "cold_start", "idle", "size")
"""What the smoke run covers: every mechanism of the bench once, nothing with large frames."""


def start_s(daemon: Daemon, request: Path) -> float:
    """Seconds from starting a daemon to its first answer; it is stopped then."""
    begin = time.perf_counter()
    daemon.start()
    answer_time_s(daemon.endpoint, request, 60.0)
    elapsed = time.perf_counter() - begin
    daemon.stop()
    return elapsed


# ---- private --------------------------------------------------------------------------------------------------------


def _best_layout(bench: Bench, model: BenchModel, key: str) -> float:
    """Rows a second of the better in-process layout. All layouts are kept as figures."""
    rates = {}
    for layout in LAYOUTS:
        found = bench.raw(model, layout)
        rates[layout] = found.rows_per_s
        bench.figures.add(f"{key}.raw.{layout}.rate", found.rows_per_s)
        bench.figures.add(f"{key}.raw.{layout}.p50_ms", found.p50_ms)
    return max(rates.values())


def _generator_share_with_images(bench: Bench) -> None:
    model, figures = makers.mobilenetv2(), bench.figures
    with bench.echo(model) as echo:
        most = max(bench.rate(echo.endpoint, bench.request(model), in_flight).rate for in_flight in (16, 64))
    rates = [max(figures.values[f"images.{name}.{n}.rate"]) for name in ("mobilenetv2", "resnet18") for n in (16, 64)]
    figures.add("images.generator.max", most)
    figures.add("images.generator.share", max(rates) / most)


def _poisson(bench: Bench, daemon: Daemon, model: BenchModel, deadline_ms: float) -> None:
    figures, key = bench.figures, f"poisson.{model.name}"
    with_deadline = bench.request(model, deadline_ms)
    for number in bench.rounds(f"poisson, {model.name}"):
        capacity = bench.capacity(daemon.endpoint, bench.request(model))
        figures.add(f"{key}.capacity", capacity)
        for times in (2.0,) if bench.is_quick else (0.5, 0.9, 2.0):
            offered = times * capacity
            load = bench.generator.open(
                daemon.endpoint,
                with_deadline,
                offered,
                bench.overload_seconds,
                deadline_ms=deadline_ms,
                seed=number,
            )
            name = f"{key}.{times:g}x"
            figures.add(f"{name}.goodput_ratio", load.goodput / min(offered, capacity))
            figures.add(f"{name}.p50_ms", load.p50_ms)
            figures.add(f"{name}.p99_ms", load.p99_ms)
            figures.add(f"{name}.p99_ratio", load.p99_ms / deadline_ms)
            figures.add(f"{name}.neither", load.lost + load.stray)
            figures.add(f"{name}.unsent", load.unsent)
            if load.refused_p99_ms is not None:
                figures.add(f"{name}.refused_p99_ms", load.refused_p99_ms)
            for code, words in load.codes.items():
                figures.add(f"{name}.{code}", words["count"])
                figures.add(f"{name}.{code}.p99_ms", words["p99_us"] / 1e3)
    codes = {name.rsplit(".", 1)[1] for name in figures.values if name.startswith(f"{key}.2x.") and _is_code(name)}
    shares = ", ".join(
        f"{code} {statistics.median(figures.values[f'{key}.2x.{code}']):,.0f} "
        f"(p99 {figures.median(f'{key}.2x.{code}.p99_ms'):.1f} ms)"
        for code in sorted(codes)
    )
    figures.note(f"poisson {model.name}", f"errors at 2 x, a round: {shares or 'none'}")


def _is_code(figure: str) -> bool:
    last = figure.rsplit(".", 1)[1]
    return last not in {"goodput_ratio", "p50_ms", "p99_ms", "p99_ratio", "neither", "unsent", "refused_p99_ms"}


class Background:
    """A run of the generator on a thread of its own, begun at once."""

    def __init__(self, run: Callable[[], Load]) -> None:
        self._run = run
        self._load: Load | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def result(self) -> Load:
        """Wait for it. Raises what the run raised."""
        self._thread.join()
        if self._load is None:
            raise self._error or BenchError("a background run of the generator gave nothing")
        return self._load

    def _work(self) -> None:
        try:
            self._load = self._run()
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            self._error = error


def _start_s(bench: Bench, model: BenchModel, kept_state: Path | None) -> float:
    daemon = bench.daemon(model)
    if kept_state is not None:
        shutil.copytree(kept_state, daemon.state, ignore=shutil.ignore_patterns("*.sock", "*.lock"))
    return start_s(daemon, bench.request(model))
