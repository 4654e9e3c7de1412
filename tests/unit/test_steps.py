"""Tables `[input.NAME]`: each is read by the capability of its source, and survives a way that knows less of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import InputSteps, ModelSteps, steps_fields, steps_from_fields
from edge_runtime.typed_toml import build

PICTURES = PictureSteps(fit="crop", range="0..1")


def settings_of(**table: Any) -> ModelSettings:
    return build(ModelSettings, {"input": {"x": table}}, "model.toml")


def test_a_table_is_of_the_type_of_its_capability() -> None:
    assert settings_of(fit="crop", range="0..1").input == {"x": PICTURES}
    assert settings_of(**{"from": "nv12"}).input == {"x": PictureSteps("nv12")}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"from": "smell"}, "model.toml: input.x.from: got 'smell', wanted one of 'picture', "),
        ({"fitt": "crop"}, "model.toml: input.x.fitt: unknown key 'fitt'; did you mean 'fit'?"),
        ({"fit": "crip", "color": 3}, "input.x.fit: got 'crip', wanted one of "),
        ({"range": "0..1", "mean": [1]}, "model.toml: input.x: got range beside mean or scale"),
    ],
)
def test_a_table_that_is_wrong_is_named_with_its_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of(**table)
    assert message in raised.value.message


def test_a_value_that_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"input\.x: got 5, wanted a table"):
        build(ModelSettings, {"input": {"x": 5}}, "model.toml")


def test_settings_and_steps_keep_their_tables_on_the_way_to_another_process() -> None:
    settings = ModelSettings(input={"x": PICTURES})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=ModelSettings) == settings
    steps = ModelSteps({"x": PICTURES}, files={"a.json": "/models/m/a.json"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(steps), type=ModelSteps) == steps


def test_a_client_reads_what_a_newer_daemon_tells_as_far_as_it_knows_it() -> None:
    told = {
        "x": {"from": "picture", "fit": "crop", "range": "0..1", "depth": 16},
        "y": {"from": "smell", "nose": "left"},
    }
    assert steps_from_fields({"inputs": told}).inputs == {"x": PICTURES, "y": InputSteps("smell")}


def test_metadata_has_the_keys_of_a_table_and_no_path() -> None:
    fields = steps_fields(ModelSteps({"x": PICTURES}, files={"a.json": "/models/m/a.json"}))
    assert (fields["inputs"]["x"]["from"], fields["inputs"]["x"]["fit"]) == ("picture", "crop")
    assert "/models" not in str(fields)
