"""Triton's sequences: `config.pbtxt` as it stands, its clients unmodified, and its statuses and texts."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import ANSWER_S, RawClient, put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

ACCUMULATOR = """
name: "{name}"
backend: "onnxruntime"
max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "total" data_type: TYPE_FP32 dims: [ 1 ] }}, {{ name: "number" data_type: TYPE_FP32 dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  {strategy}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} ] }}
  ]
  state [
    {{ input_name: "a_sum" output_name: "z_sum" data_type: TYPE_FP32 dims: [ 1 ]
      initial_state: {{ name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }} }},
    {{ input_name: "b_count" output_name: "y_count" data_type: TYPE_FP32 dims: [ 1 ] }}
  ]
}}
"""

STRATEGIES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 4 }", "default": ""}

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}

START = (
    "inference request for sequence {} to model 'direct' must specify the START flag on the first request of the "
    "sequence"
)


def put_accumulator(models, name, strategy, **options):
    put_model(models, name, onnx_models.accumulator, **options)
    (models / name / "config.pbtxt").write_text(ACCUMULATOR.format(name=name, strategy=strategy))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    for name, strategy in STRATEGIES.items():
        put_accumulator(models, name, strategy)
    doors = {
        "http": HttpSettings(endpoint="127.0.0.1:0", control=True),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0", control=True),
    }
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        yield daemon


COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            name, flags = request.correlation_id(), request.flags()
            value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1)[0])
            total = value if flags & 1 else self.sums[name] + value
            self.sums[name] = total
            if flags & 2:
                total += int(self.sums.pop(name) * 0) + int(name)
            tensor = pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
"""Sums by the id of the sequence, which the last answer adds."""

EXAMPLE = """
name: "{name}"
backend: "onnxruntime"
max_batch_size: 8
input [ {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
sequence_batching {{ max_sequence_idle_microseconds: 5000000 {strategy}
  control_input [
    {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
    {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} ] }} {more}
  ]
}}
"""

OF_DYNA = """,
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
"""


def put_examples(models):
    """The three models that Triton's own sequence clients ask, by the names that they have there."""
    for name, adds_id, strategy in (("simple_sequence", False, "direct { }"), ("simple_dyna_sequence", True, OLDEST)):
        put_model(models, name, onnx_models.triton_sequence, adds_id=adds_id)
        more = OF_DYNA if adds_id else ""
        (models / name / "config.pbtxt").write_text(EXAMPLE.format(name=name, strategy=strategy, more=more))
    put_counting(models, "simple_string_dyna_sequence")


def put_counting(models, name):
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(COUNTING_CONFIG.replace("counting", name))
    (models / name / "1" / "model.py").write_text(COUNTING)


OLDEST = "oldest { max_candidate_sequences: 4 }"

COUNTING_CONFIG = """
name: "counting"
backend: "python"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } }
"""


@pytest.fixture(scope="module")
def python_daemon(tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    put_counting(models, "counting")
    put_examples(models)
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True, **doors) as daemon:
        yield daemon


def test_a_python_model_gets_id_and_flags_of_each_request(python_daemon):
    address = python_daemon.doors["grpc"].endpoints[0].partition("://")[2]
    with tritonclient.grpc.InferenceServerClient(address) as client:

        def ask(value, sequence, **marks):
            given = tritonclient.grpc.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(np.full((1, 1), value, np.int32))
            return client.infer("counting", [given], sequence_id=sequence, **marks).as_numpy("OUTPUT")[0, 0]

        assert ask(1, 1000, sequence_start=True) == 1
        assert ask(10, "20", sequence_start=True) == 10
        assert ask(2, 1000) == 3
        assert ask(3, 1000, sequence_end=True) == 1006
        assert ask(5, "20", sequence_end=True) == 35
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask(1, 1000)


VALUES = (11, 7, 5, 3, 2, 0, 1)
"""What Triton's own sequence clients send, behind a first 0, 100 or 20."""


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("dyna", [False, True])
def test_the_calls_of_tritons_own_sequence_clients_have_the_answers_that_they_expect(python_daemon, kind, dyna):
    module, address = CLIENTS[kind], python_daemon.doors[kind].endpoints[0].partition("://")[2]
    number, text = ("simple_dyna_sequence", "simple_string_dyna_sequence") if dyna else ("simple_sequence",) * 2
    with module.InferenceServerClient(address) as client:

        def ask(model, sequence, values):
            found = []
            for count, value in enumerate(values, start=1):
                given = module.InferInput("INPUT", [1, 1], "INT32")
                given.set_data_from_numpy(np.full((1, 1), value, np.int32))
                result = client.infer(
                    model,
                    [given],
                    outputs=[module.InferRequestedOutput("OUTPUT")],
                    sequence_id=sequence,
                    sequence_start=count == 1,
                    sequence_end=count == len(values),
                )
                found.append(int(result.as_numpy("OUTPUT")[0][0]))
            return found

        last = 1000 if dyna else 0
        assert ask(number, 1000, (0, *VALUES)) == [1, *VALUES[:-1], VALUES[-1] + last]
        last += dyna
        assert ask(number, 1001, (100, *(-each for each in VALUES)))[-1] == -VALUES[-1] + last
        sums = np.cumsum([20, *(-each for each in VALUES)]).tolist()
        sums[-1] += 1002
        assert ask(text, "1002", (20, *(-each for each in VALUES))) == (
            sums if dyna else [21, *(-each for each in VALUES)]
        )


@pytest.fixture(params=list(CLIENTS))
def client(request, daemon):
    module = CLIENTS[request.param]
    address = daemon.doors[request.param].endpoints[0].partition("://")[2]
    with module.InferenceServerClient(address) as client:
        client.module = module
        yield client


def given(module, value, rows=1):
    x = module.InferInput("x", [rows, 1], "FP32")
    x.set_data_from_numpy(np.full((rows, 1), value, np.float32))
    return [x]


def step(client, value, sequence, *, start=False, end=False, model="direct", rows=1):
    result = client.infer(
        model,
        given(client.module, value, rows),
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
    )
    return result.as_numpy("total")[0, 0], result.as_numpy("number")[0, 0]


@pytest.mark.parametrize("model", STRATEGIES)
def test_states_whose_names_sort_differently_are_paired_by_name(client, model):
    found = [step(client, value, 41, start=value == 1, end=value == 3, model=model) for value in (1, 2, 3)]
    assert found == [(1, 1), (3, 2), (6, 3)]


def test_number_and_text_are_two_sequences(client):
    assert step(client, 1, 7, start=True) == (1, 1)
    assert step(client, 10, "7", start=True) == (10, 1)
    assert step(client, 2, 7, end=True) == (3, 2)
    assert step(client, 20, "7", end=True) == (30, 2)


@pytest.mark.parametrize(
    ("sequence", "marks", "rows", "text"),
    [
        (99, {}, 1, START.format(99)),
        (99, {"end": True}, 1, START.format(99)),
        ("odd", {}, 1, START.format("odd")),
        (0, {"start": True}, 1, "to model 'direct' must specify a non-zero or non-empty correlation ID"),
        (98, {"start": True}, 2, "must specify batch-size 1 due to requirements of sequence batcher"),
    ],
)  # fmt: skip
def test_refusals_have_tritons_status_and_text(client, sequence, marks, rows, text):
    with pytest.raises(InferenceServerException) as refused:
        step(client, 1, sequence, rows=rows, **marks)
    assert text in refused.value.message()
    status = refused.value.status()
    assert status in ("400", "StatusCode.INVALID_ARGUMENT")


def test_a_stream_keeps_the_order_of_sixty_requests_in_flight(daemon):
    answers = queue.Queue()
    address = daemon.doors["grpc"].endpoints[0].partition("://")[2]
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(60):
            client.async_stream_infer(
                "direct",
                given(tritonclient.grpc, 1),
                request_id=str(number),
                sequence_id="stream",
                sequence_start=number == 0,
                sequence_end=number == 59,
            )
        found = [answers.get(timeout=ANSWER_S) for _ in range(60)]
        client.stop_stream()
    assert [error for _, error in found if error is not None] == []
    assert [result.get_response().id for result, _ in found] == [str(number) for number in range(60)]
    assert [result.as_numpy("total")[0, 0] for result, _ in found] == list(range(1, 61))


def test_a_sequence_goes_on_over_another_door(daemon):
    found = []
    for number, (name, module) in enumerate([*CLIENTS.items(), *CLIENTS.items()]):
        with module.InferenceServerClient(daemon.doors[name].endpoints[0].partition("://")[2]) as client:
            client.module = module
            found.append(step(client, 1, 55, start=number == 0)[0])
    assert found == [1, 2, 3, 4]


def test_config_is_answered_as_it_was_written(client):
    config = client.get_model_config("direct")
    if not isinstance(config, dict):
        assert config.config.sequence_batching.state[0].input_name == "a_sum"
        return
    batching = config["sequence_batching"]
    assert batching["direct"] == {"max_queue_delay_microseconds": 0, "minimum_slot_utilization": 0.0}
    assert [each["input_name"] for each in batching["state"]] == ["a_sum", "b_count"]
    assert "dynamic_batching" not in config


@pytest.mark.parametrize(
    ("was", "wanted", "text"),
    [
        ("[ 0, 1 ]", "[ 0 ]", "must have exactly 2 entries for CONTROL_SEQUENCE_START for bad"),
        ('name: "START"', 'name: ""', "sequence batching control tensor must have a name for bad"),
        ('name: "START"', 'name: "NOPE"', "configuration specified sequence control 'NOPE', but model does"),
        ('"a_sum"', '"nope"', "state input 'nope'"),
        ("dims: [ 1 ] zero_data", "dims: [ 2 ] zero_data", "doesn't match 'state' dim description. 2 != 1"),
        ("TYPE_FP32 dims: [ 1 ] zero", "TYPE_INT32 dims: [ 1 ] zero", "does not match the state data type."),
        ("zero_data: true", 'data_file: "none.bin"', "failed to open text file for read"),
        ("direct { }", "direct { } iterative_sequence: true", "iterative_sequence"),
    ],
)  # fmt: skip
def test_a_config_that_triton_refuses_is_refused(tmp_path, was, wanted, text):
    put_accumulator(tmp_path, "bad", STRATEGIES["direct"])
    file = tmp_path / "bad" / "config.pbtxt"
    assert was in file.read_text()
    file.write_text(file.read_text().replace(was, wanted, 1))
    with running_daemon(tmp_path, tmp_path / ".run") as daemon, RawClient(daemon.endpoints[0]) as client:
        (entry,) = client.result("models")
        assert entry["state"] == "failed"
        assert text in entry["reason"]
