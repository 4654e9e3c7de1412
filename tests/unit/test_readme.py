"""The README's tables are the program's: every setting with its default, every error code with its retryability."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.errors import WIRE_ERRORS, BackendUnavailable, LoadFailed

README = (Path(__file__).parents[2] / "README.md").read_text()


def rows_below(heading: str) -> dict[str, str]:
    """First and second column of the table below a heading, as written."""
    start = README.index(f"\n{heading}\n")
    rows: dict[str, str] = {}
    for line in README[start + 1 :].splitlines()[1:]:
        if line.startswith("#"):
            break
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `"):
            assert cells[1] not in rows, f"{cells[1]} is said twice"
            rows[cells[1].strip("`")] = cells[2]
    return rows


def settings_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key as it is written in the file, with its default as the README writes it."""
    for setting in msgspec.structs.fields(struct):
        name = prefix + setting.name
        tables = [each for each in (setting.type, *getattr(setting.type, "__args__", ())) if is_table(each)]
        if tables:
            yield from settings_of(tables[0], f"{name}.")
        elif setting.required:
            yield name, "required"
        else:
            default = setting.default
            if default is msgspec.NODEFAULT:
                default = setting.default_factory()
            yield name, "not said" if default is None else f"`{json.dumps(default)}`"


def is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def test_the_readme_says_every_key_of_model_toml_with_its_default() -> None:
    assert rows_below("### `model.toml`") == dict(settings_of(ModelSettings))


def test_the_readme_says_every_key_of_config_toml_with_its_default() -> None:
    assert rows_below("### `config.toml`") == dict(settings_of(Config))


def test_the_readme_says_every_error_code_that_can_reach_a_client() -> None:
    at_load_only = {BackendUnavailable.code, LoadFailed.code}
    assert set(rows_below("## Errors")) == set(WIRE_ERRORS) - at_load_only


def test_the_readme_says_rightly_which_errors_are_worth_another_try() -> None:
    for code, tail in re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", README, re.MULTILINE):
        assert WIRE_ERRORS[code].retryable is (tail == "yes"), code


def test_every_make_target_that_the_readme_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE))
    commands = " ".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"\bmake ([a-z]+)", commands))
    assert named
    assert named <= targets


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"`((?:edge_runtime|demo|tests|device_profiles|\.ci)/[\w./]*)`", README):
        assert (Path(__file__).parents[2] / name).exists(), name
