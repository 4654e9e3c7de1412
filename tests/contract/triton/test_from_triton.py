"""A model repository of Triton as it stands, served with nothing imported and asked by Triton's unmodified clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.models import triton_repository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}

KINDS = {np.dtype(np.int32): "INT32", np.dtype(np.float32): "FP32", np.dtype(np.uint8): "UINT8"}


class Asking:
    """One of Triton's clients, with both kinds' answers in one form."""

    def __init__(self, address: str, kind: str) -> None:
        self._module = CLIENTS[kind]
        self.client = self._module.InferenceServerClient(address)

    def infer(self, model: str, outputs: Any = None, **tensors: Any) -> Any:
        return self.client.infer(model, list(self._inputs(tensors)), outputs=outputs)

    def _inputs(self, tensors: dict[str, Any]) -> Iterator[Any]:
        for name, array in tensors.items():
            given = np.asarray(array)
            tensor = self._module.InferInput(name, list(given.shape), KINDS.get(given.dtype, "BYTES"))
            tensor.set_data_from_numpy(given if given.dtype in KINDS else given.astype(object))
            yield tensor

    def classes(self, name: str, count: int) -> list[Any]:
        return [self._module.InferRequestedOutput(name, class_count=count)]

    def json(self, name: str, *words: str) -> dict[str, Any]:
        """What a call tells, as over HTTP."""
        told = getattr(self.client, name)(*words)
        return told if isinstance(told, dict) else MessageToDict(told, preserving_proto_field_name=True)


def _doors(**settings: Any) -> dict[str, Any]:
    return {
        "http": HttpSettings(endpoint="127.0.0.1:0", control=True),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0", control=True),
        "python_models": True,
        "calibrate": False,
        **settings,
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    triton_repository.densenet(repository)
    triton_repository.simple(repository)
    triton_repository.ensemble(repository)
    triton_repository.pictures(repository)
    return repository


@pytest.fixture(scope="module")
def daemon(repository, tmp_path_factory) -> Iterator[Daemon]:
    with running_daemon(repository, tmp_path_factory.mktemp("run"), **_doors()) as daemon:
        with asking(daemon, "http") as ask:  # starts the workers that stand in for waiting runs, which stay
            ask.infer("bls", IMAGE=GREEN_AND_BLUE, MODEL_NAME=["pictures"])
        yield daemon


@contextmanager
def asking(daemon: Daemon, kind: str) -> Iterator[Asking]:
    asking = Asking(daemon.doors[kind].endpoints[0].partition("://")[2], kind)
    try:
        yield asking
    finally:
        asking.client.close()


@pytest.fixture(params=list(CLIENTS))
def kind(request) -> str:
    return request.param


@pytest.fixture
def ask(daemon, kind) -> Iterator[Asking]:
    with asking(daemon, kind) as ask:
        yield ask


A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
GREEN_AND_BLUE = np.zeros((2, 8, 8, 3), np.uint8)
GREEN_AND_BLUE[0, ..., 1] = 255
GREEN_AND_BLUE[1, ..., 2] = 200


def test_every_model_of_the_repository_is_ready(ask):
    assert ask.client.is_server_ready()
    index = ask.client.get_model_repository_index()
    entries = index if isinstance(index, list) else [MessageToDict(each) for each in index.models]
    assert {entry["name"]: entry["state"] for entry in entries} == dict.fromkeys(
        ("bls", "classifier", "densenet_onnx", "ensemble_add_sub", "pictures", "postprocess", "preprocess", "simple"),
        "READY",
    )


def test_the_quick_starts_model_answers_in_the_shapes_and_labels_of_its_config(ask):
    picture = np.zeros((3, 8, 8), np.float32)
    picture[1] = 1.0

    answer = ask.infer("densenet_onnx", data_0=picture)
    assert answer.as_numpy("fc6_1").tolist() == [0.0, 1.0, 0.0]
    best = ask.infer("densenet_onnx", ask.classes("fc6_1", 2), data_0=picture).as_numpy("fc6_1")
    assert best.tolist() == [b"1.000000:1:green", b"0.000000:0:red"]

    told = ask.json("get_model_metadata", "densenet_onnx")
    assert [(each["name"], list(map(int, each["shape"]))) for each in told["inputs"]] == [("data_0", [3, 8, 8])]
    assert told["platform"] == "onnxruntime_onnx"


def test_the_client_examples_model_adds_and_subtracts_and_its_texts_are_tritons(ask):
    answer = ask.infer("simple", INPUT0=A, INPUT1=B)
    assert (answer.as_numpy("OUTPUT0") == A + B).all()
    assert (answer.as_numpy("OUTPUT1") == A - B).all()

    for tensors, said in (
        ({"INPUT0": A}, "expected 2 inputs but got 1 inputs for model 'simple'"),
        ({"INPUT0": A, "INPUT9": B}, "unexpected inference input 'INPUT9' for model 'simple'"),
        ({"INPUT0": A.astype(np.float32), "INPUT1": B}, "data-type is 'FP32', but model 'simple' expects 'INT32'"),
        (
            {"INPUT0": A[:, 1:], "INPUT1": B},
            r"for model 'simple'. Expected \[-1,16\], got \[1,15\]",
        ),
        (dict.fromkeys(("INPUT0", "INPUT1"), np.repeat(A, 9, 0)), "batch-size must be <= 8 for 'simple'"),
    ):
        with pytest.raises(InferenceServerException, match=said):
            ask.infer("simple", **tensors)


def test_a_config_comes_back_as_it_was_written_and_completed(ask):
    told = ask.json("get_model_config", "simple")
    config = told.get("config", told)
    assert config["max_batch_size"] == 8
    assert [(each["name"], each["data_type"]) for each in config["input"]] == [
        ("INPUT0", "TYPE_INT32"), ("INPUT1", "TYPE_INT32"),
    ]  # fmt: skip
    assert config["backend"] == "onnxruntime"
    assert int(config["version_policy"]["latest"]["num_versions"]) == 1
    assert config["default_model_filename"] == "model.onnx"
    told = ask.json("get_model_config", "pictures")
    steps = told.get("config", told)["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["preprocess", "classifier", "postprocess"]


def test_an_ensemble_runs_one_model_twice(ask):
    answer = ask.infer("ensemble_add_sub", A=A, B=B)
    assert (answer.as_numpy("TWICE_A") == 2 * A).all()
    assert (answer.as_numpy("TWICE_B") == 2 * B).all()
    assert ask.json("get_model_metadata", "ensemble_add_sub")["platform"] == "ensemble"


def test_an_ensembles_requests_count_for_it_and_for_each_of_its_steps(ask):
    def answered() -> list[int]:
        told = [ask.json("get_inference_statistics", name) for name in ("ensemble_add_sub", "simple")]
        return [int(each["model_stats"][0]["inference_stats"]["success"]["count"]) for each in told]

    before = answered()
    for _ in range(3):
        ask.infer("ensemble_add_sub", A=A, B=B)

    # An answer may come before it is counted, as with Triton; so may one of another test.
    until_s = time.monotonic() + ANSWER_S
    while any(now < then + more for now, then, more in zip(answered(), before, (3, 6), strict=True)):
        assert time.monotonic() < until_s, (before, answered())


def test_an_ensemble_with_python_before_and_behind_a_network_answers_labels(ask):
    answer = ask.infer("pictures", IMAGE=GREEN_AND_BLUE)
    assert answer.as_numpy("LABEL").tolist() == [[b"green"], [b"blue"]]


def test_a_python_model_asks_another_by_name_and_passes_on_why_it_cannot(ask):
    answer = ask.infer("bls", IMAGE=GREEN_AND_BLUE, MODEL_NAME=["pictures"])
    assert answer.as_numpy("LABEL").tolist() == [[b"green"], [b"blue"]]

    with pytest.raises(InferenceServerException, match="Request for unknown model: 'absent' is not found"):
        ask.infer("bls", IMAGE=GREEN_AND_BLUE, MODEL_NAME=["absent"])


def test_many_clients_at_once_get_their_own_answers(daemon, kind):
    def loop(number: int) -> None:
        with asking(daemon, kind) as ask:
            for count in range(20):
                given = A + number * 1000 + count
                assert (ask.infer("ensemble_add_sub", A=given, B=B).as_numpy("TWICE_A") == 2 * given).all()
                rows = 1 + (number + count) % 2
                labels = ask.infer("pictures", IMAGE=GREEN_AND_BLUE[:rows]).as_numpy("LABEL").ravel().tolist()
                assert labels == [b"green", b"blue"][:rows]

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(loop, number) for number in range(8)]:
            done.result(ANSWER_S * 3)


def test_the_load_of_an_ensemble_brings_its_steps_and_its_unload_takes_along_those_not_asked_for(
    repository, tmp_path, kind
):
    explicit = _doors(model_control="explicit", load_models=("classifier",))
    with running_daemon(repository, tmp_path / "run", **explicit) as daemon, asking(daemon, kind) as ask:
        ask.client.load_model("pictures")
        assert ask.infer("pictures", IMAGE=GREEN_AND_BLUE).as_numpy("LABEL").tolist() == [[b"green"], [b"blue"]]
        assert all(map(ask.client.is_model_ready, ("preprocess", "classifier", "postprocess")))
        with pytest.raises(InferenceServerException, match=r"'preprocess'.*'pictures'"):
            ask.client.unload_model("preprocess")
        assert ask.client.is_model_ready("pictures")

        ask.client.unload_model("pictures", unload_dependents=True)
        ready = [name for name in triton_repository.PICTURE_MODELS if ask.client.is_model_ready(name)]
        assert ready == ["classifier"]
