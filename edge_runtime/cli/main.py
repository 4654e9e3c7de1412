"""`edge-runtime`: finds the verb, imports only its file, and turns what goes wrong into one clear paragraph.

Owns: the list of verbs and the exit status: 0 done, 1 failed, 2 usage, 130 interrupted. A verb is a module with
`add_arguments(parser)` and `run(arguments, screen) -> int`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from edge_runtime import __version__
from edge_runtime.cli.arguments import Parser, UsageError, nearest
from edge_runtime.cli.screen import Screen
from edge_runtime.errors import EdgeRuntimeError

VERBS = {
    "serve": "serve a folder of models until told to stop",
    "infer": "run a model once and show the answer",
    "models": "list models, show what one takes and gives, load and unload",
    "status": "how the daemon does: rates, latencies, queues, refusals, memory",
    "bench": "measure requests per second and latencies of a running daemon",
    "tune": "find what serves a model best on this device, and use it",
    "profile": "this device, the profile chosen for it, and what its backends offer",
    "repo": "publish signed models: keys, releases, and what groups of devices run",
    "update": "install signed releases, go back to the one before, see what runs",
    "convert": "make an artifact of a trained model, and show how near it is to its source",
    "completion": "print the completion script for bash, zsh or fish",
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells say it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; None: this process's own) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    screen = Screen(sys.stdout, sys.stderr, wants_json="--json" in words)
    try:
        status = _run(words, screen)
        sys.stdout.flush()
    except UsageError as error:
        screen.error(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        screen.note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left; the interpreter's own flush at exit must not complain about that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (EdgeRuntimeError, OSError) as error:
        screen.failure(*_failure(error))
        return EXIT_FAILED
    return status


def parser_of(verb: str) -> Parser:
    """The parser of one verb, with the options that every verb has."""
    module = import_module(f"edge_runtime.cli.{verb}")
    parser = Parser(prog=f"edge-runtime {verb}", description=module.__doc__, add_help=True)
    module.add_arguments(parser)
    return parser


def overview() -> str:
    """What `edge-runtime --help` prints."""
    width = max(map(len, VERBS))
    lines = (f"  {verb.ljust(width)}  {summary}" for verb, summary in VERBS.items())
    return "\n".join(
        (
            "usage: edge-runtime VERB [options]",
            "",
            "Serve models on this device over ZeroMQ, with a latency bound that holds.",
            "",
            *lines,
            "",
            "edge-runtime VERB --help   says what a verb takes; --json on any verb prints JSON",
            "edge-runtime --version     prints the version",
            "",
            "Verbs find the daemon at --connect E, else $EDGE_RUNTIME_ENDPOINT, else the default place.",
        )
    )


def _run(words: list[str], screen: Screen) -> int:
    if not words:
        screen.note(overview())
        return EXIT_USAGE
    verb, *rest = words
    if verb in ("-h", "--help", "help"):
        if rest and rest[0] in VERBS:
            return _run([rest[0], "--help"], screen)
        screen.line(overview())
        return 0
    if verb in ("-V", "--version"):
        screen.line(__version__)
        return 0
    if verb not in VERBS:
        hint = nearest(verb, VERBS)
        raise UsageError(f"there is no verb {verb!r}{hint}; wanted one of {', '.join(VERBS)}")
    try:
        arguments = parser_of(verb).parse_args(rest)
    except SystemExit as exit_:  # argparse ends the process after --help
        return int(exit_.code or 0)
    status: int = import_module(f"edge_runtime.cli.{verb}").run(arguments, screen)
    return status


def _failure(error: EdgeRuntimeError | OSError) -> tuple[str, str, bool]:
    """What went wrong, its code, and whether it may go well another time."""
    if isinstance(error, EdgeRuntimeError):
        return error.message, error.code, error.retryable
    if isinstance(error, TimeoutError):
        return str(error), "timeout", True
    if isinstance(error, ConnectionError):
        return str(error), "no_daemon", True
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}", "os_error", False
