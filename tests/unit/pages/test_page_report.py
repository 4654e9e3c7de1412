"""A bug report has no secret in it, wherever one stands."""

from __future__ import annotations

import io
import tarfile

import pytest

from edge_runtime.pages.report import HIDDEN, bundle, without_secrets


@pytest.mark.parametrize(
    "text",
    [
        "rtsp://admin:hunter2@camera.local/stream", "mqtts://user:hunter2@broker:8883", "http://hunter2@host/",
        "https://host/stream?user=a&password=hunter2", "https://host/s?token=hunter2&x=1", "https://host/?api_key=hunter2",
        "Authorization: Bearer hunter2hunter2", "ert_hunter2hunter2hunter2",
        "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----", "-----BEGIN EC PRIVATE KEY-----\nhunter2",
        "cannot open rtsp://admin:hunter2@10.0.0.2/ within 5 s",
    ],
)  # fmt: skip
def test_a_text_loses_its_secrets(text: str) -> None:
    told = without_secrets({"reason": [text]})["reason"][0]
    assert "hunter2" not in told
    assert HIDDEN in told


@pytest.mark.parametrize("name", ["password", "client_secret", "token", "secret_key", "api_token", "passphrase", "key"])
def test_a_field_that_is_named_as_a_secret_is_taken_out(name: str) -> None:
    assert without_secrets({name: "hunter2", "more": [{name: ["hunter2"]}]}) == {name: HIDDEN, "more": [{name: HIDDEN}]}


def test_paths_numbers_and_plain_addresses_stay() -> None:
    values = {
        "tokens_file": "/etc/tokens.toml",
        "key_file": "/k.pem",
        "password_file": None,
        "keys": 3,
        "url": "tcp://a:1",
    }
    assert without_secrets(values) == values


def test_the_bundle_holds_the_files_for_its_owner_alone() -> None:
    with tarfile.open(fileobj=io.BytesIO(bundle({"a.json": "{}\n", "b.json": "é"}))) as archive:
        assert archive.getnames() == ["edge-runtime-report/a.json", "edge-runtime-report/b.json"]
        assert {each.mode for each in archive} == {0o600}
        assert archive.extractfile("edge-runtime-report/b.json").read().decode() == "é"  # type: ignore[union-attr]
