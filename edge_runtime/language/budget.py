"""The prefill budget that `tune` chooses: the largest with which the tokens of streams come as often as they must.

Owns: how it is measured, by the real daemon: streams write while long prompts join them, one after another. Called by
`tune` alone, never by a daemon. Thread: the caller's, and one for each stream.
"""

from __future__ import annotations

import random
import string
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, PromptTooLong, TensorMismatch
from edge_runtime.language.settings import MAX_STREAMS
from edge_runtime.models.table_choice import TableChoice, TableTrial

BUDGETS = (16, 32, 64, 128, 256, 512)
"""Tokens of prompts that a step reads. Each is twice the one before: the time of a step grows about as they do."""

STREAMS = 4
"""That write meanwhile, where the model may have so many."""

JOINING = 4
"""Prompts that join, one after another."""

LONG_BYTES = 4096
"""Of the prompt of one that joins: some thousand tokens. One that is too long for the model is halved."""

PART_TIMEOUT_MS = 60_000.0


def choose_budget(trial: TableTrial) -> TableChoice:
    """Measure budgets from the smallest on, until one misses the objective or the time is over."""
    objective = f"p{trial.quantile * 100:.0f} {trial.limit_s * 1e3:g} ms"
    measured: list[tuple[int, float]] = []
    for budget in BUDGETS:
        if measured and time.monotonic() > trial.until_s:
            break
        trial.show("asking", f"a budget of {budget} tokens")
        with trial.serve({"prefill_tokens": budget}) as endpoint:
            gaps_s = _gaps(endpoint, trial.model, min(STREAMS, int(trial.now.get("max_streams", MAX_STREAMS))))
        measured.append((budget, float(np.quantile(gaps_s, trial.quantile))))
        if measured[-1][1] > trial.limit_s:
            break
    best = best_budget(measured, trial.limit_s)
    rows = [
        (
            str(budget),
            f"{took_s * 1e3:.1f}",
            "chosen" if budget == best else "too slow" if took_s > trial.limit_s else "",
        )
        for budget, took_s in measured
    ]
    if best is None:
        return TableChoice({}, (), _COLUMNS, rows)
    took_s = dict(measured)[best]
    sentence = (
        f"prefill_tokens: of those measured the largest within {objective} between two tokens, {took_s * 1e3:.1f} ms, "
        f"while {STREAMS} streams wrote and long prompts joined"
    )
    values = {"prefill_tokens": best, "inter_token_ms": max(int(trial.limit_s * 1e3), 1)}
    return TableChoice(values, (sentence,), _COLUMNS, rows)


def best_budget(measured: Sequence[tuple[int, float]], limit_s: float) -> int | None:
    """Return the largest budget whose time is within the limit; None: no time is. Pure."""
    return max((budget for budget, took_s in measured if took_s <= limit_s), default=None)


# ---- private --------------------------------------------------------------------------------------------------------

_COLUMNS = ("prefill_tokens", "between tokens ms", "")


def _gaps(endpoint: str, model: str, streams: int) -> list[float]:
    """Seconds between the tokens of streams, while prompts joined them."""
    stop = threading.Event()
    times: list[list[float]] = [[] for _ in range(streams)]
    failed: list[EdgeRuntimeError] = []
    began = threading.Barrier(streams + 1)

    def write(place: int) -> None:
        with Client(endpoint) as client:
            waits = True
            while not stop.is_set():
                try:
                    for _ in client.stream(
                        model, text=_prompt(32), ignore_eos=True, temperature=0, timeout_ms=PART_TIMEOUT_MS
                    ):
                        times[place].append(time.monotonic())
                        if waits:
                            waits = False
                            began.wait()
                        if stop.is_set():
                            break
                except EdgeRuntimeError as error:
                    failed.append(error)
                    stop.set()
                    began.abort()

    threads = [threading.Thread(target=write, args=(place,), name=f"tune-stream-{place}") for place in range(streams)]
    for thread in threads:
        thread.start()
    spans: list[tuple[float, float]] = []
    try:
        with suppress(threading.BrokenBarrierError), Client(endpoint) as client:
            began.wait()
            spans += _joined(client, model)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return [
        float(gap)
        for each in times
        for first_s, last_s in spans
        for gap in np.diff([at_s for at_s in each if first_s <= at_s <= last_s])
    ]


def _joined(client: Client, model: str) -> list[tuple[float, float]]:
    """Ask for a token of one long prompt after another; when each began and ended."""
    spans: list[tuple[float, float]] = []
    nbytes = LONG_BYTES
    while len(spans) < JOINING:
        began_s = time.monotonic()
        try:
            for _ in client.stream(model, text=_prompt(nbytes), max_tokens=1, timeout_ms=PART_TIMEOUT_MS):
                pass
        except (PromptTooLong, TensorMismatch):
            if nbytes <= 64:
                raise
            nbytes //= 2
            continue
        spans.append((began_s, time.monotonic()))
    return spans


def _prompt(nbytes: int) -> str:
    """A prompt that begins as no other: nothing of it is in the cache."""
    return "".join(random.choices(string.ascii_letters + string.digits + " ", k=nbytes))  # noqa: S311 (no secret)
