"""PyTorch archives written by hand, so that the rules about them are tested where PyTorch is not installed."""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SYMBOL = "Symbol('s77', positive=True, integer=True)"


def tensor(*sizes: Json) -> Json:
    """A tensor's description as torch._export.serde.schema has it."""
    return {
        "dtype": 7, "sizes": list(sizes), "requires_grad": False, "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": 1} for _ in sizes], "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip


PROGRAM: Json = {
    "graph_module": {
        "graph": {
            "inputs": [{"as_tensor": {"name": "p_weight"}}, {"as_tensor": {"name": "x"}}],
            "outputs": [{"as_tensor": {"name": "mul"}}],
            "nodes": [
                {
                    "target": "torch.ops.aten.mul.Tensor",
                    "inputs": [
                        {"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1},
                        {"name": "other", "arg": {"as_tensor": {"name": "p_weight"}}, "kind": 1},
                    ],
                    "outputs": [{"as_tensor": {"name": "mul"}}],
                    "metadata": {"stack_trace": 'File "model.py", line 1, in forward\n    return x * self.weight'},
                    "is_hop_single_tensor_return": None,
                    "name": "mul",
                }
            ],
            "tensor_values": {
                "p_weight": tensor({"as_int": 3}),
                "x": tensor({"as_expr": {"expr_str": SYMBOL, "hint": {"as_int": 2}}}, {"as_int": 3}),
                "mul": tensor({"as_expr": {"expr_str": SYMBOL, "hint": {"as_int": 2}}}, {"as_int": 3}),
            },
            "sym_int_values": {}, "sym_bool_values": {}, "is_single_tensor_return": False, "custom_obj_values": {},
            "sym_float_values": {},
        },
        "signature": {
            "input_specs": [
                {"parameter": {"arg": {"name": "p_weight"}, "parameter_name": "weight"}},
                {"user_input": {"arg": {"as_tensor": {"name": "x"}}}},
            ],
            "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": "mul"}}}}],
        },
        "module_call_graph": [
            {
                "fqn": "",
                "signature": {
                    "inputs": [], "outputs": [],
                    "in_spec": json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
                        {"type": "builtins.tuple", "context": "null", "children_spec": [
                            {"type": None, "context": None, "children_spec": []}]},
                        {"type": "builtins.dict", "context": "[]", "children_spec": []}]}]),
                    "out_spec": json.dumps([1, {"type": None, "context": None, "children_spec": []}]),
                    "forward_arg_names": ["x"],
                },
            }
        ],
        "metadata": {}, "treespec_namedtuple_fields": {},
    },
    "opset_version": {"aten": 10}, "range_constraints": {"s77": {"min_val": 2, "max_val": None}},
    "schema_version": {"major": 8, "minor": 20}, "verifiers": ["TRAINING"], "torch_version": "2.13.0+cpu",
    "guards_code": [],
}  # fmt: skip

WEIGHTS: Json = {
    "config": {"weight": {
        "path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": tensor({"as_int": 3}),
    }}
}  # fmt: skip


def program(change: Callable[[Json], None] = lambda _: None) -> Json:
    """A sound program, changed."""
    changed = copy.deepcopy(PROGRAM)
    change(changed)
    return changed


def write_program(
    path: Path, document: Json | None = None, *, weights: Json | None = None, more: Mapping[str, bytes] | None = None
) -> Path:
    """A .pt2 as torch.export.save lays it out."""
    members = {
        "data/weights/weight_0": b"\x00\x00\x80?" * 3,
        "data/weights/model_weights_config.json": json.dumps(weights or WEIGHTS).encode(),
        "data/constants/model_constants_config.json": b'{"config": {}}',
        "models/model.json": json.dumps(document or PROGRAM).encode(),
        "data/sample_inputs/model.pt": b"",
        "archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "byteorder": b"little",
    }  # fmt: skip
    return write_archive(path, {**members, **(more or {})})


def change_program(source: Path, path: Path, change: Callable[[Json], None]) -> Path:
    """A copy of a .pt2 that PyTorch wrote, its program changed."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as copied:
        for member in archive.infolist():
            content = archive.read(member)
            if member.filename.endswith("models/model.json"):
                document = json.loads(content)
                change(document)
                content = json.dumps(document).encode()
            copied.writestr(member.filename, content)
    return path


def write_archive(path: Path, members: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED) -> Path:
    """A zip whose members lie below one folder, as PyTorch writes them."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)
    return path
