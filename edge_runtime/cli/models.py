"""List the models of a running daemon, show what one takes and gives, try one, load and unload.

list shows every version with its state and the reason of a failure, and each file of the models folder that is not
served, with what it lacks. show prints how a picture becomes the tensor, and
what each output answers, where model.toml declares it. load and unload return when they are done.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.cli.actions import action_of, add_actions, run_action
from edge_runtime.cli.arguments import UsageError, positive
from edge_runtime.cli.connection import connected, connected_early, connected_to_control
from edge_runtime.cli.screen import Screen, shape_text, size_text
from edge_runtime.errors import TensorMismatch
from edge_runtime.messages import TEXT

COLUMNS = ("name", "version", "state", "backend", "device", "precision", "mode", "memory", "host", "restarts", "reason")

CELL_CHARACTERS = 60
"""A longer reason would make the table wider than a terminal: its beginning stands there, the whole below."""

_ERRORS = ("max_error", "mean_error", "spread_error", "distinct", "agreement")
"""Of an output in a conversion's report."""

BATCHES = {None: "", True: "yes, axis 0 is rows", False: "no, requests run alone"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `models` and their options."""
    parsers = add_actions(
        parser, "models", own={"try": "ask a model with a picture, and draw the answer, or with a prompt"}
    )
    parsers["try"].add_argument("model", metavar="MODEL", help="the model's name")
    parsers["try"].add_argument(
        "picture", metavar="PICTURE", type=Path, nargs="?", help="a JPEG, PNG, WebP, BMP or GIF"
    )
    parsers["try"].add_argument("--prompt", metavar="TEXT", help="in its place: what a language model goes on with")
    parsers["try"].add_argument("--version", metavar="N", type=positive, help="one version")
    parsers["try"].add_argument("--save", metavar="FILE", type=Path, help="where the drawn picture goes")
    parsers["list"].add_argument("--names", action="store_true", help="names only, one a line")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action; 0 when it is done."""
    match action_of(arguments, "models", "try MODEL PICTURE"):
        case "list":
            _list(arguments, screen)
        case "show":
            _show(arguments, screen)
        case "try":
            _try(arguments, screen)
        case "load" | "unload" as action:
            _load_or_unload(action, arguments, screen)
        case _:
            run_action(arguments, "models", screen)
    return 0


def print_models(models: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """Print the table of `models list`, without empty columns, and long reasons below.

    host: its process, and how many models share it where several do.
    """
    rows = [[_cell(entry, column) for column in COLUMNS] for entry in models]
    kept = [index for index, column in enumerate(COLUMNS) if any(row[index] for row in rows) or column == "name"]
    screen.table(
        [COLUMNS[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        right=("version", "memory", "host", "restarts"),
    )
    for entry in models:
        reason = str(entry.get("reason") or "")
        if not _fits(reason):
            what = str(entry.get("path") or f"{entry['name']} {entry.get('version') or ''}".rstrip())
            screen.line()
            screen.line(reason if reason.startswith(what) else f"{what}: {reason}")


def _list(arguments: argparse.Namespace, screen: Screen) -> None:
    with connected_early(arguments) as client:
        models = client.models()
    if screen.wants_json:
        screen.json(models)
    elif arguments.names:
        for name in sorted({str(entry["name"]) for entry in models if entry.get("state") != "not_served"}):
            screen.line(name)
    elif models:
        print_models(models, screen)
    else:
        screen.line("The daemon's models folder is empty: put a model at <models>/<name>/1/model.onnx.")


def _show(arguments: argparse.Namespace, screen: Screen) -> None:
    # Completion asks for the list of models, and waits for its imports.
    from edge_runtime.cli import answers as pictures

    with connected(arguments) as client:
        metadata = client.metadata(arguments.model, arguments.version)
    if screen.wants_json:
        screen.json(metadata)
        return
    screen.heading(str(metadata.get("name", arguments.model)))
    screen.fields(
        {
            "version": str(metadata.get("version", "")),
            "versions": ", ".join(map(str, metadata.get("versions", ()))),
            "platform": str(metadata.get("platform", "")),
            "batches": BATCHES[metadata.get("batches")],
            "most rows": str(metadata.get("max_batch_rows", "")),
            "largest tensor": size_text(metadata.get("max_frame_bytes")),
        }
    )
    rows = [
        [kind, str(spec["name"]), str(spec["datatype"]), shape_text(spec["shape"])]
        for kind, key in (("input", "inputs"), ("output", "outputs"))
        for spec in metadata.get(key, ())
    ]
    screen.line()
    screen.table(("", "name", "datatype", "shape"), rows)
    if numbers := metadata.get("language"):
        screen.line()
        screen.fields({str(key).replace("_", " "): _figure(value) for key, value in numbers.items()})
    _print_pipeline(metadata.get("pipeline"), screen)
    pictures.print_steps(metadata, screen)
    _print_conversion(metadata.get("conversion"), screen)


def _print_pipeline(fields: Mapping[str, Any] | None, screen: Screen) -> None:
    """Draw a pipeline: its way in a line, then what each step asks and reads."""
    if not fields:
        return
    screen.line()
    screen.line(_way_text(fields))
    screen.line()
    screen.table(("step", "asks", "given", "runs"), _step_rows(fields))
    screen.line()
    screen.table(("output", "from"), _output_rows(fields))


def _way_text(fields: Mapping[str, Any]) -> str:
    """The steps in a line, those that run side by side in brackets."""
    levels = [f"[{' | '.join(level)}]" if len(level) > 1 else level[0] for level in fields["levels"]]
    return " → ".join(("input", *levels, "output"))


def _step_rows(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each step: its name, what it asks, what that is given, and when it runs."""
    return [(str(step["name"]), _asked(step), _given_text(step["inputs"]), _runs(step)) for step in fields["steps"]]


def _output_rows(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each output: its name, and the place that it comes from."""
    return [(str(name), str(place)) for name, place in fields["outputs"].items()]


def _asked(step: Mapping[str, Any]) -> str:
    if "python" in step:
        name = str(step["python"])
        return f"steps.py:{name}" if name.isidentifier() else name
    version = f" version {step['version']}" if "version" in step else ""
    return f"model {step['model']}{version}"


def _given_text(inputs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {place}" for name, place in inputs.items())


def _runs(step: Mapping[str, Any]) -> str:
    words: list[str] = []
    if "map" in step:
        words.append(f"for each of {', '.join(step['map'])}")
    if "crop" in step:
        words.append(f"cut out of {step['crop']['picture']}")
    if "when" in step:
        words.append(f"when {step['when']}")
    return ", ".join(words)


def _print_conversion(report: dict[str, Any] | None, screen: Screen) -> None:
    """Tell the source of the model's file, and how near the two are."""
    if not report:
        return
    screen.line()
    screen.fields(
        {
            "converted from": f"{report.get('source')}, {report.get('source_format')}",
            "compared with": f"{report.get('compared_with')}, on {report.get('compared_on')}",
            "tolerance": str(report.get("tolerance")),
        }
    )
    outputs = [[str(each["name"]), *(_figure(each.get(key)) for key in _ERRORS)] for each in report.get("outputs", ())]
    screen.table(("output", "largest error", "mean error", "of spread", "answers", "same answer"), outputs)
    for sentence in report.get("unjudged") or ():
        screen.line(sentence)


def _figure(found: float | None) -> str:
    if found is None:
        return ""
    return f"{found:,}" if isinstance(found, int) else f"{found:.2g}"


def _try(arguments: argparse.Namespace, screen: Screen) -> None:
    """Ask with one picture: how it was read, what was seen, and a drawn copy. With a prompt: what is written."""
    if (arguments.picture is None) == (arguments.prompt is None):
        got = "neither" if arguments.picture is None else "both"
        raise UsageError(f"models try: got {got}; wanted PICTURE, or --prompt TEXT for a language model")
    if arguments.prompt is not None:
        _try_prompt(arguments, screen)
        return
    from edge_runtime.cli import answers as pictures
    from edge_runtime.client.core import declared_steps, picture_input_name

    (file,) = pictures.files_of([arguments.picture])[:1]
    to: Path | None = arguments.save
    if to is not None:
        pictures.check_draw("--save", to, is_alone=True)
    with connected(arguments) as client:
        metadata = client.metadata(arguments.model, arguments.version)
        steps = declared_steps(metadata)
        if not picture_input_name(metadata):
            raise TensorMismatch(pictures.why_none(metadata))
        result = client.infer(arguments.model, picture=file, version=arguments.version)
    saved = [] if to is None else [pictures.draw_answer(file, result, steps, to, is_alone=True)]
    if screen.wants_json:
        screen.json({**pictures.answer_json(result, steps), "saved": [str(path) for path in saved]})
        return
    pictures.print_answer(result, screen, steps)
    for path in saved:
        screen.line(f"saved {path}")


def _try_prompt(arguments: argparse.Namespace, screen: Screen) -> None:
    """Ask a language model: its text as it comes, and how quick it was."""
    from edge_runtime.cli.written import WrittenText, check_writes, write_parts

    if arguments.save is not None:
        raise UsageError("--save is of a drawn picture; leave it out beside --prompt")
    written = WrittenText()
    with connected(arguments) as client:
        check_writes(client.metadata(arguments.model, arguments.version), TEXT, "--prompt")
        with client.stream(arguments.model, text=arguments.prompt, version=arguments.version) as parts:
            write_parts(parts, written, screen)
    if screen.wants_json:
        screen.json(written.fields())
        return
    screen.line()
    screen.line(written.summary())


def _load_or_unload(action: str, arguments: argparse.Namespace, screen: Screen) -> None:
    label = f"{action}ing {arguments.model}"
    with connected_to_control(arguments, f"models {action}") as client, screen.progress(label):
        call = client.load if action == "load" else client.unload
        result = call(arguments.model, arguments.version)
    if screen.wants_json:
        screen.json(result)
    elif isinstance(result, list) and result:
        print_models(result, screen)
    else:
        screen.line("done")


def _fits(reason: str) -> bool:
    return len(reason) <= CELL_CHARACTERS and "\n" not in reason


def _cell(entry: Mapping[str, Any], column: str) -> str:
    if column == "memory":
        nbytes = entry.get("memory_bytes")
        return size_text(nbytes) if nbytes else ""
    if column in ("host", "restarts"):
        host = entry.get("host") or {}
        value = host.get("pid" if column == "host" else "restarts")
        shares = column == "host" and value and host.get("models", 1) > 1
        return f"{value} ({host['models']})" if shares else str(value or "")
    value = entry.get(column)
    if column == "reason":
        reason = str(value or "")
        return reason if _fits(reason) else f"{reason.splitlines()[0][: CELL_CHARACTERS - 1].rstrip()}…"
    return "" if value is None else str(value)
