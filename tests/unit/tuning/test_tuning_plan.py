"""The measurements of a tune, their order, and its choice: decided without measuring anything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import ConfigError
from edge_runtime.profiles.facts import Facts
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.tuning.candidates import (
    MEASURED,
    PLAIN,
    Candidate,
    Offer,
    ThreadLayout,
    Way,
    row_layouts,
    thread_layouts,
    ways,
)
from edge_runtime.tuning.options import Objective, parse_duration, parse_objective, parse_share
from edge_runtime.tuning.plan import (
    FINALISTS,
    MAX_FULL_TAKES,
    MAX_PROBES,
    OUTDOES,
    PRECISION,
    Merits,
    RateSearch,
    Space,
    TuneStep,
    choose,
    confidence,
    front_of,
    is_eligible,
    is_settled,
    next_step,
    pareto_front,
)
from edge_runtime.tuning.race import MIN_ROUNDS, SETTLED, with_slice
from edge_runtime.tuning.report import summarise
from edge_runtime.tuning.results import Accuracy, FullMeasurement, QuickLook, Slice, TuneResults, WayResult, with_full

ORT, VINO = BackendChoice(name="onnxruntime", device="CPU"), BackendChoice(name="openvino", device="CPU")
BOTH = {"onnxruntime": Offer(True, frozenset(("int8",))), "openvino": Offer(True, frozenset(("int8",)))}
SLO = Objective(0.99, 0.02)


def facts(*flags: str) -> Facts:
    return Facts(
        architecture="x86_64", cpu_flags=flags, cores=2, cores_online=2, memory_bytes=None,
        memory_total_bytes=None,
    )  # fmt: skip


# ---- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "objective"),
    [("p99=20ms", Objective(0.99, 0.02)), ("P95=1.5s", Objective(0.95, 1.5)), (" p50=0.5ms ", Objective(0.5, 0.0005))],
)
def test_an_objective_is_a_quantile_and_a_time(text: str, objective: Objective) -> None:
    assert parse_objective(text) == objective
    assert parse_objective(str(objective)) == objective


@pytest.mark.parametrize(
    "text", ["", "20ms", "p99=20", "p98=20ms", "p99=0ms", "p99=-1ms", "p99=1e3ms", "p99=20m", "p99=9999s"]
)
def test_a_text_that_is_not_an_objective_is_refused_with_the_wanted_form(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo: got"):
        parse_objective(text)


@pytest.mark.parametrize(("text", "share"), [("0.5%", 0.005), ("0", 0.0), ("0.01", 0.01), ("100%", 1.0)])
def test_a_drop_is_a_share(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "-1%", "101%", "1.5", "half", "nan", "%"])
def test_a_text_that_is_not_a_share_is_refused_with_the_wanted_form(text: str) -> None:
    with pytest.raises(ConfigError, match="--accuracy-drop: got"):
        parse_share(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    for wrong in ("", "10", "0s", "-1m", "10d", "169h", "9" * 400 + "h"):
        with pytest.raises(ConfigError, match="--time: got"):
            parse_duration(wrong)


# ---- candidates -----------------------------------------------------------------------------------------------------


def test_the_way_that_serves_without_tuning_is_tried_first_then_the_ways_usually_quickest() -> None:
    found = [way.key for way in ways([ORT, VINO], BOTH, facts("avx512_bf16"))]
    assert found == [
        "onnxruntime-cpu-plain", "onnxruntime-cpu-int8", "openvino-cpu-int8", "openvino-cpu-bf16", "openvino-cpu-plain",
    ]  # fmt: skip


def test_a_precision_that_the_cpu_only_emulates_is_not_tried() -> None:
    offers = {"openvino": Offer(True)}
    assert [way.precision for way in ways([VINO], offers, facts("avx2"))] == [PLAIN]
    assert [way.precision for way in ways([VINO], offers, facts("asimdhp", "bf16"))] == [PLAIN, "f16", "bf16"]


def test_a_gpu_is_tried_in_half_precision_too() -> None:
    gpu = BackendChoice(name="openvino", device="GPU.1")
    assert [way.precision for way in ways([gpu], {"openvino": Offer(True)}, facts())] == [PLAIN, "f16"]


def test_a_backend_that_is_not_usable_is_not_tried() -> None:
    assert ways([ORT, VINO], {"onnxruntime": Offer(True)}, facts()) == [Way("onnxruntime", "CPU")]
    assert ways([ORT], {}, facts()) == []


@given(st.integers(1, 64))
def test_no_layout_takes_more_cores_than_there_are(cores: int) -> None:
    layouts = thread_layouts(cores)
    assert layouts[0] == MEASURED
    assert len(set(layouts)) == len(layouts)
    for layout in layouts[1:]:
        assert layout.threads is not None
        assert layout.instances is not None
        assert 1 <= layout.threads * layout.instances <= cores


@given(st.integers(1, 300))
def test_no_batch_limit_is_above_the_hard_one(max_rows: int) -> None:
    limits = [layout.max_batch_rows for layout in row_layouts(ThreadLayout(1, 2), max_rows)]
    assert all(rows is not None and 1 <= rows <= max_rows for rows in limits)


# ---- the order of measurements --------------------------------------------------------------------------------------

WAYS = tuple(ways([ORT, VINO], BOTH, facts("avx512_bf16")))
SPEEDS = st.dictionaries(st.sampled_from(WAYS), st.floats(0.1, 1e4), min_size=len(WAYS))
OUTCOMES = st.sampled_from(["ok", "crashes", "cannot be served", "too slow", "inexact"])


def exact(drop: float = 0.0) -> Accuracy:
    return Accuracy(100, drop, drop, agreement=1 - drop)


class Machine:
    """Answers steps as a device would whose ways have these speeds and troubles."""

    def __init__(self, speeds: dict[Way, float], troubles: dict[Way, str]) -> None:
        self.speeds, self.troubles = speeds, troubles
        self.known = TuneResults({}, {}, {})
        self.taken: list[TuneStep] = []

    def take(self, step: TuneStep) -> None:
        assert step not in self.taken
        self.taken.append(step)
        way, candidate = step.candidate.way, step.candidate
        trouble = self.troubles.get(way, "ok")
        rate = self.speeds[way] * (1 + 0.1 * (candidate.layout.threads or 0))
        if step.kind == "way":
            reason = "ended by SIGSEGV" if trouble == "crashes" else ""
            drop = 0.2 if trouble == "inexact" else 0.001
            drop = 0.0 if way.precision == PLAIN else drop
            self.known.ways[way] = WayResult(way, reason, way.precision or "f32", "", exact(drop))
        elif step.kind == "quick":
            reason = "was not loaded" if trouble == "cannot be served" else ""
            alone_s = 1.0 if trouble == "too slow" else 0.001
            self.known.quick[candidate] = QuickLook(candidate, reason, alone_s, 0.0 if reason else rate)
        elif step.kind == "slice":
            look = self.known.quick[candidate]
            slices = with_slice(look.slices, Slice(step.round, rate))
            self.known.quick[candidate] = msgspec.structs.replace(look, slices=slices)
        else:
            self.known.full[candidate] = FullMeasurement(candidate, "", rate * 0.9, 0.001, 0.01, 1)

    def run(self, space: Space, steps: int | None = None) -> None:
        while (step := next_step(space, self.known)) is not None and steps != len(self.taken):
            self.take(step)


def space(drop: float = 0.005, max_rows: int = 64) -> Space:
    return Space(WAYS, 4, max_rows, SLO, drop)


@settings(max_examples=15)
@given(SPEEDS, st.dictionaries(st.sampled_from(WAYS), OUTCOMES), st.sampled_from([0.0, 0.005, 1.0]))
def test_a_tune_ends_whatever_fails_and_measures_nothing_twice(
    speeds: dict[Way, float], troubles: dict[Way, str], drop: float
) -> None:
    machine = Machine(speeds, troubles)
    machine.run(space(drop))
    assert len(machine.taken) <= len(WAYS) * 20 * MIN_ROUNDS
    assert is_settled(space(drop), machine.known)
    assert set(machine.known.ways) == set(WAYS)
    for full in machine.known.full.values():
        assert is_eligible(machine.known.ways[full.candidate.way], drop)
    assert len(machine.known.full) <= FINALISTS + 1


@settings(max_examples=15)
@given(SPEEDS, st.dictionaries(st.sampled_from(WAYS), OUTCOMES))
def test_with_nothing_to_give_up_the_model_as_it_is_is_chosen_at_its_quickest(
    speeds: dict[Way, float], troubles: dict[Way, str]
) -> None:
    machine = Machine(speeds, {way: each for way, each in troubles.items() if way != WAYS[0]})
    machine.run(space(0.0))
    chosen = choose(space(0.0), machine.known)
    assert chosen is not None
    assert chosen.candidate.way.precision == PLAIN
    assert chosen.rate >= machine.known.full[space(0.0).baseline].rate * 0.97


@settings(max_examples=15)
@given(SPEEDS, st.dictionaries(st.sampled_from(WAYS), OUTCOMES), st.integers(1, 60))
def test_a_tune_cut_short_finishes_with_the_best_of_what_it_has_seen(
    speeds: dict[Way, float], troubles: dict[Way, str], steps: int
) -> None:
    machine = Machine(speeds, {way: each for way, each in troubles.items() if way != WAYS[0]})
    machine.run(space(), max(steps, 2))
    while (step := next_step(space(), machine.known, is_hurried=True)) is not None:
        machine.take(step)
    assert choose(space(), machine.known) is not None
    hurried = [step for step in machine.taken if step.kind == "full"]
    assert len(hurried) <= FINALISTS + 1


def test_other_layouts_are_tried_of_ways_that_could_still_lead() -> None:
    machine = Machine({way: 100.0 if place < 3 else 10.0 for place, way in enumerate(WAYS)}, {})
    machine.run(space())
    tried = {step.candidate.way for step in machine.taken if step.candidate.layout != MEASURED}
    assert tried == set(WAYS[:3])


def test_the_candidate_in_model_toml_takes_part_though_nothing_else_would_try_it() -> None:
    now = Candidate(WAYS[0], ThreadLayout(7, 3, 5))
    here = Space(WAYS, 4, 64, SLO, 0.005, now)
    machine = Machine({way: 100.0 if place else 1.0 for place, way in enumerate(WAYS)}, {})
    machine.run(here)
    assert len(machine.known.quick[now].slices) >= MIN_ROUNDS
    assert now in machine.known.full


def test_the_way_that_serves_now_stays_where_nothing_is_surely_quicker() -> None:
    now = Candidate(WAYS[3], ThreadLayout(2, 2))
    here = Space(WAYS, 4, 1, SLO, 1.0, now)
    machine = Machine(dict.fromkeys(WAYS, 100.0), {})
    machine.speeds[WAYS[3]] = 103.0
    machine.run(here)
    chosen = choose(here, machine.known)
    assert chosen is not None
    assert chosen.candidate.way == now.way


@settings(max_examples=15)
@given(SPEEDS, st.integers(1, 60))
def test_a_race_cut_short_is_not_settled(speeds: dict[Way, float], steps: int) -> None:
    machine = Machine(speeds, {})
    machine.run(space(), steps)
    pending = next_step(space(), machine.known)
    racing = pending is not None and pending.kind != "full"
    assert is_settled(space(), machine.known) is not racing
    if not racing:
        assert confidence(space(), machine.known) >= SETTLED


def test_a_model_that_does_not_batch_is_tried_without_batch_limits() -> None:
    machine = Machine(dict.fromkeys(WAYS, 1.0), {})
    machine.run(space(max_rows=1))
    assert all(step.candidate.layout.max_batch_rows is None for step in machine.taken)


# ---- accuracy that may be given up ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "accuracy", "drop", "eligible"),
    [
        ("int8", exact(0.004), 0.005, True),
        ("int8", exact(0.006), 0.005, False),
        ("int8", exact(0.0), 0.0, False),
        (PLAIN, exact(0.0), 0.0, True),
        ("int8", Accuracy(100, 9, 9, 0.5, correct=0.98, reference_correct=0.984), 0.005, True),
        ("int8", Accuracy(100, 0, 0, 1.0, correct=0.97, reference_correct=0.984), 0.005, False),
        ("int8", Accuracy(100, 0.5, 0.002), 0.005, True),
        ("int8", Accuracy(100, 0.5, 0.02), 0.005, False),
        ("int8", Accuracy(100, 0.5, 0.002, spread_error=0.77), 0.005, False),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=1, constant_drop=0.0), 0.005, False),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=2, constant_drop=0.005), 0.005, False),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=2, constant_drop=0.02), 0.005, True),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=1, constant_drop=0.0, is_accepted=True), 0.005, True),
        ("int8", Accuracy(100, 0, 0, 0.9, distinct=1, constant_drop=0.0, is_accepted=True), 0.005, False),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=1, constant_drop=0.0), 1.0, True),
        (PLAIN, Accuracy(100, 0, 0, 1.0, distinct=1, constant_drop=0.0), 0.005, True),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=1, spread_error=0.05, constant_drop=0.0), 0.005, True),
        ("int8", Accuracy(100, 0, 0, 1.0, distinct=1, spread_error=0.1, constant_drop=0.0), 0.005, False),
    ],
)
def test_an_engine_may_be_chosen_within_the_drop(
    precision: str, accuracy: Accuracy, drop: float, eligible: bool
) -> None:
    assert is_eligible(WayResult(Way("openvino", "CPU", precision), accuracy=accuracy), drop) is eligible


def test_labels_found_more_often_than_by_the_model_itself_are_not_a_drop() -> None:
    assert Accuracy(10, 0, 0, 0.9, correct=1.0, reference_correct=0.9).drop == 0.0


# ---- the choice -----------------------------------------------------------------------------------------------------

MERITS = st.lists(st.builds(Merits, st.floats(0, 1e4), st.floats(0, 1), st.integers(0, 1 << 30)), max_size=12)


@given(MERITS)
def test_nothing_beats_what_is_on_the_front_and_something_beats_all_else(merits: list[Merits]) -> None:
    front = pareto_front(merits)
    for place, one in enumerate(merits):
        assert (place in front) is not any(other.beats(one) for other in merits)
    assert bool(front) is bool(merits)


def known_of(*fulls: FullMeasurement, rates: dict[Candidate, float] | None = None) -> TuneResults:
    """Full measurements after a race of ten calm rounds with these rates, else with those of the measurements."""
    results = {f.candidate.way: WayResult(f.candidate.way, "", "", "", exact(0.001)) for f in fulls}
    for way in results:
        if way.precision == PLAIN:
            results[way] = WayResult(way, "", "f32", "", exact())
    quick = {}
    for full in fulls:
        rate = (rates or {}).get(full.candidate, full.rate)
        slices = tuple(Slice(number, rate) for number in range(1, 11))
        quick[full.candidate] = QuickLook(full.candidate, "", 0.001, rate, slices=slices)
    return TuneResults(results, quick, {f.candidate: f for f in fulls})


def test_of_rates_nearly_equal_what_serves_now_wins() -> None:
    plain, int8 = FullMeasurement(Candidate(WAYS[0]), "", 99.0), FullMeasurement(Candidate(WAYS[1]), "", 100.0)
    assert choose(space(), known_of(plain, int8)) == plain
    slower = FullMeasurement(plain.candidate, "", 95.0)
    assert choose(space(), known_of(slower, int8)) == int8


def test_of_equals_the_one_that_says_least_wins() -> None:
    said = FullMeasurement(Candidate(WAYS[2], ThreadLayout(1, 4, 16)), "", 100.0)
    unsaid = FullMeasurement(Candidate(WAYS[2]), "", 99.0)
    assert choose(space(), known_of(said, unsaid)) == unsaid


def test_no_race_decides_over_a_rate_at_the_objective_that_contradicts_it() -> None:
    first, second = FullMeasurement(Candidate(WAYS[1]), "", 80.0), FullMeasurement(Candidate(WAYS[2]), "", 100.0)
    rates = {first.candidate: 200.0, second.candidate: 150.0}
    for rate, chosen in ((100.0, first), (93.0, first), (92.0, second), (80.0, second), (50.0, second)):
        measured = msgspec.structs.replace(first, rate=rate)
        found = choose(space(), known_of(measured, second, rates=rates))
        assert found is not None
        assert found.candidate == chosen.candidate


def test_a_search_cut_short_measures_the_leader_of_its_race_though_others_were_measured_before() -> None:
    earlier, leader = FullMeasurement(Candidate(WAYS[0]), "", 80.0), FullMeasurement(Candidate(WAYS[2]), "", 90.0)
    known = known_of(earlier, leader, rates={earlier.candidate: 100.0, leader.candidate: 200.0})
    del known.full[leader.candidate]
    assert next_step(space(), known, is_hurried=True) == TuneStep("full", leader.candidate)


def test_without_a_race_the_quickest_at_the_objective_is_chosen() -> None:
    first, now = FullMeasurement(Candidate(WAYS[1]), "", 80.0), FullMeasurement(Candidate(WAYS[2]), "", 90.0)
    here = Space(WAYS, 4, 64, SLO, 0.005, now.candidate)
    known = known_of(first, now)
    for each, rate in ((first.candidate, 300.0), (now.candidate, 200.0)):
        known.quick[each] = QuickLook(each, "", 0.001, rate)
    assert choose(here, known) == now
    assert choose(space(), known) == now
    known.full[first.candidate] = msgspec.structs.replace(first, rate=100.0)
    assert choose(space(), known) == known.full[first.candidate]


RATES = st.floats(0.1, 1e4)
SLICED = st.lists(st.tuples(RATES, st.floats(0.0, 0.9)), max_size=12)
MEASURED_RATES = st.one_of(st.none(), st.just(0.0), RATES)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(SLICED, MEASURED_RATES, st.booleans()), min_size=len(WAYS), max_size=len(WAYS)),
    st.sampled_from([0.0, 0.005, 1.0]), st.booleans(), st.integers(0, len(WAYS) - 1),
)  # fmt: skip
def test_no_choice_is_written_that_its_table_contradicts_or_that_is_unsure_whatever_was_measured(
    measured: list[tuple[list[tuple[float, float]], float | None, bool]], drop: float, anyway: bool, now: int
) -> None:
    known = TuneResults({}, {}, {})
    for way, (slices, rate, is_exact) in zip(WAYS, measured, strict=True):
        candidate = Candidate(way)
        loss = exact() if way.precision == PLAIN or is_exact else exact(0.2)
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", loss)
        taken = tuple(Slice(number, each, 0.0, others) for number, (each, others) in enumerate(slices, 1))
        known.quick[candidate] = QuickLook(candidate, "", 0.001, 1.0, slices=taken)
        if rate is not None:
            known.full[candidate] = FullMeasurement(candidate, "", rate, 0.001, 0.01, 1)
    here = Space(WAYS, 1, 1, SLO, drop, Candidate(WAYS[now]))
    summary = summarise(here, known)
    if not summary.may_be_written(anyway=anyway):
        assert summary.choice is None or summary.doubt()
        return
    choice = summary.choice
    assert choice is not None
    assert is_eligible(known.ways[choice.candidate.way], drop)
    others = [each.rate for each in known.full.values() if is_eligible(known.ways[each.candidate.way], drop)]
    assert choice.rate * OUTDOES >= max(others)
    assert anyway or summary.confidence >= SETTLED


def test_int8_that_serves_less_than_f32_in_its_own_table_is_not_chosen_by_a_race_that_is_not_sure() -> None:
    f32, int8 = FullMeasurement(Candidate(WAYS[0]), "", 580.0), FullMeasurement(Candidate(WAYS[1]), "", 513.0)
    known = known_of(f32, int8, rates={f32.candidate: 500.0, int8.candidate: 900.0})
    for each, look in known.quick.items():
        known.quick[each] = msgspec.structs.replace(look, slices=look.slices[:2])
    here = Space((WAYS[0], WAYS[1]), 1, 1, SLO, 1.0)
    summary = summarise(here, known)
    assert (summary.choice, summary.confidence) == (f32, 0.0)
    assert not summary.may_be_written(anyway=False)


def test_a_choice_below_another_at_the_objective_is_measured_again_and_not_written_while_it_stays_below() -> None:
    f32, int8 = FullMeasurement(Candidate(WAYS[0]), "", 580.0), FullMeasurement(Candidate(WAYS[1]), "", 513.0)
    known = known_of(f32, int8, rates={f32.candidate: 500.0, int8.candidate: 900.0})
    here = Space((WAYS[0], WAYS[1]), 1, 1, SLO, 1.0)
    for layout in thread_layouts(1):
        for way in here.ways:
            known.quick.setdefault(Candidate(way, layout), QuickLook(Candidate(way, layout), "was not loaded"))
    assert (choose(here, known), is_settled(here, known)) == (f32, False)
    for takes in range(1, MAX_FULL_TAKES):
        assert next_step(here, known) == TuneStep("full", int8.candidate)
        known.full[int8.candidate] = with_full(known.full[int8.candidate], int8)
        assert known.full[int8.candidate].takes == takes + 1
    assert next_step(here, known) is None
    summary = summarise(here, known)
    assert (summary.choice, summary.overruled) == (f32, known.full[int8.candidate])
    assert not summary.may_be_written(anyway=False)
    assert "(580.0 requests/s to 513.0): nothing is written" in summary.doubt()
    quicker = msgspec.structs.replace(int8, rate=900.0)
    known.full[int8.candidate] = with_full(int8, quicker)
    assert summarise(here, known).may_be_written(anyway=False)


def test_nothing_is_chosen_where_nothing_keeps_the_objective() -> None:
    known = known_of(FullMeasurement(Candidate(WAYS[0]), "", 0.0), FullMeasurement(Candidate(WAYS[1]), "crashed"))
    assert choose(space(), known) is None
    assert front_of([FullMeasurement(Candidate(WAYS[0]), "", 0.0)], known_of()) == set()


# ---- the highest rate -----------------------------------------------------------------------------------------------


@given(st.floats(0.5, 1e5), st.floats(0.02, 20.0))
def test_the_highest_rate_is_found_within_a_few_probes(guess: float, share: float) -> None:
    limit = guess * share
    search, probes = RateSearch(guess), 0
    while (rate := search.next_rate()) is not None:
        probes += 1
        search.record(rate, is_met=rate <= limit)
    assert probes <= MAX_PROBES
    assert limit / (PRECISION * 1.2) <= search.best <= limit


def test_a_rate_that_nothing_keeps_is_given_up() -> None:
    search, probes = RateSearch(100.0), 0
    while (rate := search.next_rate()) is not None:
        search.record(rate, is_met=False)
        probes += 1
    assert (search.best, probes) == (0.0, MAX_PROBES)
