"""A board without a fan: a folder as /sys whose temperature answers to the load, and the load on a real dispatcher.

No board was measured for this: the thermal models are of two masses each, the chip and what it sits on, with constants
from what is published. Time is the test's.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.scheduled_model import LatencyModel, Layout, ScheduledModel
from tests.fakes.clock import FakeClock
from tests.fakes.requests import KeptReply, request_of

STEP_S = 0.25
"""Of the integration: a tenth of the shortest time constant below."""


@dataclass(frozen=True)
class BoardModel:
    """Two masses in a row: power, chip, body, air. place_watts: of one busy core, or place on the GPU."""

    zone: str
    ambient_celsius: float
    idle_watts: float
    place_watts: float
    places: int
    chip_kelvin_per_watt: float
    chip_joule_per_kelvin: float
    body_kelvin_per_watt: float
    body_joule_per_kelvin: float
    throttle_celsius: float
    resolution_celsius: float

    def steady_celsius(self, busy: float) -> float:
        """The chip's temperature after a long time with so many busy places."""
        watts = self.idle_watts + self.place_watts * busy
        return self.ambient_celsius + watts * (self.chip_kelvin_per_watt + self.body_kelvin_per_watt)

    def busy_at(self, celsius: float) -> float:
        """The busy places that a constant setting may have under a limit."""
        kelvin_per_watt = self.chip_kelvin_per_watt + self.body_kelvin_per_watt
        watts = (celsius - self.ambient_celsius) / kelvin_per_watt - self.idle_watts
        return min(max(watts / self.place_watts, 0.0), self.places)


PI_5 = BoardModel(
    # Bare, in a room: some 50 °C idle at 2.7 W, which is 10.4 K/W in all; 7 W with four busy cores, throttled at 80 °C
    # "within a few minutes" of stress-ng at 22 °C (pidiylab.com, "Raspberry Pi 5 cooling guide"; beamostore.com,
    # "Raspberry Pi 5 overheating"; Raspberry Pi documentation: soft limit 80 °C). The body's heat follows from those
    # minutes. Of the chip alone it is known only that a load shows within seconds.
    zone="cpu-thermal",
    ambient_celsius=22.0,
    idle_watts=2.7,
    place_watts=1.075,
    places=4,
    chip_kelvin_per_watt=2.0,
    chip_joule_per_kelvin=1.5,
    body_kelvin_per_watt=8.4,
    body_joule_per_kelvin=18.0,
    throttle_celsius=80.0,
    resolution_celsius=0.55,
)

ORIN_NANO = BoardModel(
    # 15 W mode with a passive heat sink in a warm cabinet: "fanless safely up to 10 W at 35 °C", by
    # T = ambient + power * θ with 90 °C at most, is θ = 5.5 K/W (edgeaistack.ai, "Fanless mini PCs for edge AI",
    # "Jetson Orin Nano thermal limits"; NVIDIA's power modes 7 W and 15 W). The kernel's trip is 99 °C (the profile's
    # source). A heat sink of a quarter kilogramme of aluminium holds 225 J/K.
    zone="tj-thermal",
    ambient_celsius=35.0,
    idle_watts=5.0,
    place_watts=5.0,
    places=2,
    chip_kelvin_per_watt=0.8,
    chip_joule_per_kelvin=10.0,
    body_kelvin_per_watt=4.7,
    body_joule_per_kelvin=225.0,
    throttle_celsius=99.0,
    resolution_celsius=0.5,
)


class WarmBoard:
    """One board, from its idle temperature on. root: its /, with the files that HostProbe reads."""

    def __init__(self, root: Path, model: BoardModel, *, busy_before: float = 0.0) -> None:
        """busy_before: places that were busy for a long time before."""
        self.root = root
        self.model = model
        self._written: dict[str, str] = {}
        watts = model.idle_watts + model.place_watts * busy_before
        self.body_celsius = model.ambient_celsius + watts * model.body_kelvin_per_watt
        self.celsius = self.body_celsius + watts * model.chip_kelvin_per_watt
        self._write("sys/class/thermal/thermal_zone0/type", model.zone)
        self._write("sys/class/thermal/cooling_device0/type", "thermal-cpufreq-0")
        self._write("sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq", "2400000")
        self.show()

    @property
    def is_slowed(self) -> bool:
        """Whether the kernel slows it."""
        return self.celsius >= self.model.throttle_celsius

    def warm(self, seconds: float, busy: float) -> None:
        """Have so many busy places for a while."""
        model = self.model
        watts = model.idle_watts + model.place_watts * busy
        while seconds > 0:
            step_s = min(seconds, STEP_S)
            into_body_watts = (self.celsius - self.body_celsius) / model.chip_kelvin_per_watt
            into_air_watts = (self.body_celsius - model.ambient_celsius) / model.body_kelvin_per_watt
            self.celsius += (watts - into_body_watts) / model.chip_joule_per_kelvin * step_s
            self.body_celsius += (into_body_watts - into_air_watts) / model.body_joule_per_kelvin * step_s
            seconds -= step_s

    def show(self) -> None:
        """Write its files, as a kernel would answer now."""
        step = self.model.resolution_celsius
        shown = math.floor(self.celsius / step + 0.5) * step
        self._write("sys/class/thermal/thermal_zone0/temp", str(round(shown * 1000)))
        self._write("sys/class/thermal/cooling_device0/cur_state", str(int(self.is_slowed)))
        share = 0.6 if self.is_slowed else 1.0
        self._write("sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq", str(round(2400000 * share)))

    def _write(self, path: str, text: str) -> None:
        if self._written.get(path) == text:
            return
        if path not in self._written:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")
        self._written[path] = text


@dataclass(frozen=True)
class Load:
    """The work: requests that always wait, and others that come by chance, with a deadline. priority: of the former."""

    run_s: float
    priority: int = 8
    waiting: int = 16
    urgent_per_s: float = 2.0
    urgent_deadline_s: float = 1.0


@dataclass
class Seen:
    """What became of it. over_s: the longest time above the limit at a stretch."""

    hottest_celsius: float = 0.0
    over_s: float = 0.0
    answered: list[float] = field(default_factory=list)
    urgent_s: list[float] = field(default_factory=list)
    urgent_lost: int = 0
    stages: list[str] = field(default_factory=list)

    def rate(self, from_s: float, until_s: float) -> float:
        """Answers a second, of all, in a part of the time."""
        return sum(from_s <= each < until_s for each in self.answered) / (until_s - from_s)

    def urgent_p99_s(self) -> float:
        """The latency that 99 of 100 urgent answers stay under."""
        return sorted(self.urgent_s)[int(len(self.urgent_s) * 0.99)]


class GovernedBoard:
    """A board under a load by a dispatcher, in simulated time. step: the governor's, each second; None: without."""

    def __init__(self, board: WarmBoard, load: Load, limit_celsius: float, *, cores: int) -> None:
        self.board = board
        self.clock = FakeClock(0.0)
        self.dispatcher = Dispatcher(self.clock, cores)
        self.seen = Seen()
        self.step: Callable[[], None] | None = None
        self._load = load
        self._limit_celsius = limit_celsius
        places = board.model.places
        times = LatencyModel({1: load.run_s})
        self._models = {name: ScheduledModel(name, Layout(None, 1, places, times)) for name in ("bulk", "urgent")}
        self._random = random.Random(29)  # the same load each time
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._busy = 0
        self._over_since_s: float | None = None

    def run(self, seconds: float) -> Seen:
        """Let it run."""
        for _ in range(self._load.waiting):
            self._ask_bulk()
        self._at(0.0, self._ask_urgent)
        self._at(1.0, self._second)
        wake_s = math.inf
        while self.clock.monotonic_s() < seconds:
            at_s = min(self._events[0][0], wake_s)
            self._pass(at_s)
            while self._events and self._events[0][0] <= at_s:
                heapq.heappop(self._events)[2]()
            expired, wake_s = self.dispatcher.expire()
            wake_s = max(wake_s, self.clock.monotonic_s() + 0.001)
            for request in expired:
                self._refused(request.reply.tag)
            self._begin()
            _, again_s = self.dispatcher.expire()
            wake_s = max(min(wake_s, again_s), self.clock.monotonic_s() + 0.001)
        return self.seen

    # ---- private ----

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (seconds, self._count, call))

    def _pass(self, until_s: float) -> None:
        elapsed_s = until_s - self.clock.monotonic_s()
        if elapsed_s > 0:
            self.board.warm(elapsed_s, self._busy)
            self.clock.advance(elapsed_s)

    def _second(self) -> None:
        board, seen, now_s = self.board, self.seen, self.clock.monotonic_s()
        seen.hottest_celsius = max(seen.hottest_celsius, board.celsius)
        if board.celsius <= self._limit_celsius:
            self._over_since_s = None
        else:
            self._over_since_s = now_s if self._over_since_s is None else self._over_since_s
            seen.over_s = max(seen.over_s, now_s - self._over_since_s)
        board.show()
        if self.step is not None:
            self.step()
        self._at(now_s + 1.0, self._second)

    def _ask_bulk(self) -> None:
        self._ask("bulk", self._load.priority, math.inf)

    def _ask_urgent(self) -> None:
        now_s = self.clock.monotonic_s()
        self._ask("urgent", 1, self._load.urgent_deadline_s)
        self._at(now_s + self._random.expovariate(self._load.urgent_per_s), self._ask_urgent)

    def _ask(self, name: str, priority: int, timeout_s: float) -> None:
        now_s = self.clock.monotonic_s()
        reply = KeptReply(name)
        request = request_of([], reply, priority=priority, arrived_s=now_s, timeout_s=timeout_s, sender=name)
        refusal = self.dispatcher.refusal_of_low(priority)
        if refusal is not None:
            self._at(now_s + (refusal.retry_after_ms or 0.0) / 1e3, self._ask_bulk)
            return
        try:
            self.dispatcher.admit(self._models[name], request)
        except EdgeRuntimeError:
            self._refused(name)

    def _refused(self, name: str) -> None:
        if name == "urgent":
            self.seen.urgent_lost += 1
        else:
            self._at(self.clock.monotonic_s() + 1.0, self._ask_bulk)

    def _begin(self) -> None:
        while True:
            job, expired = self.dispatcher.next_job()
            for request in expired:
                self._refused(request.reply.tag)
            if job is None:
                if not expired:
                    return
                continue
            self._busy += 1
            run_s = self._load.run_s / (0.6 if self.board.is_slowed else 1.0)
            self._at(self.clock.monotonic_s() + run_s, lambda job=job, run_s=run_s: self._end(job, run_s))

    def _end(self, job, run_s: float) -> None:
        now_s = self.clock.monotonic_s()
        self._busy -= 1
        self.dispatcher.finish(job, run_s)
        for request in job.unanswered():
            self.seen.answered.append(now_s)
            if request.reply.tag == "urgent":
                self.seen.urgent_s.append(now_s - request.arrived_s)
            else:
                self._ask_bulk()
