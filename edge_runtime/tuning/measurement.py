"""A candidate measured end to end: its daemon in one child process (daemons.py), the load in another, over ipc.

Owns: how long is measured, and with what load. A failure is a ServingFailed or a result with a reason. Thread: one
owner.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.doors.zmq.load_generator import Measured, Plan, measure, measure_here, quantile
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array
from edge_runtime.tuning.candidates import Candidate
from edge_runtime.tuning.daemons import ServingFailed, TrialDaemon
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.other_work import OtherWork
from edge_runtime.tuning.plan import RateSearch
from edge_runtime.tuning.results import FullMeasurement, QuickLook, RateProbe, Slice

IN_FLIGHT = 16
"""Of a look: enough to fill batches and all cores. Fewer where that many would wait longer than the objective."""

ALONE_S, FIRST_S = 0.5, 0.5
WARM_UP_S = 0.3

SLICE_S, MAX_SLICE_S = 1.0, 4.0
"""Of the race: long enough for the ticks of 10 ms that other work is counted in, short enough for many rounds."""

SLICE_TURNS = 4
"""Answers of a slice by requests in flight."""

SLICE_WARM_UP_S = 0.15

MIN_PROBE_S, MAX_PROBE_S = 1.5, 6.0
PROBE_ANSWERS = 300
"""Answers of a probe, so that three are above its 99th percentile."""

PATIENCE = 10.0
"""An answer is lost after this many times the objective, 2 s at least; a lost answer misses the objective."""

FIRST_SHARE = 0.85
"""Of a quick look's rate, where a search begins: random arrivals queue more than a fixed number in flight."""

MIN_ANSWERED = 0.98
"""Of the requests sent: lost and refused ones miss the objective too."""


Requests = Sequence[Sequence[bytes]]
"""The frames of each request that is sent, by turns."""


def frames_of(model: str, *inputs: Mapping[str, Array]) -> Requests:
    """The frames of the requests that are sent again and again. inputs: of one request each."""
    encoded = [RequestEncoder().encode(model, each, Options(None, None, None, 0, False)) for each in inputs]
    return [[header, *(bytes(frame) for frame in data)] for header, data in encoded]


def look_first(candidate: Candidate, daemon: TrialDaemon, frames: Requests, objective: Objective) -> QuickLook:
    """Requests one at a time, then many for a moment, which warms up. Raises ServingFailed."""
    status = daemon.wait_ready()
    alone = _load(daemon, frames, _plan(daemon, objective, in_flight=1, seconds=ALONE_S), measure_here)
    alone_s = quantile(alone.latencies_s, 0.5)
    if alone_s is None:
        raise ServingFailed(_no_answer(alone))
    rate = 1 / alone_s
    if alone_s <= objective.limit_s:  # else many slow requests at a time take long, for nothing
        many = _load(daemon, frames, _plan(daemon, objective, in_flight=IN_FLIGHT, seconds=FIRST_S), measure_here)
        rate = max(rate, len(many.latencies_s) / many.seconds)
    return QuickLook(candidate, "", alone_s, rate, daemon.memory_bytes(), str(status["mode"]))


def take_slice(look: QuickLook, number: int, daemon: TrialDaemon, frames: Requests, objective: Objective) -> Slice:
    """One slice of the race: a closed loop, with what other work took meanwhile. Raises ServingFailed.

    look: the candidate's looks so far. number: of the round. The rate is the requests in flight by their mean latency
    (Little's law), since a count in a short time scatters by whole batches; times the share answered in time.
    """
    daemon.wait_ready()
    rate = max(statistics.median([look.first_rate, *(each.rate for each in look.slices)]), 1 / look.alone_s)
    in_flight = min(max(int(objective.limit_s * rate / 2), 1), IN_FLIGHT)
    turn_s = in_flight / rate
    seconds = min(max(SLICE_TURNS * turn_s, SLICE_S), MAX_SLICE_S)
    warmup_s = min(max(turn_s, SLICE_WARM_UP_S), 1.0)
    plan = _plan(daemon, objective, in_flight=in_flight, seconds=seconds, warmup_s=warmup_s)
    others = OtherWork()
    measured = _load(daemon, frames, plan, measure_here)
    share, latencies_s = others.share(), measured.latencies_s
    if not latencies_s:
        return Slice(number, 0.0, 0.0, share)
    in_time = sum(each <= objective.limit_s for each in latencies_s) / max(measured.sent, 1)
    mean_s = sum(latencies_s) / len(latencies_s)
    return Slice(number, in_flight / mean_s * in_time, quantile(latencies_s, 0.99) or 0.0, share)


def measure_fully(
    candidate: Candidate,
    daemon: TrialDaemon,
    frames: Requests,
    objective: Objective,
    *,
    guess: float,
    until_s: float,
) -> FullMeasurement:
    """Search the highest rate that keeps the objective. guess: the rate of a quick look. Raises ServingFailed.

    until_s: the end of the tune's time, a monotonic instant: the search ends there, if it has a rate by then.
    """
    daemon.wait_ready()
    search = RateSearch(max(guess * FIRST_SHARE, 0.1))
    probes: list[RateProbe] = []
    while (rate := search.next_rate()) is not None and not (search.best and time.monotonic() > until_s):
        probe = _probe(daemon, frames, objective, rate)
        if not probe.is_met and rate <= guess:
            # Other work on the device only ever adds latency, so a failed probe runs once more.
            probe = _better(probe, _probe(daemon, frames, objective, rate))
        probes.append(probe)
        search.record(rate, is_met=probe.is_met)
    best = max((each for each in probes if each.is_met), key=lambda each: each.rate, default=None)
    memory_bytes = daemon.memory_bytes()
    if best is None:
        return FullMeasurement(candidate, probes=tuple(probes), memory_bytes=memory_bytes)
    is_cut = search.next_rate() is not None
    return FullMeasurement(candidate, "", best.rate, best.p50_s, best.p99_s, memory_bytes, tuple(probes), is_cut)


def _probe(daemon: TrialDaemon, frames: Requests, objective: Objective, rate: float) -> RateProbe:
    seconds = min(max(PROBE_ANSWERS / rate, MIN_PROBE_S), MAX_PROBE_S)
    measured = _load(daemon, frames, _plan(daemon, objective, rate=rate, seconds=seconds))
    found = quantile(measured.latencies_s, objective.quantile)
    is_whole = len(measured.latencies_s) >= measured.sent * MIN_ANSWERED
    return RateProbe(
        rate,
        quantile(measured.latencies_s, 0.5) or 0.0,
        quantile(measured.latencies_s, 0.99) or 0.0,
        is_met=found is not None and is_whole and found <= objective.limit_s,
    )


def _better(one: RateProbe, other: RateProbe) -> RateProbe:
    return min(one, other, key=lambda probe: (not probe.is_met, probe.p99_s))


def _plan(
    daemon: TrialDaemon,
    objective: Objective,
    *,
    in_flight: int = 1,
    rate: float | None = None,
    seconds: float,
    warmup_s: float = WARM_UP_S,
) -> Plan:
    return Plan(
        daemon.endpoint,
        in_flight=in_flight,
        rate=rate,
        seconds=seconds,
        warmup_s=warmup_s,
        timeout_s=max(objective.limit_s * PATIENCE, 2.0),
    )


def _load(
    daemon: TrialDaemon,
    frames: Requests,
    plan: Plan,
    run: Callable[[Plan, Sequence[bytes]], Measured] = measure,
) -> Measured:
    try:
        return run(replace(plan, requests=len(frames)), [frame for request in frames for frame in request])
    except (EdgeRuntimeError, ConnectionError, OSError) as error:
        daemon.check()
        raise ServingFailed(str(error)) from error


def _no_answer(measured: Measured) -> str:
    refused = ", ".join(f"{code} {count}" for code, count in sorted(measured.refused.items()))
    return f"no request was answered ({refused or f'{measured.lost} lost'})"
