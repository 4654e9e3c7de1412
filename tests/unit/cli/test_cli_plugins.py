"""Plug-ins on the command line: `edge-runtime plugins`, verbs of plug-ins, and the file that names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.cli.completion import script_for
from edge_runtime.cli.main import main
from edge_runtime.config.loading import named_plugins
from edge_runtime.errors import ConfigError
from tests.fakes.plugin_site import PluginSite, plugin_site

GREET = """
from edge_runtime.cli.verbs import Verb

GREET = Verb("greet", "greet somebody", "greeter")


def add_arguments(parser):
    parser.add_argument("--whom", default="world")


def run(arguments, screen):
    screen.line(f"hello {arguments.whom}")
    return 0
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PluginSite]:
    with plugin_site(tmp_path / "site") as made:
        made.put("greeter", GREET, {"verbs.greet": "greeter:GREET"})
        made.put("broken-one", "raise OSError('no such device')", {"verbs.broken": "broken_one:VERB"})
        yield made


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    monkeypatch.setenv("EDGE_RUNTIME_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def both(site: PluginSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, 'plugins = ["greeter", "broken-one", "absent-one"]\n')


@pytest.mark.usefixtures("both")
def test_a_plugins_verb_runs_as_ours_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "--whom", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.usefixtures("both")
def test_the_overview_has_the_verbs_of_plugins_and_says_why_one_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "greet       greet somebody" in shown
    assert "the plug-in broken of broken-one cannot be used: OSError: no such device" in shown


@pytest.mark.usefixtures("both")
def test_a_verb_that_cannot_be_used_says_why_in_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken"]) == 1
    assert "OSError: no such device" in capsys.readouterr().err


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_the_verbs_of_plugins(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert "greet" in shown
    assert "whom" in shown


@pytest.mark.usefixtures("both")
def test_plugins_lists_each_with_its_state_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 1
    told = {each["distribution"]: each for each in json.loads(capsys.readouterr().out)}
    assert told["greeter"] == {
        "kind": "verbs", "name": "greet", "distribution": "greeter", "version": "1.5", "state": "ready", "reason": "",
    }  # fmt: skip
    assert told["broken-one"]["state"] == "failed"
    assert told["broken-one"]["reason"] == "OSError: no such device"
    assert told["absent-one"]["state"] == "missing"


def test_plugins_of_a_named_configuration_are_all_ready(
    site: PluginSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text('plugins = ["greeter"]\n')
    assert main(["plugins", "--config", str(tmp_path / "mine.toml")]) == 0
    shown = capsys.readouterr().out
    assert "greeter" in shown
    assert 'add its distribution to "plugins" in config.toml' in shown  # broken-one


def test_without_plugins_the_listing_says_where_they_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    assert "docs/plugins.md" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["plugins = 3\n", "plugins = [\n", 'plugins = [""]\n'])
def test_a_broken_configuration_costs_no_verb_but_plugins(
    site: PluginSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, monkeypatch, text)
    assert main(["--help"]) == 0
    capsys.readouterr()
    assert main(["plugins"]) == 1
    assert str(tmp_path / "config.toml") in capsys.readouterr().err


def test_only_the_key_of_plugins_is_read_of_a_file_whose_others_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('no_such_key = 1\nplugins = ["greeter"]\n')
    assert named_plugins(file) == ("greeter",)
    file.write_text('profile = "plugins"\n')
    assert named_plugins(file) == ()
    with pytest.raises(ConfigError, match="cannot be read"):
        named_plugins(tmp_path / "absent.toml")


def test_a_script_of_completion_does_not_name_plugins_that_no_file_names(site: PluginSite) -> None:
    assert "greet" not in script_for("bash")
