"""A `TritonPythonModel` beside a `model.py` of ours that does the same: nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.makers import BenchModel
from bench.scenarios import SLICES, Bench
from bench.servers import Daemon

WIDTH, ROWS = 16, 64

OURS = f"""
INPUTS = [{{"name": "x", "datatype": "FP32", "shape": [-1, {WIDTH}]}}]
OUTPUTS = [{{"name": "y", "datatype": "FP32", "shape": [-1, {WIDTH}]}}]

def infer(inputs):
    return {{"y": inputs["x"]}}
"""

TRITONS = f"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "x", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}})
        config.add_output({{"name": "y", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}})
        config.set_max_batch_size({ROWS})
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())]))
        return responses
"""


def triton_python(bench: Bench) -> None:
    """Both identities in a host each, 64 in flight, 16 numbers a request, up to 64 of them a run."""
    daemons: dict[str, Daemon] = {}
    for name, source in (("ours", OURS), ("tritons", TRITONS)):
        path = bench.children.folder / name / "model.py"
        path.parent.mkdir()
        path.write_text(source)
        model = BenchModel("identity", path, (WIDTH,), WIDTH)
        served = {model.name: (model, f"max_batch_rows = {ROWS}\n")}
        daemons[name] = Daemon(bench.children, served, doors=("--python-models",))
    request = bench.request(model)
    for daemon in daemons.values():
        daemon.start_and_settle(request)
    for number in bench.rounds("triton_python", SLICES):
        for in_flight in (1, 64):
            names = list(daemons)[:: -1 if number % 2 else 1]
            rates = {name: bench.rate(daemons[name].endpoint, request, in_flight, 1 / SLICES).rate for name in names}
            bench.figures.add(f"triton_python.{in_flight}.rate", rates["tritons"])
            bench.figures.add(f"triton_python.{in_flight}.ratio", rates["tritons"] / rates["ours"])
    for daemon in daemons.values():
        daemon.stop()


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {"triton_python": triton_python}
