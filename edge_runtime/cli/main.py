"""`edge-runtime`: finds the verb, imports only its file, and turns an error into one paragraph.

Owns: the exit status: 0 done, 1 failed, 2 usage, 130 interrupted. The verbs are declarations (verbs.py), which
plugins.py finds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from edge_runtime import __version__, plugins
from edge_runtime.cli.arguments import Parser, UsageError, nearest
from edge_runtime.cli.screen import Screen
from edge_runtime.cli.verbs import Verb
from edge_runtime.config.endpoints import settings_file
from edge_runtime.errors import ConfigError, EdgeRuntimeError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as in shells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; None: this process's own) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    screen = Screen(sys.stdout, sys.stderr, wants_json="--json" in words)
    _use_plugins()
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
        # The reader of the output has left; the interpreter's flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (EdgeRuntimeError, OSError) as error:
        screen.failure(*_failure(error))
        return EXIT_FAILED
    return status


def verb_names() -> tuple[str, ...]:
    """Return the names of all verbs, in the order of the overview."""
    return plugins.names("verbs")


def verb_summaries() -> dict[str, str]:
    """Return the summary of each verb, for the overview."""
    found = {}
    for name in verb_names():
        try:
            found[name] = verb_named(name).summary
        except ConfigError as error:
            found[name] = error.message
    return found


def verb_named(name: str) -> Verb:
    """Return the declaration of a verb. Raises ConfigError: a plug-in's cannot be used."""
    found: Verb = plugins.declared("verbs", name)
    return found


def parser_of(verb: str) -> Parser:
    """Build the parser of one verb, with the options of every verb."""
    module = verb_named(verb).load()
    parser = Parser(prog=f"edge-runtime {verb}", description=module.__doc__, add_help=True)
    module.add_arguments(parser)
    return parser


def overview() -> str:
    """Return the text of `edge-runtime --help`."""
    width = max(map(len, verb_names()))
    lines = (f"  {verb.ljust(width)}  {summary}" for verb, summary in verb_summaries().items())
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
    if verb == "--json" and rest:  # said before the verb
        verb, *rest = (*rest, verb)
    if verb in ("-h", "--help", "help"):
        if verb == "help" and rest:
            return _run([rest[0], "--help"], screen)
        screen.line(overview())
        return 0
    if verb in ("-V", "--version"):
        screen.line(__version__)
        return 0
    if verb.startswith("-"):
        raise UsageError(
            f"{verb} comes behind the verb; wanted edge-runtime VERB {verb}, with one of {', '.join(verb_names())}"
        )
    if verb not in verb_names():
        hint = nearest(verb, verb_names())
        raise UsageError(f"there is no verb {verb!r}{hint}; wanted one of {', '.join(verb_names())}")
    try:
        arguments = parser_of(verb).parse_args(rest)
    except SystemExit as exit_:  # argparse ends the process after --help
        return int(exit_.code or 0)
    status: int = verb_named(verb).load().run(arguments, screen)
    return status


def _use_plugins() -> None:
    """Use the plug-ins that the configuration names; `serve` uses its own. Raises nothing: `plugins` tells why not."""
    if settings_file(None) is None:
        return
    from edge_runtime.config.loading import named_plugins

    with suppress(ConfigError):
        if distributions := named_plugins(None):
            plugins.use(distributions)


def _failure(error: EdgeRuntimeError | OSError) -> tuple[str, str, bool]:
    """Return an error's message, its code, and whether a retry may succeed."""
    if isinstance(error, EdgeRuntimeError):
        return error.message, error.code, error.retryable
    if isinstance(error, TimeoutError):
        return str(error), "timeout", True
    if isinstance(error, ConnectionError):
        return str(error), "no_daemon", True
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}", "os_error", False
