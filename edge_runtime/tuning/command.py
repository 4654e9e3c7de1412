"""Find and use the best settings for a model on this device: backend, precision, threads, instances, batch rows.

Each candidate is measured end to end: the real daemon, a client, random arrivals. --slo is the latency that must hold;
--accuracy-drop is the accuracy to give up for speed at most: of labels found (--labels), else of agreement with the
unchanged model, where the inputs can show it: one and the same answer to all of them must not pass (--accept-unjudged
chooses all the same). Without it, and with made-up inputs, only the unchanged model is chosen. Where the converters are
installed (the extra `convert`), int8 models are made and tried too.

Candidates meet by turns until the difference is settled, or the time is over; one that differs by less than three per
cent is equal. Writes a settled choice with its reasons into model.toml, the variant beside the model, and a picture of
rate against p99. What is not settled is written with --write-anyway only, and never what serves less than model.toml
does now. Results are kept: an interrupted tune goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.cli.arguments import UsageError, nearest, positive
from edge_runtime.cli.screen import Screen, ms_text, rate_text, size_text
from edge_runtime.config.endpoints import client_endpoint, state_folder
from edge_runtime.config.loading import load_config
from edge_runtime.config.settings import DEFAULT_MODELS
from edge_runtime.errors import ConfigError, EdgeRuntimeError, ModelNotFound
from edge_runtime.models.folder import ModelFolder, VersionFolder, select_versions
from edge_runtime.models.walk import scan
from edge_runtime.profiles.detect import detect
from edge_runtime.tuning.candidates import MEASURED, Candidate
from edge_runtime.tuning.options import TunedDevice, TuneOptions, parse_duration, parse_objective, parse_share
from edge_runtime.tuning.report import Row, Summary, accuracy_text, as_json, confidence_text, reasons, summarise
from edge_runtime.tuning.tables import Tuner, tune_table, tuner_of
from edge_runtime.tuning.tune import Tune, open_tune

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

DEFAULT_DROP = 0.005
"""With given inputs: half a percent, which int8 keeps for most networks of images."""

COLUMNS = (
    "backend", "precision", "threads", "instances", "rows", "requests/s", "p50 ms", "p99 ms", "of choice", "memory",
    "accuracy", "",
)  # fmt: skip
SHOWN_LOOKS = 6
"""Candidates of the race in the table, besides the best of each precision and what serves now; --json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tune`."""
    parser.add_argument("model", metavar="MODEL", help="its name in the models folder")
    parser.add_argument("--slo", metavar="pQ=T", required=True, help="the latency that must hold, for example p99=20ms")
    parser.add_argument("--accuracy-drop", metavar="D", help="accuracy to give up at most, for example 0.5%% "
                        "(default: that with --data, else nothing)")  # fmt: skip
    parser.add_argument("--accept-unjudged", action="store_true", help="choose also where the inputs cannot tell how "
                        "much accuracy is given up, because the model answers nearly all of them alike")  # fmt: skip
    parser.add_argument("--data", metavar="DIR", type=Path, help="inputs to compare on: a folder of .npy, .npz, "
                        ".json, pictures or texts (.txt), or one file")  # fmt: skip
    parser.add_argument(
        "--labels", metavar="F", type=Path, help="the class of each input: .npy, or text with a number a line"
    )
    parser.add_argument(
        "--scores", metavar="OUTPUT", help="the output that gives the class (default: the first that can)"
    )
    parser.add_argument("--time", metavar="T", default="10m", help="the time it may take (default 10m)")
    parser.add_argument("--version", metavar="N", type=positive, help="the version (default: the one served)")
    parser.add_argument("--output", metavar="F", type=Path, help="the picture (default: tune.svg beside model.toml)")
    parser.add_argument("--write-anyway", action="store_true", help="write the best so far where the search is not "
                        "settled, and a slower one where what serves now gives up too much")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--fresh", action="store_true", help="ignore kept results")
    parser.add_argument("--force", action="store_true", help="run even while a daemon serves on this device")
    place = parser.add_argument_group("device")
    place.add_argument("--config", metavar="F", type=Path, help="as for serve")
    place.add_argument("--models", metavar="DIR", help="as for serve")
    place.add_argument("--state", metavar="DIR", help="as for serve; keeps the results")
    place.add_argument("--profile", metavar="NAME", help="as for serve")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Measure, show, and write the choice."""
    from edge_runtime.tuning.applying import check_can_apply

    options = _options(arguments)
    device, models = _device(arguments)
    model, version = _model(models, arguments)
    if not arguments.dry_run:
        check_can_apply(model)
    if not arguments.force:
        _check_no_daemon()
    tuner = tuner_of(version)
    if tuner is not None:
        return _table_chosen(model, version, device, options, tuner=tuner, arguments=arguments, screen=screen)
    with (
        screen.progress(f"tune {model.name}", options.time_s) as progress,
        open_tune(model, version, device, options) as tune,
    ):
        try:
            tune.run(progress.show)
        except KeyboardInterrupt:
            progress.close()
            return _interrupted(tune, screen)
        progress.close()
        return _finished(tune, model, arguments, screen)


# ---- private --------------------------------------------------------------------------------------------------------


def _options(arguments: argparse.Namespace) -> TuneOptions:
    def option(parse: Callable[[str], Any], text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise UsageError(error.message) from None

    if arguments.labels is not None and arguments.data is None:
        raise UsageError("--labels says what inputs show; give the inputs with --data")
    drop = DEFAULT_DROP if arguments.data is not None else 0.0
    return TuneOptions(
        objective=option(parse_objective, arguments.slo),
        drop=drop if arguments.accuracy_drop is None else option(parse_share, arguments.accuracy_drop),
        time_s=option(parse_duration, arguments.time),
        data=arguments.data,
        labels=arguments.labels,
        scores=arguments.scores,
        is_fresh=arguments.fresh,
        accepts_unjudged=arguments.accept_unjudged,
    )


def _device(arguments: argparse.Namespace) -> tuple[TunedDevice, Path]:
    from edge_runtime.daemon.assemble import effective_profile

    said = {"models": arguments.models, "state": arguments.state, "profile": arguments.profile}
    config = load_config(arguments.config, said)
    facts = detect()
    return TunedDevice(facts, effective_profile(config, facts), config, state_folder(config.state)), Path(
        config.models or DEFAULT_MODELS
    )


def _model(models: Path, arguments: argparse.Namespace) -> tuple[ModelFolder, VersionFolder]:
    found = scan(models)
    model = found.models.get(arguments.model)
    if model is None:
        if models in found.unreadable:
            raise ModelNotFound("; ".join(map(str, found.problems)))
        there = ", ".join(found.models) or "none"
        hint = nearest(arguments.model, found.models)
        raise ModelNotFound(f"{models} has no model {arguments.model!r}{hint}; it has {there}; --models names another")
    numbers = select_versions(tuple(model.versions), model.settings.versions)
    number = arguments.version or (numbers[0] if numbers else 0)
    if number not in model.versions:
        raise ModelNotFound(
            f"{model.path} has no version {number}; it has {', '.join(map(str, model.versions)) or 'none'}"
        )
    return model, model.versions[number]


def _check_no_daemon() -> None:
    """Raise ConfigError where a daemon answers at the usual endpoint: it would take cores from the measurement."""
    from edge_runtime.doors.zmq.client import Client

    endpoint = client_endpoint(None)
    if not endpoint.startswith("ipc://"):
        return
    with Client(endpoint) as client:
        if not client.is_live():
            return
    raise ConfigError(
        f"a daemon serves at {endpoint}: its work would disturb the figures. Stop it meanwhile, or measure beside "
        "it with --force"
    )


def _table_chosen(
    model: ModelFolder,
    version: VersionFolder,
    device: TunedDevice,
    options: TuneOptions,
    *,
    tuner: tuple[Tuner, str],
    arguments: argparse.Namespace,
    screen: Screen,
) -> int:
    """Have the model's own kind choose its keys, show what it measured, and write the choice."""
    from edge_runtime.tuning.applying import apply_choice

    with screen.progress(f"tune {model.name}", options.time_s) as progress:
        choice = tune_table(model, version, device, options, tuner=tuner, show=progress.show)
        progress.close()
    written: list[Path] = []
    if choice.values and not arguments.dry_run:
        why = [f"{_today()}, {device.profile.name}: {sentence}" for sentence in choice.why]
        written = apply_choice(model, version.path, choice.values, (), why, table=tuner[1])
    if screen.wants_json:
        rows = [dict(zip(choice.columns, row, strict=True)) for row in choice.rows]
        about = {"model": model.name, "version": version.number, "profile": device.profile.name}
        screen.json(
            {**about, "table": tuner[1], "values": choice.values, "rows": rows, "written": [*map(str, written)]}
        )
    else:
        screen.table(choice.columns, choice.rows, right=choice.columns[:-1])
        for sentence in choice.why or (f"nothing keeps {options.objective}; nothing was written",):
            screen.line(sentence)
        for path in written:
            screen.line(f"written: {path}")
    return 0 if choice.values else EXIT_FAILED


def _interrupted(tune: Tune, screen: Screen) -> int:
    if tune.space is not None and tune.results.quick:
        _print(tune, summarise(tune.space, tune.results), [], screen)
    screen.note("interrupted; nothing was written; the same command goes on from here")
    return EXIT_INTERRUPTED


def _finished(tune: Tune, model: ModelFolder, arguments: argparse.Namespace, screen: Screen) -> int:
    from edge_runtime.tuning.applying import PICTURE_FILE, write_picture

    assert tune.space is not None
    summary = summarise(tune.space, tune.results)
    written: list[Path] = []
    is_written = summary.may_be_written(anyway=arguments.write_anyway)
    try:
        if summary.choice is not None and is_written and not arguments.dry_run:
            about = {"device": _device_text(tune), "data": _data_text(tune), "date": _today()}
            why = reasons(summary, tune.results, tune.options.objective, **about)
            written += tune.apply(summary.choice, why)
        picture = arguments.output or (model.path / PICTURE_FILE if is_written and not arguments.dry_run else None)
        if picture is not None and tune.results.full:
            write_picture(picture, _picture(tune, summary))
            written.append(picture)
    except (EdgeRuntimeError, OSError):
        if not screen.wants_json:  # the results are worth seeing all the same
            print_table(summary, screen)
        raise
    _print(tune, summary, written, screen)
    return 0 if is_written or (summary.choice is not None and arguments.dry_run) else EXIT_FAILED


def _picture(tune: Tune, summary: Summary) -> str:
    from edge_runtime.tuning.picture import draw, line_of

    fulls = sorted(tune.results.full.values(), key=lambda full: -full.rate)
    chosen = None if summary.choice is None else summary.choice.candidate
    lines = [line_of(each, _label(tune, each.candidate), is_chosen=each.candidate == chosen) for each in fulls]
    title = f"{tune.version.model} version {tune.version.number} on {_device_text(tune)}"
    return draw(title, tune.options.objective, lines)


def _label(tune: Tune, candidate: Candidate) -> str:
    layout = candidate.layout
    said = {"threads": layout.threads, "instances": layout.instances, "rows": layout.max_batch_rows}
    words = [f"{name} {value}" for name, value in said.items() if value is not None] or ["the daemon's layout"]
    precision = tune.results.ways[candidate.way].runs_in
    return f"{candidate.way.backend} {precision}, {', '.join(words)}"


def _print(tune: Tune, summary: Summary, written: list[Path], screen: Screen) -> None:
    assert tune.space is not None
    if screen.wants_json:
        about = {
            "model": tune.version.model,
            "version": tune.version.number,
            "device": _device_text(tune),
            "profile": tune.device.profile.name,
            "data": _data_text(tune),
        }
        files = [str(path) for path in written]
        screen.json({**about, **as_json(summary, tune.space), "notes": tune.notes, "written": files})
    else:
        print_table(summary, screen)
        _print_words(tune, summary, written, screen)


def print_table(summary: Summary, screen: Screen) -> None:
    """Print a line for each candidate; a dash stands for what was not measured."""
    full = [row for row in summary.rows if row.is_full]
    looks = summary.raced_rows(SHOWN_LOOKS)
    failed = [row for row in summary.rows if not row.is_full and not row.rate]
    screen.table(COLUMNS, [_cells(row, summary) for row in (*full, *looks, *failed)], right=COLUMNS[2:10])
    if looks:
        screen.line("~ by turns, up to 16 requests in flight; p50 one at a time; compare by the column of choice")
    if any(row.is_cut and row.rate for row in full):
        screen.line("> the time was over before its highest rate was found; the same command with more --time finds it")
    if any(row.candidate.layout == MEASURED for row in (*full, *looks)):
        screen.line("- left to the daemon, which measures the best value")


def _of_choice_text(row: Row) -> str:
    """A candidate's rate as a share of the choice's: the likely bounds."""
    if row.of_choice is None:
        return "-"
    low, high = row.of_choice
    return f"{low:.0%} to {high:.0%}"


def _cells(row: Row, summary: Summary) -> list[str]:
    way, layout = row.candidate.way, row.candidate.layout
    is_known = bool(row.rate)
    numbers = ("-" if each is None else str(each) for each in (layout.threads, layout.instances, layout.max_batch_rows))
    return [
        " ".join(filter(None, (way.backend, way.device if way.device != "CPU" else ""))),
        row.runs_in or way.precision or "as it is",
        *numbers,
        (">" if row.is_cut else "" if row.is_full else "~") + rate_text(row.rate) if is_known else "-",
        ms_text(row.p50_s * 1e3) if is_known and row.p50_s else "-",
        ms_text(row.p99_s * 1e3) if is_known and row.p99_s else "-",
        _of_choice_text(row),
        size_text(row.memory_bytes) if row.memory_bytes else "-",
        accuracy_text(row.accuracy),
        ", ".join(filter(None, (_merits(row, summary), "now" if row.is_now else ""))),
    ]


def _merits(row: Row, summary: Summary) -> str:
    return summary.merits_of(row) if row.verdict == "front" else row.verdict


def _print_words(tune: Tune, summary: Summary, written: list[Path], screen: Screen) -> None:
    screen.line()
    for note in tune.notes:
        screen.note(note)
    if summary.unjudged:
        screen.note(summary.unjudged)
    choice = summary.choice
    if choice is None:
        screen.note(_why_none(tune, summary))
        return
    gain = "" if summary.gain is None else f", {summary.gain:.2f} times the rate without tuning"
    rate = f"{'at least ' if choice.is_cut else ''}{rate_text(choice.rate)} requests/s within {tune.options.objective}"
    screen.line(f"{_label(tune, choice.candidate)}: {rate}{gain}; {confidence_text(summary)}")
    if not written and (doubt := summary.doubt()):
        screen.note(doubt)
    if summary.left_out:
        with_data = "" if tune.options.data is not None else " and --data DIR"
        screen.note(f"{', '.join(summary.left_out)} looked quicker; --accuracy-drop 0.5%{with_data} lets it be chosen")
    for path in written:
        screen.line(f"written: {path}")


def _why_none(tune: Tune, summary: Summary) -> str:
    nearest_ = min((row.p50_s for row in summary.rows if row.p50_s), default=None)
    if not tune.results.full and nearest_ is not None and nearest_ <= tune.options.objective.limit_s:
        return "the time was over before any candidate was measured at the objective; give it more with --time"
    told = "" if nearest_ is None else f"; one request alone takes at least {ms_text(nearest_ * 1e3)} ms"
    return f"nothing keeps {tune.options.objective} here{told}. Nothing was written"


def _device_text(tune: Tune) -> str:
    facts = tune.device.facts
    name = facts.device_tree_model or facts.cpu_model or facts.architecture
    cores = tune.device.profile.limits.cores
    return f"{name}, {cores} core{'s' if cores > 1 else ''} (profile {tune.device.profile.name})"


def _data_text(tune: Tune) -> str:
    samples = tune.samples
    if samples is None:
        return ""
    count = len(samples.judging.inputs)
    what = ("made-up " if samples.is_made_up else "") + ("input" if count == 1 else "inputs")
    return f"{count} {what}" + (" with labels" if samples.labels is not None else "")


def _today() -> str:
    return dt.datetime.now(dt.timezone.utc).date().isoformat()
