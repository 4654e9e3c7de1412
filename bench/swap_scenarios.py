"""What clients see of updates: a daemon that answers without a pause while release after release takes its place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from bench.checked_load import CheckedLoad, CheckedRun, PhaseCount
from bench.following import MODEL, apply_updates, following, install, served
from bench.scenarios import Bench, say
from tests.fakes.releases import Made
from tests.fakes.update_site import UpdateSite, X, adder, onnx_release
from tests.models import onnx_models

GOOD, BAD = 200, 50
QUICK_GOOD, QUICK_BAD = 10, 5
QUIET_S, QUICK_QUIET_S = 10.0, 1.0

SIDE, STEPS, TIMES_SLOWER = 256, 4, 10
"""Some 3 ms a run on one core, which is above what the health gate takes for noise, and ten times that."""

Release = Callable[[Path, int], Made]


def update_swaps(bench: Bench) -> None:
    """Good releases, one after another, under load."""
    count = QUICK_GOOD if bench.is_quick else GOOD
    _run(bench, "update.good", adder, adder, count, wanted="installed", may_answer=range(1, count + 2))


def update_rollbacks(bench: Bench) -> None:
    """Releases that are refused under load: by turns ten times slower, found out while it serves, and wrong."""
    count = QUICK_BAD if bench.is_quick else BAD
    _run(bench, "update.bad", _timed, _bad, count, wanted="refused", may_answer=range(1, count + 2, 2))


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "update_swaps": update_swaps,
    "update_rollbacks": update_rollbacks,
}


# ---- private --------------------------------------------------------------------------------------------------------


def _run(
    bench: Bench, key: str, first: Release, later: Release, count: int, *, wanted: str, may_answer: Collection[int]
) -> None:
    """Install the first release, put `count` later ones into the repository by turns, and count what clients got.

    may_answer: the versions that a client may ever see.
    """
    site, made, figures = UpdateSite(), bench.children.folder / "made", bench.figures
    others: list[str] = []
    with served(site) as url:
        daemon = following(bench, url, site.root)
        site.release(first(made / "1", 1))
        install(daemon)
        with CheckedLoad(CheckedRun(daemon.endpoint, MODEL)) as load:
            load.phase("without")
            time.sleep(QUICK_QUIET_S if bench.is_quick else QUIET_S)
            load.phase("during")
            for number in range(2, count + 2):
                site.release(later(made / str(number), number))
                started_s = time.perf_counter()
                action, reason = apply_updates(daemon)
                figures.add(f"{key}.took_s", time.perf_counter() - started_s)
                if action != wanted:
                    others.append(f"release {number} {action}: {reason}")
                if number % 25 == 1:
                    say(f"{key}: {number - 1} of {count}")
            seen = load.end()
        daemon.stop()
    _tell(bench, key, seen, others, may_answer)
    figures.add(f"{key}.done", count - len(others))


def _tell(
    bench: Bench, key: str, seen: Mapping[str, PhaseCount], others: list[str], may_answer: Collection[int]
) -> None:
    figures, (without, during) = bench.figures, (seen["without"], seen["during"])
    never_offered = sum(count for version, count in during.answers.items() if version not in may_answer)
    figures.add(f"{key}.unanswered", without.unanswered + during.unanswered + never_offered)
    figures.add(f"{key}.p50_ratio", during.p50_ms / without.p50_ms)
    figures.add(f"{key}.p99_ratio", during.p99_ms / without.p99_ms)
    figures.add(f"{key}.longest_ms", during.longest_ms)
    figures.add(f"{key}.took_p99_s", float(np.quantile(figures.values[f"{key}.took_s"], 0.99)))
    figures.note(
        key,
        f"{sum(during.answers.values()):,} requests answered rightly by {len(during.answers)} versions, {during.wrong} "
        f"wrongly, {never_offered} by versions that must not answer, {during.lost} lost, {during.stray} stray, failed: "
        f"{during.failed or 'none'}",
    )
    took_s = statistics.median(figures.values[f"{key}.took_s"])
    figures.note(
        key,
        f"p50 {without.p50_ms:.2f} ms and p99 {without.p99_ms:.2f} ms without updates, {during.p50_ms:.2f} and "
        f"{during.p99_ms:.2f} during them; one takes {took_s:.2f} s with 0.3 s of observation",
    )
    for sentence in others[:5]:
        figures.note(key, sentence)


def _timed(folder: Path, number: int, times: int = 1, says: float | None = None) -> Made:
    """x -> x + number, after work for nothing. says: what its golden output claims it adds."""
    data = onnx_models.slow(folder, float(number), SIDE, STEPS * times).read_bytes()
    claimed = np.float32(number if says is None else says)
    return onnx_release(data, {"x": X}, {"y": X + claimed}, model=MODEL, version=number, counter=number)


def _bad(folder: Path, number: int) -> Made:
    return _timed(folder, number, times=TIMES_SLOWER) if number % 2 else _timed(folder, number, says=number + 1.0)
