"""`python -m bench.page FILE...`: the handbook's page of what was measured, from files of bench/results.

A later file stands for the figures of an earlier one. The README's lines with the same words are renewed too.
tests/unit/test_documents.py holds both to the files that the page names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bars import number
from bench.scenarios import HERE

PAGE = HERE.parent / "docs" / "numbers.md"

README = HERE.parent / "README.md"

HEAD = """# Numbers

`make bench` measures, and `python -m bench.page` writes this page from what it kept. The load generator runs on the
same cores as the daemon. Ratios are of things that were measured by turns in one run: medians over the rounds, with
the least and the most beside them; requests that were lost are summed. "Best layout" is the raw library called in
process, with all threads or from one thread a core, whichever serves more. "Bare loop" is a server in plain Python with
the same frames and nothing else: no header decoding, checks, deadlines or metrics. Networks for images have their real
shapes and random weights: these figures are of speed, and say nothing of accuracy. A figure without a goal is reported
only. What was measured before 2026-11-22 is from before models ran in hosts: starts and short runs were quicker then.
"""


def page(files: Sequence[Path]) -> str:
    """The whole page; one part for each file, the latest first."""
    parts = [HEAD]
    seen: set[str] = set()
    results = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    for file, found in sorted(results, key=lambda each: each[1]["date_utc"], reverse=True):
        bars = [bar for bar in found["bars"] if bar["figure"] not in seen]
        seen.update(bar["figure"] for bar in bars)
        if bars:
            parts.append(_part(file, found, bars))
    return "\n".join(parts)


def renewed(text: str, page: str) -> str:
    """A text whose table lines are the page's, where that has one of the same words."""
    lines = {_words(line): line for line in page.splitlines() if line.startswith("| ")}
    return "\n".join(lines.get(_words(line), line) if line.startswith("| ") else line for line in text.split("\n"))


def _part(file: Path, found: dict[str, Any], bars: Sequence[dict[str, Any]]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"## {found['date_utc'][:16].replace('T', ' ')} UTC, {machine['cpu']}, {machine['cores']} cores",
        "",
        f"`bench/results/{file.name}`: {machine['memory_gib']} GiB, Linux {machine['kernel']},",
        f"Python {machine['python']}, {versions}.",
        "",
        "| what | figure | rounds | goal |",
        "|---|---|---|---|",
    ]
    for bar in bars:
        unit = bar["unit"] if bar["unit"] == "/s" else f" {bar['unit']}".rstrip()
        rounds = bar["rounds"]
        spread = f"{number(min(rounds))}..{number(max(rounds))}" if len(rounds) > 1 else ""
        goal = "" if bar["bar"] is None else bar["bar"] if bar["met"] else f"{bar['bar']}, **missed**"
        lines.append(f"| {bar['what']} | {number(bar['value'])}{unit} | {spread} | {goal} |")
    return "\n".join((*lines, ""))


def _words(line: str) -> str:
    return line.split(" | ", 1)[0]


if __name__ == "__main__":
    made = page([Path(each) for each in sys.argv[1:]])
    PAGE.write_text(made, encoding="utf-8")
    README.write_text(renewed(README.read_text(encoding="utf-8"), made), encoding="utf-8")
