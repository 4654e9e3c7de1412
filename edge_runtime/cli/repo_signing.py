"""What a change will sign, shown before it does; the question whether it may; passphrases.

Owns: consent. Keys that are kept for people sign only after `--yes` or a yes on a terminal; with --json, or without a
terminal, nobody is asked. What is about to be signed is on stderr always, and in the result with --json.
"""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.repo import UNLOCKING_VARIABLE
from edge_runtime.cli.screen import Screen
from edge_runtime.errors import PublishError
from edge_runtime.publish.change import Change, Signing
from edge_runtime.publish.passphrases import Passphrases

Ask = Callable[[str], str]


def passphrases(arguments: argparse.Namespace, screen: Screen) -> Passphrases:
    """From the file named, else the environment; else they are asked for where there is a terminal."""
    if arguments.passphrase_file is not None:
        lines = Path(arguments.passphrase_file).read_text(encoding="utf-8").splitlines()
        return Passphrases(lines[:1])
    if UNLOCKING_VARIABLE in os.environ:
        return Passphrases([os.environ[UNLOCKING_VARIABLE]])
    return Passphrases(ask=getpass.getpass if _has_terminal(screen) else None)


def carry_out(change: Change, arguments: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    """Show, ask, sign and publish. Returns what was done, for JSON.

    Raises UsageError: a person has to say yes and cannot be asked. PublishError: that person said no.
    """
    screen.note(f"To {change.summary}, this will sign:")
    for signing in change.signings:
        screen.note(f"  {_signing_text(signing)}")
    _check_consent(change, screen, has_consent=arguments.yes)
    change.commit()
    return {"done": change.summary, "signed": [signing_json(signing) for signing in change.signings]}


def signing_json(signing: Signing) -> dict[str, Any]:
    """A role that was signed."""
    return {
        "role": signing.role,
        "version": signing.version,
        "expires": f"{signing.expires_utc:%Y-%m-%dT%H:%M:%SZ}",
        "keys": list(signing.keys),
    }


def _signing_text(signing: Signing) -> str:
    expires = f"{signing.expires_utc:%Y-%m-%d %H:%M} UTC"
    return f"{signing.role} version {signing.version}, good until {expires}, with {', '.join(signing.keys)}"


def _check_consent(change: Change, screen: Screen, *, has_consent: bool) -> None:
    if has_consent or not change.needs_a_person:
        return
    if not _has_terminal(screen):
        raise UsageError(
            "keys that are kept for people would sign, and there is nobody to ask; add --yes; nothing done"
        )
    screen.note("Sign? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PublishError("nothing was signed")


def _has_terminal(screen: Screen) -> bool:
    return not screen.wants_json and sys.stdin.isatty() and sys.stderr.isatty()
