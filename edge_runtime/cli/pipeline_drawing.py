"""A pipeline as text: its steps in order, what each asks, and what it reads. Pure; from the fields of metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def way_text(fields: Mapping[str, Any]) -> str:
    """The steps in a line, those that run side by side in brackets."""
    levels = [f"[{' | '.join(level)}]" if len(level) > 1 else level[0] for level in fields["levels"]]
    return " → ".join(("input", *levels, "output"))


def step_rows(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each step: its name, what it asks, what that is given, and when it runs."""
    return [(str(step["name"]), _asked(step), _given(step["inputs"]), _runs(step)) for step in fields["steps"]]


def output_rows(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each output: its name, and the place that it comes from."""
    return [(str(name), str(place)) for name, place in fields["outputs"].items()]


def _asked(step: Mapping[str, Any]) -> str:
    if "python" in step:
        name = str(step["python"])
        return f"steps.py:{name}" if name.isidentifier() else name
    version = f" version {step['version']}" if "version" in step else ""
    return f"model {step['model']}{version}"


def _given(inputs: Mapping[str, str]) -> str:
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
