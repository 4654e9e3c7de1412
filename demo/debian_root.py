"""Debian and Ubuntu systems as folders or archives: made by mmdebstrap, once, and kept below `build/roots`.

Owns: how one is made and where it is kept. Which packages are in it is said by who wants it: device_root.py for devices
that boot, and the tests of packages. Nothing here enters one, and nothing writes into it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

MAKE_LIMIT_S = 600.0
CACHE = Path(__file__).parents[1] / "build" / "roots"

SMALLER = tuple(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale"))
"""Excludes documentation, also of packages that are installed later."""


def kept_at(suite: str, options: Sequence[str], form: str = "") -> Path:
    """The path of the root of these options. form: "" a folder, ".tar" an archive."""
    made_of = repr((suite, *SMALLER, *options))
    return CACHE / f"{suite}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}{form}"


def kept_root(suite: str, options: Sequence[str], *, form: str = "", source: Sequence[str] = ()) -> Path:
    """The root, created if missing: it takes about a minute, and needs a network as nothing else here.

    options: mmdebstrap's. source: lines of sources.list for other distributions. Raises CalledProcessError with
    mmdebstrap's words on stderr.
    """
    kept = kept_at(suite, options, form)
    if kept.exists():
        return kept
    CACHE.mkdir(parents=True, exist_ok=True)
    # A partial root must not have a root's name; mmdebstrap takes the format from the suffix.
    partial = CACHE / f".{kept.stem}.{os.getpid()}.part{form}"
    try:
        subprocess.run(
            ["mmdebstrap", "--quiet", *SMALLER, *options, suite, str(partial), *source],
            check=True, timeout=MAKE_LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if not kept.exists():
            partial.rename(kept)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
    return kept
