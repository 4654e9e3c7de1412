"""Plug-ins: found by entry points of the distributions named, tried in a child, and told by their states."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from edge_runtime import plugin_trials, plugins
from edge_runtime.errors import ConfigError
from edge_runtime_converters.importing.reading import read_source
from tests.fakes.plugin_site import PluginSite, plugin_site

HELLO = """
    from edge_runtime.cli.verbs import Verb
    HELLO = Verb("hello", "say hello", "{module}")
    def add_arguments(parser): ...
    def run(arguments, screen):
        screen.line("hello")
        return 0
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PluginSite]:
    with plugin_site(tmp_path / "site") as made:
        yield made


def put_hello(site: PluginSite, name: str = "hello-verb", before: str = "") -> None:
    module = name.replace("-", "_")
    source = before + dedent(HELLO.format(module=module))
    site.put(name, source, {"verbs.hello": f"{module}:HELLO"})


def the_only() -> plugins.Plugin:
    (found,) = plugins.used()
    return found


def test_a_plugin_stands_behind_what_is_shipped_once_its_distribution_is_named(site: PluginSite) -> None:
    put_hello(site)
    assert "hello" not in plugins.names("verbs")
    plugins.use(["hello-verb"])
    assert plugins.names("verbs")[-1] == "hello"
    assert "hello_verb" not in sys.modules
    assert plugins.declared("verbs", "hello").summary == "say hello"
    found = the_only()
    assert (found.kind, found.distribution, found.version, found.state) == ("verbs", "hello-verb", "1.5", "ready")


def test_a_distribution_is_named_as_pip_takes_its_name(site: PluginSite) -> None:
    put_hello(site)
    plugins.use(["Hello_Verb"])
    plugins.try_all()
    assert the_only().state == "ready"


def test_a_distribution_named_twice_is_used_once(site: PluginSite) -> None:
    put_hello(site)
    plugins.use(["hello-verb", "hello_verb", "hello-verb"])
    assert [each.state for each in plugins.used()] == ["found"]


def test_a_distribution_that_is_not_installed_is_missing(site: PluginSite) -> None:
    plugins.use(["no-such-plugin"])
    assert the_only().state == "missing"
    assert "pip install no-such-plugin" in the_only().reason


@pytest.mark.parametrize("name", ["edge-runtime", "Edge.Runtime"])
def test_our_own_distribution_needs_no_naming(site: PluginSite, name: str) -> None:
    plugins.use([name])
    assert "need no naming" in the_only().reason


def test_a_distribution_without_entry_points_of_ours_says_so(site: PluginSite) -> None:
    site.put("plain-one", "", {})
    plugins.use(["plain-one"])
    assert the_only().state == "failed"
    assert "edge_runtime.backends" in the_only().reason


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('the device is gone')\n", "RuntimeError: the device is gone"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("raise KeyboardInterrupt\n", "importing it"),
        ("import os; os._exit(0)\n", "importing it: its process ended with exit status 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n", "importing it: its process was ended by SIGSEGV"),
        ("import sys; sys.setrecursionlimit(200)\nf = lambda: f()\nf()\n", "RecursionError"),
        ("(", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_import_is_a_state_and_its_words_are_kept(
    site: PluginSite, before: str, words: str
) -> None:
    site.put("hello-verb", before, {"verbs.hello": "hello_verb:HELLO"})
    plugins.use(["hello-verb"])
    plugins.try_all()
    assert the_only().state == "failed"
    assert words in the_only().reason
    assert "hello" not in plugins.names("verbs")
    assert "hello_verb" not in sys.modules
    with pytest.raises(ConfigError, match="hello of hello-verb cannot be used"):
        plugins.declared("verbs", "hello")


def test_a_module_whose_import_does_not_end_is_given_up(site: PluginSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_trials, "TRIAL_S", 1.0)
    put_hello(site, before="import threading; threading.Event().wait()\n")
    plugins.use(["hello-verb"])
    plugins.try_all()
    assert "not done within 1 s" in the_only().reason


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("HELLO = 'text'", "hello_verb:HELLO", "is of type str, wanted edge_runtime.cli.verbs.Verb"),
        ("", "hello_verb:HELLO", "AttributeError"),
        ("", "hello_verb", "wanted module:attribute"),
        ("", "hello_verb:a.b", "wanted module:attribute"),
        (
            "from edge_runtime.cli.verbs import Verb\nHELLO = Verb('bye', '', 'hello_verb')",
            "hello_verb:HELLO",
            "says that its name is 'bye', and its entry point 'hello'",
        ),
        (
            "from edge_runtime.cli.verbs import Verb\nHELLO = Verb('hello', '', 'no_such_module')",
            "hello_verb:HELLO",
            "No module named 'no_such_module'",
        ),
        (
            "from edge_runtime.cli.verbs import Verb\nHELLO = Verb('hello', '', 'hello_verb')\nadd_arguments = 3",
            "hello_verb:HELLO",
            "hello_verb:add_arguments cannot be called",
        ),
    ],
)
def test_a_declaration_that_breaks_its_contract_is_a_state(
    site: PluginSite, source: str, target: str, words: str
) -> None:
    site.put("hello-verb", source, {"verbs.hello": target})
    plugins.use(["hello-verb"])
    plugins.try_all()
    assert the_only().state == "failed"
    assert words in the_only().reason


def test_a_name_that_is_shipped_stays_ours(site: PluginSite) -> None:
    site.put("hello-verb", "", {"verbs.serve": "hello_verb:SERVE"})
    plugins.use(["hello-verb"])
    plugins.try_all()
    assert (the_only().state, the_only().reason) == ("failed", "edge-runtime has verbs of this name")
    assert plugins.declared("verbs", "serve").module == "edge_runtime.cli.serve"


def test_of_two_plugins_of_one_name_the_first_distribution_named_has_it(site: PluginSite) -> None:
    put_hello(site, "hello-one")
    put_hello(site, "hello-two")
    plugins.use(["hello-two", "hello-one"])
    plugins.try_all()
    assert [(each.distribution, each.state) for each in plugins.used()] == [
        ("hello-two", "ready"),
        ("hello-one", "failed"),
    ]
    assert plugins.used()[1].reason == "hello-two has verbs of this name"


@pytest.mark.parametrize("name", ["--help", "Hello", "1st", "a b"])
def test_a_name_that_cannot_be_typed_as_a_word_is_refused(site: PluginSite, name: str) -> None:
    site.put("hello-verb", "", {f"verbs.{name}": "hello_verb:HELLO"})
    plugins.use(["hello-verb"])
    assert the_only().state == "failed"
    assert "small letters" in the_only().reason


def test_entry_points_of_other_groups_are_left_alone(site: PluginSite) -> None:
    put_hello(site)
    with (site.folder / "hello_verb-1.5.dist-info" / "entry_points.txt").open("a") as file:
        file.write("[edge_runtime.flavours]\nx = hello_verb:X\n[console_scripts]\nhello = hello_verb:run\n")
    plugins.use(["hello-verb"])
    assert the_only().name == "hello"


def test_metadata_that_cannot_be_read_is_a_state(site: PluginSite) -> None:
    put_hello(site)
    (site.folder / "hello_verb-1.5.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[")
    plugins.use(["hello-verb"])
    assert the_only().state == "failed"
    assert "its metadata cannot be read" in the_only().reason


def test_one_broken_plugin_costs_its_distribution_alone(site: PluginSite) -> None:
    put_hello(site, before="import os; os.abort()\n")
    site.put("good-one", HELLO.format(module="good_one").replace('"hello"', '"bye"'), {"verbs.bye": "good_one:HELLO"})
    plugins.use(["hello-verb", "good-one"])
    plugins.try_all()
    assert [each.state for each in plugins.used()] == ["failed", "ready"]


def test_an_installed_plugin_that_is_not_named_is_listed_as_unused(site: PluginSite) -> None:
    put_hello(site)
    (found,) = [each for each in plugins.installed_unused() if each.distribution == "hello-verb"]
    assert (found.kind, found.name, found.state) == ("verbs", "hello", "unused")
    plugins.use(["hello-verb"])
    assert "hello-verb" not in [each.distribution for each in plugins.installed_unused()]
    assert "hello_verb" not in sys.modules


def test_a_start_logs_the_state_of_each(site: PluginSite, caplog: pytest.LogCaptureFixture) -> None:
    put_hello(site)
    with caplog.at_level("INFO", "edge_runtime.plugins"):
        plugins.start(["hello-verb", "no-such-plugin"])
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "a plug-in is ready"),
        ("ERROR", "a plug-in is not used"),
    ]


def test_a_name_that_nothing_declares_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        plugins.declared("verbs", "no-such-verb")


def test_an_importer_of_a_plugin_reads_a_source_in_the_child(site: PluginSite, tmp_path: Path) -> None:
    source = """
        from edge_runtime_converters.importing.importers import Importer
        from edge_runtime_converters.importing.plan import ImportPlan

        TOY = Importer("toy", "a toy", "toy_importer")

        def read(source):
            return ImportPlan(system="a toy", models=()) if (source.root / "toy.txt").exists() else None
    """
    site.put("toy-importer", source, {"importers.toy": "toy_importer:TOY"})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "toy.txt").write_text("toy")
    (tmp_path / "work").mkdir()
    plugins.use(["toy-importer"])
    assert read_source(tmp_path / "in", tmp_path / "work").system == "a toy"
