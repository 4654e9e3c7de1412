"""Triton's four unmodified clients, HTTP and gRPC, blocking and asyncio: the features of each against a real daemon."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import queue
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, floats, http_url, put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

CLIENTS = {
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "other", onnx_models.mlp)
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0", control=True),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0", control=True),
    }
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that inflates, which no test then leaves
            raw.ask("POST", "/v2/models/mlp/infer", gzip.compress(b"{}"), content_encoding="gzip")
        yield daemon


@pytest.fixture(params=list(CLIENTS))
def kind(request) -> str:
    return request.param


def address(daemon: Daemon, kind: str) -> str:
    return daemon.doors[kind.partition(".")[0]].endpoints[0].partition("://")[2]


def call_all(daemon: Daemon, kind: str, calls):
    """Run `calls(ask, module)` with a client of a kind: `ask(name, ...)` calls a method and waits where it must."""

    async def run():
        client = CLIENTS[kind].InferenceServerClient(address(daemon, kind))
        try:

            async def ask(name, *arguments, **options):
                found = getattr(client, name)(*arguments, **options)
                return await found if inspect.isawaitable(found) else found

            return await calls(ask, CLIENTS[kind.partition(".")[0]])
        finally:
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

    return asyncio.run(run())


def given(module, x):
    tensor = module.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def field(found, name):
    return found[name] if isinstance(found, dict) else getattr(found, name)


def test_health_metadata_configuration_statistics_and_index(daemon, kind):
    async def calls(ask, module):
        del module
        assert await ask("is_server_live")
        assert await ask("is_server_ready")
        assert await ask("is_model_ready", "mlp")
        assert not await ask("is_model_ready", "absent")
        assert field(await ask("get_server_metadata"), "name") == "edge-runtime"
        assert field(await ask("get_model_metadata", "mlp"), "name") == "mlp"
        configuration = await ask("get_model_config", "mlp")
        configuration = configuration if isinstance(configuration, dict) else configuration.config
        assert field(configuration, "name") == "mlp"
        told = field(await ask("get_inference_statistics", "mlp"), "model_stats")
        assert [field(each, "name") for each in told] == ["mlp"]
        index = await ask("get_model_repository_index")
        entries = index if isinstance(index, list) else index.models
        assert {field(each, "name") for each in entries} == {"mlp", "other"}

    call_all(daemon, kind, calls)


def test_answers_with_id_priority_timeout_version_and_chosen_outputs(daemon, kind):
    x = floats(3, 16)

    async def calls(ask, module):
        result = await ask(
            "infer",
            "mlp",
            given(module, x),
            model_version="1",
            outputs=[module.InferRequestedOutput("y")],
            request_id="seven",
            priority=1,
            timeout=20_000_000,
        )
        answer = result.get_response()
        assert field(answer, "id") == "seven"
        assert field(answer, "model_version") == "1"
        return result.as_numpy("y")

    np.testing.assert_allclose(call_all(daemon, kind, calls), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_compressed_requests_and_answers_are_the_same(daemon, kind, how):
    x = floats(8, 16)
    options = (
        {"request_compression_algorithm": how, "response_compression_algorithm": how}
        if kind.startswith("http")
        else {"compression_algorithm": how}
    )

    async def calls(ask, module):
        return (await ask("infer", "mlp", given(module, x), **options)).as_numpy("y")

    np.testing.assert_allclose(call_all(daemon, kind, calls), expected(x), rtol=1e-4, atol=1e-4)


def test_classes_are_asked_for_by_count(daemon, kind):
    x = floats(1, 16)

    async def calls(ask, module):
        outputs = [module.InferRequestedOutput("y", class_count=2)]
        return (await ask("infer", "mlp", given(module, x), outputs=outputs)).as_numpy("y")

    best = [int(text.split(b":")[1]) for text in call_all(daemon, kind, calls).reshape(-1)]
    assert best == np.argsort(-expected(x)[0])[:2].tolist()


def test_refusals_are_its_own_exception(daemon, kind):
    async def calls(ask, module):
        for model, x in (("absent", floats(1, 16)), ("mlp", floats(1, 15))):
            with pytest.raises(InferenceServerException):
                await ask("infer", model, given(module, x))

    call_all(daemon, kind, calls)


def test_models_are_unloaded_and_loaded(daemon, kind):
    async def calls(ask, module):
        del module
        await ask("unload_model", "other")
        assert not await ask("is_model_ready", "other")
        await ask("load_model", "other")
        assert await ask("is_model_ready", "other")

    call_all(daemon, kind, calls)


@pytest.mark.smoke
def test_async_infer_over_http_gives_each_its_own(daemon):
    inputs = [floats(1, 16, seed=seed) for seed in range(8)]
    with tritonclient.http.InferenceServerClient(address(daemon, "http"), concurrency=4) as client:
        asked = [client.async_infer("mlp", given(tritonclient.http, x)) for x in inputs]
        for x, each in zip(inputs, asked, strict=True):
            np.testing.assert_allclose(each.get_result().as_numpy("y"), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
def test_async_infer_and_a_stream_over_grpc_give_each_its_own(daemon):
    answers: queue.Queue = queue.Queue()
    inputs = [floats(1, 16, seed=seed) for seed in range(8)]
    with tritonclient.grpc.InferenceServerClient(address(daemon, "grpc")) as client:
        for number, x in enumerate(inputs):
            client.async_infer(
                "mlp",
                given(tritonclient.grpc, x),
                lambda result, error: answers.put((result, error)),
                request_id=str(number),
            )
        _check_each(answers, inputs)
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, x in enumerate(inputs):
            client.async_stream_infer("mlp", given(tritonclient.grpc, x), request_id=str(number))
        _check_each(answers, inputs)
        client.stop_stream()


def _check_each(answers: queue.Queue, inputs) -> None:
    for _ in inputs:
        result, error = answers.get(timeout=ANSWER_S)
        assert error is None
        x = inputs[int(result.get_response().id)]
        np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-4, atol=1e-4)


def test_refusals_begin_with_the_words_that_scripts_look_for(daemon, kind):
    """The texts are those that Triton's own tests search for."""
    x = floats(1, 16)

    async def calls(ask, module):
        async def refused(words, *inputs, model="mlp", **options):
            with pytest.raises(InferenceServerException) as caught:
                await ask("infer", model, list(inputs), **options)
            assert words in str(caught.value)

        (right,) = given(module, x)
        strange = module.InferInput("z", [1, 16], "FP32")
        strange.set_data_from_numpy(x)
        (short,) = given(module, x[:, :15])
        (cut,) = given(module, x[:, :15])
        cut.set_shape([1, 16])
        ints = module.InferInput("x", [1, 16], "INT32")
        ints.set_data_from_numpy(x.astype(np.int32))
        missing = (
            "expected 1 inputs but got 0 inputs for model 'mlp'. Got input(s) [], but missing required input(s) ['x']. "
            "Please provide all required input(s)."
        )
        await refused(missing)
        await refused("expected 1 inputs but got 2 inputs for model 'mlp'. Got input(s) ['x','z']", right, strange)
        await refused("unexpected inference input 'z' for model 'mlp'", strange)
        await refused("unexpected shape for input 'x' for model 'mlp'. Expected [-1,16], got [1,15]", short)
        await refused("inference input 'x' data-type is 'INT32', but model 'mlp' expects 'FP32'", ints)
        await refused("input byte size mismatch for input 'x' for model 'mlp'. Expected 64, got 60", cut)
        wanted = module.InferRequestedOutput("none")
        await refused("unexpected inference output 'none' for model 'mlp'", right, outputs=[wanted])
        for name in (" ", "../etc", "mlp/") if kind.startswith("grpc") else ():  # a path of HTTP has no such name
            with pytest.raises(InferenceServerException) as caught:
                await ask("load_model", name)
            words = (
                "name cannot be empty. Please enter a valid name",
                "name must not contain path traversal characters",
            )
            assert any(each in str(caught.value) for each in words)

    call_all(daemon, kind, calls)
