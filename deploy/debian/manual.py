"""The manual page edge-runtime(1), generated from the command line's parsers, so that it agrees with `--help`.

Owns: the order of sections, and the conversion of argparse's texts to roff (groff_man(7)). Called by build_deb.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence

from edge_runtime.cli.arguments import Parser
from edge_runtime.cli.main import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    overview,
    parser_of,
    verb_names,
    verb_summaries,
)
from edge_runtime.config.endpoints import CONFIGURATION

EXITS = {
    0: "done",
    EXIT_FAILED: "failed; standard error says why, and with --json standard output too",
    EXIT_USAGE: "wrong usage, or a wrong setting that `serve` found",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}
VARIABLES = {
    "EDGE_RUNTIME_ENDPOINT": "the daemon's endpoint for verbs without --connect",
    "EDGE_RUNTIME_CONFIG": "the configuration file in place of /etc/edge-runtime/config.toml",
    "EDGE_RUNTIME_REPO": "the publisher's repository for verbs without --repo",
    "EDGE_RUNTIME_PASSPHRASE": "the passphrase of the publisher's keys; without it the verb asks",
    "NO_COLOR": "no colours on a terminal",
}
PLACES = {
    str(CONFIGURATION): "the daemon's configuration; every key: /usr/share/doc/edge-runtime/docs/configuration.md",
    "/var/lib/edge-runtime/models": "models of the service",
    "/run/edge-runtime/infer.sock": "the service's infer endpoint, for members of the group edge-runtime",
    "/usr/share/edge-runtime/drop-ins": "drop-ins of the service for what some devices have",
    "/usr/share/doc/edge-runtime/README.md": "the start of the handbook",
    "/usr/share/doc/edge-runtime/deploy/runbook.md": "what to do when something breaks",
}

SHARED_GROUP = "daemon"
"""The title under which `add_connection` groups the options of every verb that talks to a daemon."""


def manual(version: str, epoch: int) -> str:
    """The page as roff, in UTF-8. epoch: the day on its last line, in seconds since 1970, UTC."""
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    sentence = overview().split("\n\n")[1]
    parsers = {verb: parser_of(verb) for verb in verb_names()}
    shared = next(found for parser in parsers.values() for each in parser.all_parsers() if (found := _shared(each)))
    of_all = next(iter(parsers.values())).all_options()
    always = [action for action in of_all if action.option_strings[-1] in ("--help", "--json")]
    parts = [
        # No stretching and no hyphens, so that text can be copied.
        ".nh",
        ".ad l",
        f'.TH EDGE\\-RUNTIME 1 "{day}" "edge\\-runtime {_roff(version)}" "User Commands"',
        *_section("NAME", [f"edge\\-runtime \\- {_roff(sentence[0].lower() + sentence[1:].rstrip('.'))}"]),
        *_section("SYNOPSIS", [".B edge\\-runtime", ".I VERB", "[options]"]),
        *_section("DESCRIPTION", [*_text(sentence), *_list(verb_summaries())]),
        *_section("OPTIONS OF EVERY VERB", [line for action in always for line in _option(action)]),
        *_section("OPTIONS OF VERBS THAT ASK A DAEMON", [line for action in shared for line in _option(action)]),
        *_section("VERBS", [line for parser in parsers.values() for line in _verb(parser, [*always, *shared])]),
        *_section("EXIT STATUS", _list({str(status): text for status, text in EXITS.items()})),
        *_section("ENVIRONMENT", _list(VARIABLES)),
        *_section("FILES", _list(PLACES)),
        *_section("SEE ALSO", [".BR systemctl (1),", ".BR journalctl (1)"]),
    ]
    return "\n".join(parts) + "\n"


# ---- private --------------------------------------------------------------------------------------------------------


def _shared(parser: Parser) -> list[argparse.Action]:
    return parser.all_options(SHARED_GROUP)


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f'.SH "{title}"'
    yield from lines


def _list(entries: dict[str, str]) -> list[str]:
    return [line for name, text in entries.items() for line in (".TP", f".B {_roff(name)}", *_text(text))]


def _verb(parser: Parser, described: Sequence[argparse.Action]) -> Iterator[str]:
    """A verb, its options except the described ones, and each of its actions likewise."""
    known = {(*action.option_strings, action.help) for action in described}
    for each in parser.all_parsers():
        own = [action for action in each.all_options() if (*action.option_strings, action.help) not in known]
        needed = [_invocation(action) for action in own if action.required]
        places = [_place(action) for action in each.all_positionals()]
        yield f'.SS "{_roff(" ".join([each.prog, *places, *needed]))}"'
        yield from _text(each.description or "")
        for action in (*each.all_positionals(), *own):
            yield from _option(action)


def _option(action: argparse.Action) -> list[str]:
    text = (action.help or "") % {**vars(action)}
    return [".TP", f".B {_roff(_invocation(action))}", *(_text(text) or ["\\&"])]


def _invocation(action: argparse.Action) -> str:
    """The option's names and value, as in `--help`."""
    if not action.option_strings:
        return _value(action)
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {_value(action)}"


def _place(action: argparse.Action) -> str:
    value = _value(action)
    return {"?": f"[{value}]", "*": f"[{value} …]", "+": f"{value} …"}.get(str(action.nargs), value)


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _text(text: str) -> list[str]:
    """Filled paragraphs; paragraphs with columns stay as they are."""
    lines: list[str] = []
    for paragraph in filter(None, (each.strip("\n") for each in text.split("\n\n"))):
        if lines:
            lines.append(".sp")
        has_columns = re.search(r"\S  |\n  ", paragraph)
        if has_columns:
            lines += [".nf", *map(_roff, paragraph.splitlines()), ".fi"]
        else:
            lines += map(_roff, paragraph.splitlines())
    return lines


def _roff(text: str) -> str:
    """Text that roff prints as it is: a hyphen is a minus sign, so that it can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
