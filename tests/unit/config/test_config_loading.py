"""Settings from files and the command line, and every way in which they can be wrong."""

from __future__ import annotations

import os
import tracemalloc
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime import plugins
from edge_runtime.config.loading import MAX_FILE_BYTES, lay_over, load_config, read_model_keys
from edge_runtime.config.reference import BEGIN, END, describe, markdown, renewed
from edge_runtime.config.settings import Config, ModelSettings, Versions, ZmqSettings
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import bare_type, build, is_struct, parse_toml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def config_error(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    return caught.value.message


def model_error(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_model_keys(file)
    return caught.value.message


# ---- where settings come from ---------------------------------------------------------------------------------------


def test_without_a_file_everything_is_default(tmp_path: Path) -> None:
    assert load_config(None, {}, tmp_path / "absent.toml") == Config()


def test_the_default_file_is_read_when_it_is_there(file: Path) -> None:
    file.write_text('models = "/srv/models"')
    assert load_config(None, {}, file).models == "/srv/models"


def test_a_file_named_and_missing_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.toml: cannot be read: No such file"):
        load_config(file, {})


def test_the_command_line_lies_over_the_file(file: Path) -> None:
    file.write_text('models = "a"\nprofile = "b"\n[zmq]\nendpoints = ["ipc:///x"]\ninsecure = true\n')
    config = load_config(file, {"models": "c", "profile": None, "zmq.endpoints": ["ipc:///y"], "zmq": {"control": "z"}})
    assert (config.models, config.profile) == ("c", "b")
    assert config.zmq == ZmqSettings(endpoints=("ipc:///y",), control="z", insecure=True)


def test_a_wrong_command_line_is_not_blamed_on_the_file(file: Path) -> None:
    file.write_text('models = "a"')
    with pytest.raises(ConfigError, match=r"^command line: metrics.port: got 70000, wanted an integer"):
        load_config(file, {"metrics.port": 70_000})


def test_a_key_cannot_be_both_a_value_and_a_table() -> None:
    with pytest.raises(ConfigError, match="zmq has a value and cannot be a table"):
        load_config(None, {"zmq": 1, "zmq.control": "x"}, Path("/nowhere"))


def test_a_default_file_that_is_not_a_file_is_not_passed_over(file: Path) -> None:
    file.mkdir()
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be read: Is a directory"):
        load_config(None, {}, default_path=file)
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be read: No such file"):
        load_config(None, {}, default_path=file)


def test_no_folder_where_the_default_file_would_be_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_config(None, {}, default_path=tmp_path / "none" / "config.toml") == Config()
    assert load_config(None, {}, default_path=tmp_path / "file" / "config.toml") == Config()


def test_a_model_without_settings_has_the_defaults(tmp_path: Path) -> None:
    assert read_model_keys(tmp_path / "model.toml") == {}


def test_model_settings_are_read(file: Path) -> None:
    file.write_text('max_batch_rows = 8\nmode = "inline"\n[versions]\nspecific = [1, 3]\n[options]\n"a.b" = "c"\n')
    settings = lay_over(read_model_keys(file), {}, "")
    assert (settings.max_batch_rows, settings.mode, settings.options) == (8, "inline", {"a.b": "c"})
    assert settings.versions == Versions(specific=(1, 3))


def test_an_editors_mark_at_the_beginning_is_read_over(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbfmodels = "a"')
    assert load_config(file, {}).models == "a"


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('modles = "x"', "modles: unknown key 'modles'; did you mean 'models'?"),
        ("[zmq]\nmax_frame_byte = 1", "zmq.max_frame_byte: unknown key 'max_frame_byte'; did you mean 'max_frame_b"),
        ("[metrics]\nqqq = 1", "metrics.qqq: unknown key 'qqq'; known here: host, port"),
        ("models = 3", "models: got 3, wanted text"),
        ('watch = "yes"', "watch: got 'yes', wanted true or false"),
        ("watch = 1", "watch: got 1, wanted true or false"),
        ("[zmq]\nmax_frame_bytes = 0", "zmq.max_frame_bytes: got 0, wanted an integer, 1 or more"),
        ("[zmq]\nmax_frame_bytes = 1.5", "zmq.max_frame_bytes: got 1.5, wanted an integer, 1 or more"),
        ('[zmq]\nendpoints = "ipc:///x"', "zmq.endpoints: got 'ipc:///x', wanted a list, each text"),
        ('[zmq]\nendpoints = ["a", 2]', "zmq.endpoints[1]: got 2, wanted text"),
        ("zmq = 3", "zmq: got 3, wanted a table of endpoints, control,"),
        ('[zmq.curve]\nsecret_key_file = "x"', "zmq.curve.client_keys_file: is missing; wanted text"),
        ('[log]\nlevel = "loud"', "log.level: got 'loud', wanted one of 'debug', 'info', 'warning', 'error'"),
        ("drain_s = 0", "drain_s: got 0, wanted a number, above 0"),
        ("drain_s = inf", "drain_s: got inf, wanted a number, above 0"),
        ("drain_s = nan", "drain_s: got nan, wanted a number, above 0"),
        ('models = ""', "models: got '', wanted text, not empty"),
        ("[limits]\nqueue_rows = 100000000000000000000000",
         "limits.queue_rows: got 100000000000000000000000, wanted an integer, 1 or more, 1_000_000_000_"),
        ('[zmq]\nendpoints = ["ipc:///a", "ipc:///b", "ipc:///a"]', "zmq: 'ipc:///a' is named twice"),
        ('[zmq]\nendpoints = ["ipc:///a"]\ncontrol = "ipc:///a"', "zmq: 'ipc:///a' is named twice"),
        ('load_models = ["a"]', "Use of '--load-model' (load_models) requires setting '--model-control-mode=explicit'"),
        ('model_control = "explicit"\nload_models = ["a", "*"]', "load_models: '*' stands for all models"),
        ('model_control = "polling"', "model_control: got 'polling', wanted one of 'none', 'poll', 'explicit'"),
        ("models = 1979-05-27", "models: got datetime.date(1979, 5, 27), wanted text"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_file_key_got_and_wanted(text: str, said: str, file: Path) -> None:
    assert config_error(file, text).startswith(f"{file}: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = photos", "1:10: got 'photos'; text stands in straight quotes: \"photos\""),
        ("models = a/b.c # here", "1:10: got 'a/b.c'; text stands in straight quotes: \"a/b.c\""),
        ("models = \u201ca b\u201d", "1:10: got '\u201ca b\u201d'; text stands in straight quotes: \"a b\""),
        ("models = C:\\data", "1:10: got 'C:\\\\data'; text stands in straight quotes: 'C:\\data'"),
        ("[zmq]\nendpoints = [here, there]", "2:14: got 'here'; text stands in straight quotes: \"here\""),
        ("watch = True", "1:9: got 'True', wanted true, in small letters"),
        ("models = None", "1:10: got 'None', which TOML does not have; leave the key out"),
        ("drain_s = .5", "1:11: got '.5', wanted a digit before the point: 0.5"),
        ("drain_s = 5s", "1:12: got 's' behind the value"),
        ("models =", "1: the value is missing"),
        ("[mqtt]\npassword = hunter2", "2:12: got '…'; text"),
    ],
)
def test_text_that_is_not_toml_says_what_to_write(text: str, said: str, file: Path) -> None:
    assert config_error(file, text).startswith(f"{file}:{said}")


def test_a_number_stands_for_a_list_of_one(file: Path) -> None:
    file.write_text("[input.x]\nfill = 114\nmean = 1.5\nscale = [2]\n[limits]\n")
    steps = lay_over(read_model_keys(file), {}, "").input["x"]
    assert (steps.fill, steps.mean, steps.scale) == ((114,), (1.5,), (2.0,))
    for wrong, got in (("true", "True"), ('"a"', "'a'"), ("[1, 2]", "fill has 2 numbers")):
        file.write_text(f"[input.x]\nfill = {wrong}\n")
        with pytest.raises(ConfigError) as caught:
            read_model_keys(file)
        assert got in str(caught.value)


def test_a_port_that_the_system_chooses_may_be_asked_for_twice(file: Path) -> None:
    file.write_text('[zmq]\nendpoints = ["tcp://127.0.0.1:*", "tcp://127.0.0.1:*"]')
    assert len(load_config(file, {}).zmq.endpoints) == 2


def test_every_mistake_is_said_at_once(file: Path) -> None:
    message = config_error(file, 'modles = "x"\nwatch = 1\n[log]\nlevel = "loud"')
    assert [line.removeprefix(f"{file}: ").partition(":")[0] for line in message.splitlines()] == [
        "modles", "watch", "log.level",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('prcision = "f16"', "prcision: unknown key 'prcision'; did you mean 'precision'?"),
        ("priority = 12", "priority: got 12, wanted an integer, 1 or more, 9 or less"),
        ("[options]\na = 1", "options.a: got 1, wanted text"),
        ("[warmup.shapes]\n'a b' = [0]", "warmup.shapes.'a b'[0]: got 0, wanted an integer, 1 or more"),
        ("[versions]\nlatest = 1\nall = true", "versions: got latest and all; one of latest, all, specific"),
        ("max_batch_rows = 4\npreferred_batch_rows = [8]", "preferred_batch_rows has 8, above max_batch_rows = 4"),
        ("pinned = true\non_demand = true", "got pinned and on_demand"),
        ('mode = "inline"\n[queue]', 'got [queue] and mode = "inline"'),
        ("[queue]\nlevels = 2", "queue: default priority level must be in range [1, 2], got 0"),
        ("[queue.level.1]", "queue: priority queue policy must have priority level in range [1, 0], got '1'"),
        ("[queue]\nlevels = 2\ndefault_level = 1\nkeep_order = true", "queue: Only one priority level is allowed"),
        ('[queue]\nkeep_order = true\n[queue.default]\ntimeout_ms = 1\non_timeout = "delay"', "queue: a policy cannot"),
    ],
)
def test_a_mistake_in_model_toml_is_said_likewise(text: str, said: str, file: Path) -> None:
    assert model_error(file, text).startswith(f"{file}: {said}")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a =\n", 1), ('models = "a"\nb = [1,\n', 2), ("\n\n[zmq\n", 3), ("a = 1\na = 2\n", 2), ("a = 01", 1)],
)
def test_broken_toml_is_said_with_its_line(text: str, line: int, file: Path) -> None:
    assert config_error(file, text).startswith(f"{file}:{line}:")


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = " + "[" * 50_000, "nested too deeply"), ("x = " + "1" * 5_000, "5000 digits")],
)
def test_toml_that_would_break_a_parser_is_an_error(text: str, said: str, file: Path) -> None:
    assert said in config_error(file, text)


def test_bytes_that_are_not_utf_8_are_an_error_with_the_line(file: Path) -> None:
    file.write_bytes(b'models = "a"\nprofile = "\xff"\n')
    with pytest.raises(ConfigError, match=r"config.toml:2: .*not UTF-8"):
        load_config(file, {})


def test_a_huge_file_is_refused_before_it_is_read(file: Path) -> None:
    with file.open("wb") as huge:
        huge.truncate(4 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="has over 1048576 bytes"):
            read_model_keys(file)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_FILE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
def test_model_settings_that_are_not_a_plain_file_are_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="wanted a plain file"):
        lay_over(read_model_keys(path), {}, "")


def test_a_long_value_is_shortened_in_the_message(file: Path) -> None:
    assert len(config_error(file, f'watch = "{"x" * 100_000}"')) < 500


# ---- anything at all ------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.dates(), st.times(), st.datetimes()
)


def tables_of(kind: type[msgspec.Struct], path: str = "") -> dict[str, type[msgspec.Struct]]:
    """By path; those of capabilities with their marks behind it."""
    found = {path: kind}
    if kind is ModelSettings:
        declared = [plugins.declared("steps", name) for name in plugins.names("steps")]
        found |= {f"input.NAME {each.mark}".strip(): plugins.named(each.table) for each in declared}
        found |= {name: plugins.named(plugins.declared("tables", name).table) for name in plugins.names("tables")}
    for field in msgspec.structs.fields(kind):
        for inner in (bare_type(field.type), *typing.get_args(bare_type(field.type))):
            if is_struct(inner):
                name = f"{field.name}.NAME" if typing.get_origin(bare_type(field.type)) is dict else field.name
                found |= tables_of(inner, f"{path}.{name}" if path else name)
    return found


def keys_of(kind: type[msgspec.Struct]) -> set[str]:
    return {key for table in tables_of(kind).values() for key in table.__struct_encode_fields__}


KNOWN = sorted(keys_of(Config) | keys_of(ModelSettings))
NAMES = st.one_of(st.sampled_from(KNOWN), st.text(max_size=6))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=6)


def outcome(make: Callable[[], object]) -> object:
    """What a call made, or the sentence of its ConfigError; any other exception fails the test."""
    try:
        return make()
    except ConfigError as error:
        return error.message


@pytest.mark.parametrize("kind", [Config, ModelSettings])
@given(TABLES)
def test_any_mapping_is_settings_or_a_config_error(kind: type[msgspec.Struct], values: dict[str, Any]) -> None:
    made = outcome(lambda: build(kind, values, "x.toml"))
    assert isinstance(made, kind) or str(made).startswith("x.toml: ")


@given(TABLES)
def test_any_command_line_is_settings_or_a_config_error(values: dict[str, Any]) -> None:
    made = outcome(lambda: load_config(None, values, Path("/nowhere")))
    assert isinstance(made, Config) or str(made).startswith("command line: ")


@given(st.text(max_size=60))
def test_any_text_is_toml_or_a_config_error_naming_the_file(text: str) -> None:
    made = outcome(lambda: parse_toml(text, "x.toml"))
    assert isinstance(made, dict) or str(made).startswith("x.toml:")


# ---- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Config, ModelSettings])
def test_the_reference_describes_every_key_of_every_table_and_no_other(kind: type[msgspec.Struct]) -> None:
    described = {f"{table.path} {table.mark}".strip(): [key.name for key in table.keys] for table in describe(kind)}
    tables = tables_of(kind)
    for path, table in tables.items():
        below = f"{path}." if path else ""
        inner = {name.removeprefix(below).removesuffix(".NAME") for name in tables if name and name.startswith(below)}
        assert described.pop(path) == [name for name in table.__struct_encode_fields__ if name not in inner]
    assert described == {}


@pytest.mark.parametrize("kind", [Config, ModelSettings])
def test_each_default_in_the_reference_is_toml_that_says_the_default(kind: type[msgspec.Struct]) -> None:
    tables = tables_of(kind)
    for table in describe(kind):
        fields = {
            field.encode_name: field for field in msgspec.structs.fields(tables[f"{table.path} {table.mark}".strip()])
        }
        for key in table.keys:
            field = fields[key.name]
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            assert key.is_required is field.required
            if key.default is None:
                assert default in (None, msgspec.NODEFAULT)
            else:
                assert msgspec.convert(parse_toml(f"x = {key.default}", "reference")["x"], field.type) == default


def test_the_reference_says_type_limits_unit_default_and_meaning_of_a_key() -> None:
    row = next(line for line in markdown().splitlines() if line.startswith("| `poll_s`"))
    assert row == "| `poll_s` | a number, above 0 (s) | `3600.0` | Time between two checks of the repository. |"


def test_no_cell_of_the_reference_breaks_its_table() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}


def test_a_page_keeps_what_is_written_by_hand_around_the_reference() -> None:
    page = f"# Configuration\n\nBy hand.\n\n{BEGIN}\nold\n{END}\n\nMore.\n"
    made = renewed(page)
    assert made == renewed(made) == f"# Configuration\n\nBy hand.\n\n{BEGIN}\n\n{markdown()}\n{END}\n\nMore.\n"
    with pytest.raises(ValueError, match="settings: end"):
        renewed(f"{BEGIN}\nno end\n")
