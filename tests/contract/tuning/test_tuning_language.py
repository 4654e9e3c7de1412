"""`edge-runtime tune` of a language model: the budget of prompt tokens that keeps the time between two tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.typed_toml import parse_toml
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have a daemon of its own, which a tune would not disturb."""
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/nobody.sock")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "models" / "words" / "1")
    (tmp_path / "models" / "words" / "model.toml").write_text("[language]\nmax_streams = 2\nkv_cache_mb = 16\n")
    return tmp_path


def tune(site: Path, capsys: pytest.CaptureFixture[str], *others: str) -> tuple[int, Any]:
    places = ["--models", str(site / "models"), "--state", str(site / "state"), "--profile", "x86-generic"]
    status = main(["tune", "words", *places, "--time", "1s", "--json", *others])
    return status, json.loads(capsys.readouterr().out)


def test_a_budget_that_keeps_the_objective_is_written_beside_it(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = tune(site, capsys, "--slo", "p99=60s")
    assert status == 0, found
    written = parse_toml((site / "models" / "words" / "model.toml").read_text(), "x")["language"]
    assert written == {"max_streams": 2, "kv_cache_mb": 16, **found["values"]}
    assert found["values"]["inter_token_ms"] == 60_000
    assert found["values"]["prefill_tokens"] == max(int(row["prefill_tokens"]) for row in found["rows"])


def test_nothing_is_written_where_no_budget_keeps_the_objective(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (site / "models" / "words" / "model.toml").read_text()
    status, found = tune(site, capsys, "--slo", "p99=0.001ms")
    assert (status, found["values"], found["written"]) == (1, {}, [])
    assert (site / "models" / "words" / "model.toml").read_text() == before
