"""The gRPC door through Triton's own client, unmodified, against a real daemon."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from edge_runtime.config.settings import SharedMemorySettings
from edge_runtime.doors.access.tokens import TokenFile
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.errors import AddressTaken
from tests.contract.running_daemon import ANSWER_S, floats, grpc_url, put_model, running_daemon
from tests.models import onnx_models

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    return models


@pytest.fixture(scope="module")
def address(models, tmp_path_factory):
    """Where a daemon listens whose door allows control."""
    settings = GrpcSettings(endpoint="127.0.0.1:0", control=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), grpc=settings) as daemon:
        yield grpc_url(daemon).removeprefix("grpc://")


@pytest.fixture
def client(address):
    with triton.InferenceServerClient(address) as client:
        yield client


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def tensor(name, array, datatype="FP32"):
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def test_a_client_of_tritons_learns_of_server_and_model(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "edge-runtime"
    metadata = client.get_model_metadata("mlp")
    assert (metadata.name, list(metadata.versions)) == ("mlp", ["1"])
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [("x", "FP32", [-1, 16])]


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_every_request_with_one_head_gets_its_own_answer(client, model):
    for turn in range(5):  # decoded, remembered, known, and in a burst
        x = floats(2, 16, seed=turn)
        answer = client.infer(model, [tensor("x", x)], request_id=f"turn {turn}" if turn % 2 else "")
        np.testing.assert_allclose(answer.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)
        response = answer.get_response()
        assert (response.model_name, response.model_version) == (model, "1")
        assert response.id == (f"turn {turn}" if turn % 2 else "")
        assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [("y", "FP32", [2, 4])]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(InferenceServerException, match="nobody") as caught:
        client.infer("nobody", [tensor("x", floats(1, 16))])
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_a_daemon_with_the_door_leaves_nothing_behind(models, tmp_path):
    path = tmp_path / "grpc.sock"
    with running_daemon(models, tmp_path / "run", grpc=GrpcSettings(endpoint=f"unix:{path}")) as daemon:
        assert daemon.doors["grpc"].endpoints == [f"unix:{path}"]
        with triton.InferenceServerClient(f"unix:{path}") as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="allow-control") as caught:
                client.unload_model("mlp")
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"


def test_an_address_that_another_process_has_is_a_setting_to_change(models, tmp_path, address):
    with (
        pytest.raises(AddressTaken, match="--grpc"),
        running_daemon(models, tmp_path / "run", grpc=GrpcSettings(endpoint=address)),
    ):
        pass


def test_a_unix_socket_belongs_to_one_daemon_and_a_stale_one_to_the_next(models, tmp_path):
    path = tmp_path / "grpc.sock"
    settings = GrpcSettings(endpoint=f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with running_daemon(models, tmp_path / "a", grpc=settings):
        with pytest.raises(AddressTaken), running_daemon(models, tmp_path / "b", grpc=settings):
            pass
        with triton.InferenceServerClient(f"unix:{path}") as client:
            assert client.is_server_live()
    assert not path.exists()


def test_requests_of_a_client_that_cancels_leave_the_queue(tmp_path):
    put_model(
        tmp_path / "models",
        "slow",
        onnx_models.slow,
        constant=1.0,
        size=768,
        toml='mode = "workers"\nmax_batch_rows = 1\n',
    )
    with running_daemon(
        tmp_path / "models", tmp_path / "run", grpc=GrpcSettings(endpoint="127.0.0.1:0"), calibrate=False
    ) as daemon:
        address = grpc_url(daemon).removeprefix("grpc://")
        with triton.InferenceServerClient(address) as client, grpc.insecure_channel(address) as channel:
            wanted = client.get_model_metadata("slow").inputs[0]
            shape = [max(each, 1) for each in wanted.shape]
            request = service_pb2.ModelInferRequest(model_name="slow")
            request.inputs.add(name=wanted.name, datatype=wanted.datatype, shape=shape)
            request.raw_input_contents.append(np.ones(shape, np.float32).tobytes())
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = [stub.ModelInfer.future(request) for _ in range(60)]
            asked[0].result(ANSWER_S)
            for each in asked[1:]:
                each.cancel()
            assert stub.ModelInfer(request, timeout=ANSWER_S).model_name == "slow"
            assert daemon.status.stats()["metrics"]["models"]["slow"]["refused"]["cancelled"] > 0


def test_a_health_probe_needs_no_more_than_grpcs_own_protocol(address):
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"
        assert check(b"\x0a\x1e" + b"inference.GRPCInferenceService") == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a\x01x")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watching) == b"\x08\x01"
        watching.cancel()


def test_a_daemon_without_the_door_imports_nothing_of_it(models, tmp_path):
    program = f"""
import sys
from pathlib import Path
from tests.contract.running_daemon import running_daemon
with running_daemon(Path({str(models)!r}), Path({str(tmp_path)!r}) / "run"):
    print(sorted({{"grpc", "google.protobuf", "httptools"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_door_is_served_without_the_library_of_its_clients(models, tmp_path):
    program = f"""
import sys
from pathlib import Path
from edge_runtime.doors.grpc.settings import GrpcSettings
from tests.contract.running_daemon import running_daemon
door = GrpcSettings(endpoint="127.0.0.1:0")
with running_daemon(Path({str(models)!r}), Path({str(tmp_path)!r}) / "run", grpc=door):
    print(sorted({{"grpc", "asyncio", "hpack"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "['hpack']"


def test_typed_contents_are_tensors_too(address):
    x = floats(2, 16)
    request = service_pb2.ModelInferRequest(model_name="mlp")
    made = request.inputs.add(name="x", datatype="FP32", shape=[2, 16])
    made.contents.fp32_contents.extend(x.reshape(-1).tolist())
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(6):  # read, remembered, known: the same bytes are answered each time
            answer = stub.ModelInfer(request)
            y = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(2, 4)
            np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)

        del made.contents.fp32_contents[-1]
        with pytest.raises(grpc.RpcError, match="31 elements in fp32_contents, wanted 32") as caught:
            stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["edge-runtime-code"] == "tensor_mismatch"


def test_text_goes_there_and_back(client):
    text = np.array([["b\0c", "ü"]], object)
    answer = client.infer("text", [tensor("x", text, "BYTES")])
    assert answer.as_numpy("y").tolist() == [[b"b\0c", "ü".encode()]]


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_a_compressed_request_is_read(client, compression):
    x = floats(1, 16)
    answer = client.infer("mlp", [tensor("x", x)], compression_algorithm=compression)
    np.testing.assert_allclose(answer.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)


def test_outputs_come_in_the_order_in_which_they_are_asked_for(client):
    a, b = floats(2, 3), np.arange(4, dtype=np.int64).reshape(2, 2)
    wanted = {"sum": a + a, "twice": b + b}
    for order in (("sum", "twice"), ("twice", "sum"), ("twice",)):
        for turn in range(4):
            answer = client.infer(
                "pair",
                [tensor("a", a), tensor("b", b, "INT64")][:: 1 if turn % 2 else -1],
                outputs=[triton.InferRequestedOutput(name) for name in order],
            )
            assert tuple(each.name for each in answer.get_response().outputs) == order
            for name in order:
                np.testing.assert_array_equal(answer.as_numpy(name), wanted[name])


def test_a_stream_lives_on_after_an_error_and_marks_the_last_answer_where_asked_to(client):
    x, answers = floats(1, 16), queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    asked = [("a", "queued", True), ("b", "nobody", False), ("c", "mlp", False), ("d", "mlp", True)] * 3
    for name, model, wants_final in asked:
        client.async_stream_infer(model, [tensor("x", x)], request_id=name, enable_empty_final_response=wants_final)
    for name, model, wants_final in asked:
        result, error = answers.get(timeout=ANSWER_S)
        if model == "nobody":
            assert "nobody" in str(error)
            continue
        response = result.get_response()
        assert response.id == name
        assert {key: value.bool_param for key, value in response.parameters.items()} == (
            {"triton_final_response": True} if wants_final else {}
        )
        np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)
    client.stop_stream()


@pytest.mark.smoke
def test_the_asyncio_client_works(address):
    """In a process of its own: grpcio's event loops of two threads wake each other."""
    program = f"""
import asyncio, numpy as np, tritonclient.grpc.aio as triton
async def main():
    async with triton.InferenceServerClient({address!r}) as client:
        assert await client.is_server_ready()
        x = triton.InferInput("x", [1, 16], "FP32")
        x.set_data_from_numpy(np.ones((1, 16), np.float32))
        found = await asyncio.gather(*[client.infer("mlp", [x], request_id=str(n)) for n in range(200)])
        assert [each.get_response().id for each in found] == [str(n) for n in range(200)]
        async def requests():
            for n in range(3):
                yield {{"model_name": "queued", "inputs": [x], "request_id": str(n)}}
        print([result.get_response().id async for result, error in client.stream_infer(requests())])
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "['0', '1', '2']"), done.stderr


def test_a_deadline_that_cannot_be_met_is_refused_as_grpc_and_parameters_say_it(client, address):
    for options in ({"timeout": 1}, {"parameters": {"timeout_ms": 0}}):
        with pytest.raises(InferenceServerException) as caught:
            client.infer("queued", [tensor("x", floats(1, 16))], **options)
        assert caught.value.status() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE")
    answer = client.infer("queued", [tensor("x", floats(1, 16))], client_timeout=ANSWER_S)
    assert answer.as_numpy("y").shape == (1, 4)


def test_tokens_decide_who_may_call(models, tmp_path):
    tokens = tmp_path / "tokens.toml"
    file, may_infer = TokenFile().with_token("a", ("infer",))
    file, may_control = file.with_token("b", ("control",))
    tokens.write_text(file.text())
    settings = GrpcSettings(endpoint="127.0.0.1:0", tokens_file=str(tokens))
    with (
        running_daemon(models, tmp_path / "run", grpc=settings) as daemon,
        triton.InferenceServerClient(grpc_url(daemon).removeprefix("grpc://")) as client,
    ):
        inputs = [tensor("x", floats(1, 16))]
        for headers, status in (({}, "UNAUTHENTICATED"), (bearer("x"), "UNAUTHENTICATED"),
                                (bearer(may_control), "PERMISSION_DENIED")):  # fmt: skip
            with pytest.raises(InferenceServerException) as caught:
                client.infer("mlp", inputs, headers=headers)
            assert caught.value.status() == f"StatusCode.{status}"
        for _ in range(4):
            assert client.infer("mlp", inputs, headers=bearer(may_infer)).as_numpy("y").shape == (1, 4)
        with pytest.raises(InferenceServerException, match="control"):
            client.unload_model("text", headers=bearer(may_infer))
        client.unload_model("text", headers=bearer(may_control))
        assert not client.is_model_ready("text", headers=bearer(may_infer))


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def test_the_best_classes_come_as_text(client):
    x = floats(2, 16)
    for model in ("mlp", "queued"):
        answer = client.infer(model, [tensor("x", x)], outputs=[triton.InferRequestedOutput("y", class_count=2)])
        best = np.argsort(-expected(x), axis=1)[:, :2]
        found = [[int(each.split(b":")[1]) for each in row] for row in answer.as_numpy("y")]
        assert found == best.tolist()


def test_tensors_lie_in_memory_that_the_client_names(models, tmp_path):
    settings = {
        "grpc": GrpcSettings(endpoint="127.0.0.1:0"),
        "shared_memory": SharedMemorySettings(client_named=True),
    }
    x, name = floats(1, 16), f"edge-test-{os.getpid()}"
    with (
        running_daemon(models, tmp_path / "run", **settings) as daemon,
        triton.InferenceServerClient(grpc_url(daemon).removeprefix("grpc://")) as client,
    ):
        memory = shm.create_shared_memory_region("both", f"/{name}", 80)
        try:
            shm.set_shared_memory_region(memory, [x])
            client.register_system_shared_memory("both", f"/{name}", 80)
            assert list(client.get_system_shared_memory_status().regions) == ["both"]
            asked, wanted = triton.InferInput("x", [1, 16], "FP32"), triton.InferRequestedOutput("y")
            asked.set_shared_memory("both", 64)
            wanted.set_shared_memory("both", 16, 64)
            for _ in range(4):
                client.infer("mlp", [asked], outputs=[wanted])
                y = shm.get_contents_as_numpy(memory, np.float32, [1, 4], offset=64)
                np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
                y[:] = 0
            client.unregister_system_shared_memory()
            with pytest.raises(InferenceServerException) as caught:
                client.infer("mlp", [asked], outputs=[wanted])
            assert caught.value.status() == "StatusCode.NOT_FOUND"
        finally:
            shm.destroy_shared_memory_region(memory)


def test_configuration_statistics_and_settings_are_tritons(client):
    config = client.get_model_config("mlp").config
    assert (config.name, config.input[0].name, list(config.input[0].dims)) == ("mlp", "x", [16])
    client.infer("mlp", [tensor("x", floats(1, 16))])
    (statistics,) = client.get_inference_statistics("mlp").model_stats
    assert (statistics.name, statistics.version) == ("mlp", "1")
    assert {each.name for each in client.get_model_repository_index().models} >= {"mlp", "pair", "text"}
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert client.get_log_settings().settings["log_error"].bool_param
    level = client.get_log_settings().settings["log_info"].bool_param
    assert client.update_log_settings({"log_info": level}).settings["log_info"].bool_param == level
    assert client.update_trace_settings(settings={"trace_level": ["OFF"]}).settings
    with pytest.raises(InferenceServerException, match="Unknown"):
        client.update_trace_settings(settings={"nothing": "1"})
    with pytest.raises(InferenceServerException):
        client.register_cuda_shared_memory("a", b"AAAA", 0, 1)


def test_a_model_is_unloaded_and_loaded(client):
    client.unload_model("text")
    assert not client.is_model_ready("text")
    client.load_model("text")
    assert client.is_model_ready("text")
