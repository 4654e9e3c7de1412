"""A candidate measured as it will be used: the real daemon in a process, the load in another, over ipc.

Owns: how long is measured, and with what load. What fails is a result with a reason. Thread: one owner.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from edge_runtime.client.frames import Options, RequestEncoder
from edge_runtime.client.load_generator import Measured, Plan, measure
from edge_runtime.client.quantiles import quantile
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array
from edge_runtime.tuning.candidates import Candidate
from edge_runtime.tuning.objective import Objective
from edge_runtime.tuning.rate_search import RateSearch
from edge_runtime.tuning.results import Full, Probe, Quick
from edge_runtime.tuning.served import Served, ServingFailed

IN_FLIGHT = 16
"""Of a quick look: enough to fill batches and all cores."""

QUICK_S, ALONE_S = 1.5, 0.5
WARM_UP_S = 0.3

MIN_PROBE_S, MAX_PROBE_S = 1.5, 6.0
PROBE_ANSWERS = 300
"""Answers that a probe wants, so that three are above its 99th percentile."""

PATIENCE = 10.0
"""Answers are waited for so many times the objective, 2 s at least: later ones are lost, which keeps no objective."""

FIRST_SHARE = 0.85
"""Of a quick look's rate, where a search begins: arrivals at random queue more than a number kept in flight."""

MIN_ANSWERED = 0.98
"""Of what was sent: what is lost or refused keeps no objective either."""


def frames_of(model: str, inputs: Mapping[str, Array]) -> list[bytes]:
    """One request as it is sent again and again."""
    header, data = RequestEncoder().encode(model, inputs, Options(None, None, None, 0, False))
    return [header, *(bytes(frame) for frame in data)]


def look_quickly(candidate: Candidate, served: Served, frames: Sequence[bytes], objective: Objective) -> Quick:
    """Requests one at a time, then many. Raises ServingFailed."""
    status = served.wait_loaded()
    if status["mode"] == "workers":
        served.wait_calibrated()
    alone = _load(served, frames, _plan(served, objective, in_flight=1, seconds=ALONE_S))
    alone_s = quantile(alone.latencies_s, 0.5)
    if alone_s is None:
        raise ServingFailed(_no_answer(alone))
    if alone_s > objective.limit_s:
        # A search could only fail, and many of such requests at a time take their time.
        return Quick(candidate, "", alone_s, 1 / alone_s, alone_s, served.memory_bytes(), str(status["mode"]))
    seconds = min(max(QUICK_S, alone_s * IN_FLIGHT * 2), MAX_PROBE_S)
    many = _load(served, frames, _plan(served, objective, in_flight=IN_FLIGHT, seconds=seconds))
    return Quick(
        candidate,
        alone_s=alone_s,
        rate=many.answered / many.seconds,
        p99_s=quantile(many.latencies_s, 0.99) or 0.0,
        memory_bytes=served.memory_bytes(),
        mode=str(status["mode"]),
    )


def measure_fully(
    candidate: Candidate, served: Served, frames: Sequence[bytes], objective: Objective, *, guess: float, until_s: float
) -> Full:
    """Search the highest rate that keeps the objective. guess: the rate of a quick look. Raises ServingFailed.

    until_s: when the time is over, a monotonic instant: the search ends there, if it has found a rate by then.
    """
    status = served.wait_loaded()
    if status["mode"] == "workers":
        served.wait_calibrated()
    search = RateSearch(max(guess * FIRST_SHARE, 0.1))
    probes: list[Probe] = []
    while (rate := search.next_rate()) is not None and not (search.best and time.monotonic() > until_s):
        probe = _probe(served, frames, objective, rate)
        if not probe.is_met and rate <= guess:
            # Whatever else the device does only ever adds to latencies: once more before it counts.
            probe = _better(probe, _probe(served, frames, objective, rate))
        probes.append(probe)
        search.record(rate, is_met=probe.is_met)
    best = max((each for each in probes if each.is_met), key=lambda each: each.rate, default=None)
    memory_bytes = served.memory_bytes()
    if best is None:
        return Full(candidate, probes=tuple(probes), memory_bytes=memory_bytes)
    is_cut = search.next_rate() is not None
    return Full(candidate, "", best.rate, best.p50_s, best.p99_s, memory_bytes, tuple(probes), is_cut)


# ---- private --------------------------------------------------------------------------------------------------------


def _probe(served: Served, frames: Sequence[bytes], objective: Objective, rate: float) -> Probe:
    seconds = min(max(PROBE_ANSWERS / rate, MIN_PROBE_S), MAX_PROBE_S)
    measured = _load(served, frames, _plan(served, objective, rate=rate, seconds=seconds))
    found = quantile(measured.latencies_s, objective.quantile)
    is_whole = len(measured.latencies_s) >= measured.sent * MIN_ANSWERED
    return Probe(
        rate,
        quantile(measured.latencies_s, 0.5) or 0.0,
        quantile(measured.latencies_s, 0.99) or 0.0,
        is_met=found is not None and is_whole and found <= objective.limit_s,
    )


def _better(one: Probe, other: Probe) -> Probe:
    return min(one, other, key=lambda probe: (not probe.is_met, probe.p99_s))


def _plan(
    served: Served, objective: Objective, *, in_flight: int = 1, rate: float | None = None, seconds: float
) -> Plan:
    return Plan(
        served.endpoint,
        in_flight=in_flight,
        rate=rate,
        seconds=seconds,
        warmup_s=WARM_UP_S,
        timeout_s=max(objective.limit_s * PATIENCE, 2.0),
    )


def _load(served: Served, frames: Sequence[bytes], plan: Plan) -> Measured:
    try:
        return measure(plan, frames)
    except (EdgeRuntimeError, ConnectionError, OSError) as error:
        served.check()
        raise ServingFailed(str(error)) from error


def _no_answer(measured: Measured) -> str:
    refused = ", ".join(f"{code} {count}" for code, count in sorted(measured.refused.items()))
    return f"no request was answered ({refused or f'{measured.lost} lost'})"
