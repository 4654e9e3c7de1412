"""The table `[language]` of model.toml."""

from __future__ import annotations

import pytest

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.language.settings import LanguageSettings
from edge_runtime.typed_toml import build


def test_language_table_is_the_capabilitys_struct() -> None:
    settings = build(ModelSettings, {"language": {"max_streams": 4, "kv_cache_mb": 64}}, "model.toml")

    assert settings.language == LanguageSettings(max_streams=4, kv_cache_mb=64)


def test_model_without_a_language_table_has_none() -> None:
    assert build(ModelSettings, {}, "model.toml").language is None


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"max_stream": 4}, "language.max_stream: unknown key 'max_stream'; did you mean 'max_streams'?"),
        ({"prefill_tokens": 1}, "language.prefill_tokens: got 1, wanted an integer, 16 or more"),
    ],
)
def test_language_table_with_a_slip_is_refused_with_its_key(table: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        build(ModelSettings, {"language": table}, "model.toml")


def test_language_that_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="language: got 7, wanted a table"):
        build(ModelSettings, {"language": 7}, "model.toml")
