"""The contract of a door, held against this one: pytest tests/test_contract.py."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge_runtime.errors import error_from_wire
from edge_runtime.messages import InferResult
from edge_runtime.tensors import DATATYPES, Array, datatype_name
from edge_runtime.testing import Ask, DoorContract, DoorKit


@contextmanager
def asking(stats: Mapping[str, Any]) -> Iterator[Ask]:
    """Ask by lines of JSON."""
    host, _, port = stats["lines"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rwb") as file:

        def ask(
            model: str, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None, **options: Any
        ) -> InferResult:
            tensors = [
                {"name": name, "datatype": datatype_name(x.dtype), "shape": x.shape, "data": _listed(x)}
                for name, x in inputs.items()
            ]
            wanted = {} if outputs is None else {"outputs": list(outputs)}
            said = {name: value for name, value in options.items() if value is not None}
            file.write(json.dumps({"model": model, "inputs": tensors, **wanted, **said}).encode() + b"\n")
            file.flush()
            answer = json.loads(file.readline())
            if "error" in answer:
                raise error_from_wire(answer["error"]["code"], answer["error"]["message"])
            return InferResult(
                answer["model_name"],
                int(answer["model_version"]),
                {each["name"]: _array(each) for each in answer["outputs"]},
            )

        yield ask


def _listed(x: Array) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in x.ravel().tolist()]


def _array(said: Mapping[str, Any]) -> Array:
    values = [each.encode() for each in said["data"]] if said["datatype"] == "BYTES" else said["data"]
    return np.array(values, DATATYPES[said["datatype"]].dtype).reshape(said["shape"])


class TestLines(DoorContract):
    door_kit = DoorKit(("edge-runtime-lines",), 'lines.endpoint = "127.0.0.1:0"', asking)
