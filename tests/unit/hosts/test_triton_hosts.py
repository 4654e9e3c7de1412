"""A TritonPythonModel in a host: what it is told of requests, what it may answer, and a host that breaks the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import EdgeRuntimeError, HostEnded, RunFailed
from edge_runtime.hosts.hosts import Hosts
from edge_runtime.hosts.instance import HostedBackend, HostInstance
from edge_runtime.hosts.messages import RequestLine
from edge_runtime.tensors import Array
from tests.models.triton_models import HEAD

LIMIT_S = 60.0

AUTO = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(64)
        config.set_dynamic_batching()
        return config
"""

Load = Callable[[str], HostInstance]
Came = list[tuple[int, Sequence[Array | None] | EdgeRuntimeError | None, bool]]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Load a model whose `execute(self, requests)` has this body; closed when the test ends."""
    hosts, made = Hosts(), []

    def load_one(body: str) -> HostInstance:
        path = tmp_path / "model" / "1" / "model.py"
        path.parent.mkdir(parents=True)
        lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
        path.write_text(f"{HEAD}class TritonPythonModel:{AUTO}\n    def execute(self, requests):\n{lines}\n")
        hosted = HostedBackend(backend("python", allows_code=True), hosts, allows_code=True)
        made.append(hosted.load(path, LoadOptions()))
        made[-1].finish_warm_up()
        return made[-1]

    yield load_one
    for each in made:
        each.close()
    hosts.close()


def ask(instance: HostInstance, *rows: int, lines: Sequence[RequestLine] = ()) -> tuple[list[Array], Came]:
    """Run requests of so many rows, whose values count from 0; what joined, and what came by itself."""
    came: Came = []

    def take(index: int, response: Sequence[Array | None] | EdgeRuntimeError | None, is_last: bool) -> bool:
        came.append((index, response, is_last))
        return True

    x = np.arange(sum(rows), dtype=np.float32)[:, None]
    return instance.run_requests([[x]], LIMIT_S, rows, lines, take), came


RESPONSES = """
xs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
return [pb_utils.InferenceResponse([pb_utils.Tensor("y", VALUE)]) for x in xs]
"""


@pytest.mark.parametrize("rows", [(1,), (3,), (1, 1, 1), (2, 1, 4)])
def test_each_request_has_its_own_rows_and_what_they_give_is_joined(load: Load, rows: tuple[int, ...]) -> None:
    joined, came = ask(load(RESPONSES.replace("VALUE", "x + len(xs) * 100")), *rows)
    assert joined[0].tolist() == [[value + len(rows) * 100] for value in range(sum(rows))]
    assert came == []


def test_shapes_that_do_not_join_come_one_by_one(load: Load) -> None:
    joined, came = ask(load(RESPONSES.replace("VALUE", "np.zeros((len(x), int(x[0, 0])), np.float32)")), 1, 1, 2)
    assert joined == []
    assert [(index, outputs[0].shape, is_last) for index, outputs, is_last in came] == [
        (0, (1, 0), True),
        (1, (1, 1), True),
        (2, (2, 2), True),
    ]


def test_a_response_larger_than_the_slot_gets_a_larger_one(load: Load) -> None:
    joined, came = ask(
        load(RESPONSES.replace("VALUE", "np.full((1, 100_000 * (1 + int(x[0, 0]))), 7, np.float32)")), 1, 1
    )
    assert joined == []
    assert [outputs[0].shape for _, outputs, _ in came] == [(1, 100_000), (1, 200_000)]
    assert all((outputs[0] == 7).all() for _, outputs, _ in came)


def test_an_output_that_is_not_asked_for_may_be_missing_and_one_that_is_may_not(load: Load) -> None:
    body = "return [pb_utils.InferenceResponse([]) for _ in requests]"
    joined, came = ask(load(body), 1, 1, lines=(RequestLine(outputs=("z",)), RequestLine(outputs=("y",))))
    (_, first, _), (_, second, _) = came
    assert (joined, first) == ([], [None])
    assert isinstance(second, RunFailed)
    assert second.message == "the response has no output 'y'; got none"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Respond(5, None, '', '', True)", "a response to request 5 of 1"),
        ("Respond(-1, None, '', '', True)", "a response to request -1 of 1"),
        ("Respond(0, (), '', '', True)", "0 results for 1 outputs"),
        ("Respond(0, (SlotPlace((1 << 40,), 0, 1 << 42),), '', '', True)", "a tensor lies at 0 to"),
        ("Results(())", "0 results for 1 outputs"),
    ],
)
def test_a_host_that_answers_what_it_was_not_asked_is_ended_and_replaced(load: Load, message: str, words: str) -> None:
    instance = load(f"""
from edge_runtime.hosts.messages import Respond, Results, SlotPlace, send
x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
if len(x) == 13:
    send(requests[0].is_cancelled_by[0]._channel, {message})
return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
""")
    with pytest.raises(HostEnded, match=words):
        ask(instance, 13)
    assert ask(instance, 2)[0][0].tolist() == [[0], [1]]


def test_a_host_cannot_invent_codes_of_errors(load: Load) -> None:
    body = "requests[0].is_cancelled_by[0].respond(0, None, ('my_own', 'words'), is_last=True)\nreturn []"
    instance = load(body)
    with pytest.raises(RunFailed, match="Number of InferenceResponse objects"):
        instance.run_requests([[np.zeros((1, 1), np.float32)]], LIMIT_S, (1,), (), check_code)
    assert codes == ["run_failed"]


codes: list[str] = []


def check_code(index: int, response: object, is_last: bool) -> bool:
    assert isinstance(response, EdgeRuntimeError)
    codes.append(response.code)
    return True
