"""Reads command lines: argparse, with errors as one paragraph, near misses named, and the shared options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from edge_runtime import plugins
from edge_runtime.config.endpoints import ENDPOINT_FORMS
from edge_runtime.plugins import Option

if TYPE_CHECKING:
    from argparse import _ActionsContainer as Group  # what a parser and a group of it have in common


class UsageError(Exception):
    """The command line is wrong; the message says what, got, wanted. Exit status 2."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of ending the process, and takes no abbreviated options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*arguments, **{**defaults, **options})
        self.add_argument("--json", action="store_true", help="print JSON")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the error for an unknown option names the nearest known one."""
        # Words of an open number may come before and after options: MODEL --draw DIR PICTURE PICTURE.
        is_open = any(action.nargs in ("*", "+") for action in self.all_positionals())
        parse = self.parse_known_intermixed_args if is_open else self.parse_known_args
        arguments, rest = parse(args, namespace)
        if rest:
            known = [option for parser in self.all_parsers() for option in parser.options()]
            self.error(f"{' '.join(rest)} is not understood{nearest(rest[0].split('=')[0], known)}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the usage line and what to do."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 (as below)
                word = re.search(r"invalid choice: '([^']*)'", message)
                message += nearest(word[1], action.choices) if word is not None else ""
        usage = " ".join(self.format_usage().split())
        raise UsageError(f"{message}\n{usage}\nSee `{self.prog} --help`.")

    def options(self) -> list[str]:
        """Return the long options of this parser."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def choices(self) -> dict[str, list[str]]:
        """Return the allowed values of each long option that has a list of them."""
        return {
            name: [str(value) for value in action.choices]
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--") and action.choices
        }

    def all_options(self, group: str | None = None) -> list[argparse.Action]:
        """Return argparse's action of each option, or of those in a group, for the manual page."""
        groups = [each for each in self._action_groups if each.title == group]
        found = self._actions if group is None else [action for each in groups for action in each._group_actions]  # noqa: SLF001
        return [action for action in found if action.option_strings and action.help != argparse.SUPPRESS]

    def all_positionals(self) -> list[argparse.Action]:
        """Return the positional arguments; `all_parsers` has the actions of a verb."""
        return [
            action
            for action in self._actions
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
        ]

    def all_parsers(self) -> Iterable[Parser]:
        """Yield this parser and those of its actions (`models list`), and of theirs (`repo rollout start`)."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 (argparse has no public way to ask)
                for parser in action.choices.values():
                    yield from parser.all_parsers()


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` when a known word is near, else an empty text."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options of every verb that talks to a daemon."""
    group = parser.add_argument_group("daemon")
    group.add_argument(
        "--connect",
        metavar="E",
        help=f"endpoint: {ENDPOINT_FORMS} (default: $EDGE_RUNTIME_ENDPOINT)",
    )
    group.add_argument("--control", metavar="E", help="control endpoint (default: <path>.control beside an ipc one)")
    group.add_argument(
        "--curve-keys",
        metavar="FILE",
        help="TOML file with server_key, public_key and secret_key, for an endpoint guarded by CURVE",
    )
    add_options(group, plugins.options("connect"))


def add_options(group: Group, options: Iterable[Option]) -> None:
    """Add the options of doors."""
    for each in options:
        if each.metavar:
            group.add_argument(each.name, metavar=each.metavar, default=each.default, help=each.help)
        else:
            group.add_argument(each.name, action="store_true", help=each.help)


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    number = _number(text, int)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 1 or more")
    return int(number)


def milliseconds(text: str) -> float:
    """Parse a length of time of 0 or more."""
    number = _number(text, float)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, wanted milliseconds, 0 or more")
    return float(number)


def seconds(text: str) -> float:
    """Parse a length of time above zero."""
    number = _number(text, float)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, wanted more than 0")
    return float(number)


def positives(text: str) -> list[int]:
    """Parse whole numbers of 1 or more, separated by commas."""
    return [positive(part) for part in text.split(",")]


def _number(text: str, kind: type[int | float]) -> float:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}") from None
