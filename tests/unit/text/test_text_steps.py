"""The table of texts: by its mark it needs no `from`, and keys that contradict are named."""

from __future__ import annotations

from typing import Any

import pytest

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.text.text_steps import TextSteps
from edge_runtime.typed_toml import build


def table_of(**keys: Any) -> Any:
    return build(ModelSettings, {"input": {"text": keys}}, "model.toml").input["text"]


def test_a_table_with_a_tokenizer_is_one_of_texts() -> None:
    assert table_of(tokenizer="t.json", length=64) == TextSteps(tokenizer="t.json", length=64)
    assert table_of(**{"from": "text"}) == TextSteps()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer": ""}, "input.text.tokenizer: got '', wanted text, not empty"),
        ({"tokenizer": "t", "fit": "crop"}, "input.text.fit: unknown key 'fit'"),
        ({"tokenizer": "t", "stride": 4}, "stride is of windows; say windows = true"),
        ({"tokenizer": "t", "windows": True, "length": 8, "stride": 8}, "stride is 8, and a window has 8 tokens"),
        ({"tokenizer": "t", "hypothesis": "It is so."}, "hypothesis: wanted one {} in it"),
        ({"tokenizer": "t", "hypothesis": "{} {}"}, "hypothesis: wanted one {} in it"),
        ({"tokenizer": "t", "hypothesis": "{}", "windows": True}, "got hypothesis and windows; say one of the two"),
        ({"tokenizer": "t", "entailment": 2}, "entailment is with hypothesis"),
        ({"tokenizer": "t", "length": 0}, "input.text.length: got 0, wanted an integer, 1 or more"),
    ],
)
def test_keys_that_contradict_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        table_of(**keys)
    assert message in raised.value.message
