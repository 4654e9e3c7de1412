"""Serve's proxy answers the clients of a device, unchanged: JSON, binary tensors, refusals, what is not allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

import tritonclient.http as triton

from edge_runtime import OipClient, Runtime
from edge_runtime.errors import DeadlineUnmeetable, Forbidden, ModelNotFound, TensorMismatch
from tests.ray.conftest import ENOUGH_MS, MAX_BODY_BYTES, ONE, ROWS, ask, tensor

pytestmark = pytest.mark.usefixtures("served")


def test_client_of_devices_gets_the_runtimes_answer(models: Path, proxy: str) -> None:
    with Runtime(models) as runtime, OipClient(proxy) as client:
        wanted = runtime.infer("mlp", {"x": ROWS})["y"]
        for _ in range(4):  # the third and later ones are of a known header
            np.testing.assert_array_equal(client.infer("mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS)["y"], wanted)


def test_errors_are_those_of_a_device(proxy: str) -> None:
    with OipClient(proxy) as client:
        with pytest.raises(ModelNotFound):
            client.infer("absent", {"x": ROWS})
        with pytest.raises(TensorMismatch):
            client.infer("mlp", {"x": ROWS[:, :3]})
        with pytest.raises(Forbidden):
            client.unload("mlp")


def test_client_of_triton_gets_tensors_in_binary_form(proxy: str) -> None:
    client = triton.InferenceServerClient(urlsplit(proxy).netloc)
    try:
        assert client.is_server_ready()
        assert client.is_model_ready("mlp")
        assert client.get_model_metadata("mlp")["inputs"][0]["name"] == "x"
        given = triton.InferInput("x", list(ROWS.shape), "FP32")
        given.set_data_from_numpy(ROWS)
        answers = [client.infer("mlp", [given]).as_numpy("y") for _ in range(4)]
    finally:
        client.close()
    assert all(each.shape == (2, 4) for each in answers)


def test_json_of_any_client_is_answered(proxy: str) -> None:
    status, headers, answer = ask(proxy, "/v2/models/mlp/infer", tensor(ROWS))
    assert (status, headers["content-type"], answer["model_name"]) == (200, "application/json", "mlp")
    assert np.array(answer["outputs"][0]["data"]).shape == (8,)


def test_large_json_is_answered(proxy: str) -> None:
    rows = np.random.default_rng(0).normal(size=(256, 16))  # 80 KB: read beside the loop
    status, _, answer = ask(proxy, "/v2/models/mlp/infer", tensor(rows))
    assert status == 200, answer
    assert answer["outputs"][0]["shape"] == [256, 4]


def test_request_that_would_be_late_is_refused_as_on_a_device(proxy: str) -> None:
    ask(proxy, "/v2/models/sleeper/infer", tensor(ONE))
    status, headers, told = ask(proxy, "/v2/models/sleeper/infer", tensor(ONE), x_request_timeout_seconds="0.08")
    assert (status, told["code"]) in {(503, "deadline_unmeetable"), (504, "deadline_exceeded")}
    assert status != 503 or int(headers["retry-after"]) >= 1
    with OipClient(proxy) as client, pytest.raises(DeadlineUnmeetable):
        client.infer("sleeper", {"x": ONE}, timeout_ms=60)


def test_path_that_is_not_there_is_said(proxy: str) -> None:
    assert ask(proxy, "/v1/models")[0] == 404


def test_body_over_the_bound_is_refused(proxy: str) -> None:
    body: dict[str, Any] = {"parameters": {"filler": "." * MAX_BODY_BYTES}, **tensor(ROWS)}
    assert ask(proxy, "/v2/models/mlp/infer", body)[0] == 413
