"""The walk over an ONNX file: every way out of the version folder is refused before a library reads anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.errors import LoadFailed
from tests.models import onnx_models
from tests.models.onnx_models import add_weights, external_tensor


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version folder with a good data file, beside a secret outside of it."""
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (folder / "w.bin").write_bytes(bytes(8))
    (tmp_path / "model" / "secret").write_bytes(bytes(8))
    return folder


def refuse(artifact: Path, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        check_onnx_files(artifact)


def test_a_model_without_external_data_passes_with_its_size(version: Path) -> None:
    artifact = onnx_models.mlp(version)
    files = check_onnx_files(artifact)
    assert files.locations == ()
    assert files.total_bytes == artifact.stat().st_size
    assert files.precision == "f32"


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "data/w.bin", "..w", "grün"])
def test_a_plain_file_inside_the_folder_passes(version: Path, location: str) -> None:
    path = version / location
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(8))
    artifact = add_weights(version, external_tensor(location, offset="0", length="8"))
    files = check_onnx_files(artifact)
    assert files.locations == (location,)
    assert files.total_bytes == artifact.stat().st_size + 8


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("../secret", "leaves the model's folder"),
        ("data/../../secret", "leaves the model's folder"),
        ("/etc/passwd", "absolute"),
        ("//etc/passwd", "absolute"),
        ("", "empty"),
        (".", "empty name"),
        ("w.bin/", "empty name"),
        ("data//w.bin", "empty name"),
        ("w\0.bin", "NUL or a backslash"),
        ("..\\secret", "NUL or a backslash"),
        ("C:\\w.bin", "NUL or a backslash"),
        ("*/_ORT_MEM_ADDR_/*", "address in memory"),
        ("*/_ORT_NATIVE_ENDIAN_MEM_ADDR_/*", "address in memory"),
        ("_ORT_MEM_ADDR_", "address in memory"),
        ("missing.bin", "data file 'missing.bin' is not there; copy it to "),
        ("w.bin/below", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_location_that_leads_elsewhere_is_refused(version: Path, location: str, reason: str) -> None:
    refuse(add_weights(version, external_tensor(location)), reason)


def _symlink(version: Path) -> None:
    (version / "bad").symlink_to(version / "w.bin")


def _hard_link(version: Path) -> None:
    os.link(version.parent / "secret", version / "bad")


def _folder(version: Path) -> None:
    (version / "bad").mkdir()


def _fifo(version: Path) -> None:
    os.mkfifo(version / "bad")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_symlink, "symbolic link"), (_hard_link, "hard links"), (_folder, "a folder"), (_fifo, "a fifo")],
)
def test_a_location_that_is_not_a_plain_file_is_refused(
    version: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(version)
    refuse(add_weights(version, external_tensor("bad")), reason)


def test_a_link_among_the_parents_is_refused(version: Path) -> None:
    (version / "data").symlink_to(version.parent)
    refuse(add_weights(version, external_tensor("data/secret")), "without symbolic links")


def test_a_linked_model_may_not_have_external_data(version: Path) -> None:
    real = add_weights(version.parent / "elsewhere", external_tensor("w.bin"))
    (version / "model.onnx").symlink_to(real)
    refuse(version / "model.onnx", "symbolic link and has external data")


def test_a_linked_model_that_is_whole_passes(version: Path) -> None:
    (version / "model.onnx").symlink_to(onnx_models.mlp(version.parent / "elsewhere"))
    assert check_onnx_files(version / "model.onnx").locations == ()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"offset": "9"}, "8 bytes, but the model wants"),
        ({"offset": "4", "length": "5"}, "8 bytes, but the model wants"),
        ({"length": "9"}, "8 bytes, but the model wants"),
        ({"offset": "-1"}, "whole number"),
        ({"offset": "0x1"}, "whole number"),
        ({"length": "99999999999999999999"}, "whole number"),
        ({"length": "²"}, "whole number"),
        ({"basepath": "/etc"}, "key 'basepath'"),
    ],
)
def test_ranges_outside_the_file_and_unknown_keys_are_refused(
    version: Path, entries: dict[str, str], reason: str
) -> None:
    refuse(add_weights(version, external_tensor("w.bin", **entries)), reason)


def test_two_locations_in_one_tensor_are_refused(version: Path) -> None:
    tensor = external_tensor("w.bin")
    tensor.external_data.add(key="location", value="../secret")
    refuse(add_weights(version, tensor), "names its location twice")


def test_external_data_is_checked_even_where_the_tensor_denies_it(version: Path) -> None:
    tensor = external_tensor("../secret")
    tensor.data_location = TensorProto.DEFAULT
    refuse(add_weights(version, tensor), "leaves the model's folder")


def test_external_without_a_location_is_refused(version: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    refuse(add_weights(version, tensor), "not in which one")


BAD = external_tensor("../secret")


def _in_graph(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _graph(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "g", [], [])


def _with_attribute(attribute: onnx.AttributeProto) -> onnx.NodeProto:
    node = helper.make_node("Constant", [], ["c"])
    node.attribute.append(attribute)
    return node


def _sparse() -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=numpy_helper.from_array(np.zeros(1, np.float32)), indices=BAD, dims=[4])


def _places() -> dict[str, onnx.ModelProto]:
    """A bad tensor in each place where ONNX can hold one."""
    bad_graph = _graph(_with_attribute(helper.make_attribute("value", BAD)))
    places = {
        "a node's attribute": _in_graph(bad_graph),
        "a list of tensors": _in_graph(_graph(_with_attribute(onnx.AttributeProto(name="t", tensors=[BAD])))),
        "a subgraph": _in_graph(_graph(_with_attribute(onnx.AttributeProto(name="g", g=bad_graph)))),
        "a list of subgraphs": _in_graph(_graph(_with_attribute(onnx.AttributeProto(name="g", graphs=[bad_graph])))),
        "a sparse attribute": _in_graph(_graph(_with_attribute(onnx.AttributeProto(sparse_tensor=_sparse())))),
        "a list of sparse": _in_graph(_graph(_with_attribute(onnx.AttributeProto(sparse_tensors=[_sparse()])))),
    }
    sparse = _in_graph(_graph())
    sparse.graph.sparse_initializer.append(_sparse())
    function = _in_graph(_graph())
    function.functions.append(onnx.FunctionProto(name="f", domain="d", node=list(bad_graph.node)))
    default = _in_graph(_graph())
    default.functions.append(onnx.FunctionProto(name="f", attribute_proto=[helper.make_attribute("value", BAD)]))
    training = _in_graph(_graph())
    training.training_info.append(onnx.TrainingInfoProto(algorithm=bad_graph))
    initialization = _in_graph(_graph())
    initialization.training_info.append(onnx.TrainingInfoProto(initialization=bad_graph))
    return places | {
        "a sparse initializer": sparse, "a function": function, "a function's default": default,
        "a training algorithm": training, "a training initialization": initialization,
    }  # fmt: skip


@pytest.mark.parametrize("place", list(_places()))
def test_a_tensor_is_found_wherever_it_is_nested(version: Path, place: str) -> None:
    artifact = version / "model.onnx"
    artifact.write_bytes(_places()[place].SerializeToString())
    refuse(artifact, "leaves the model's folder")


def test_a_graph_in_two_halves_is_refused(version: Path) -> None:
    """A protobuf reader would merge them."""
    artifact = onnx_models.mlp(version)
    artifact.write_bytes(artifact.read_bytes() * 2)
    refuse(artifact, "occurs twice")


def test_precompiled_code_is_refused(version: Path) -> None:
    node = helper.make_node("EPContext", [], ["y"], domain="com.microsoft", ep_cache_context="/tmp/code.bin")
    refuse(onnx_models.save(version, _graph(node)), "EPContext")


@pytest.mark.parametrize("depth", [40, 20_000])
def test_nesting_deeper_than_protobuf_allows_is_refused(version: Path, depth: int) -> None:
    graph = b""
    for _ in range(depth):
        for tag in (b"\x32", b"\x2a", b"\x0a"):  # g of an attribute of a node of a graph
            graph = tag + _varint(len(graph)) + graph
    artifact = version / "model.onnx"
    artifact.write_bytes(b"\x3a" + _varint(len(graph)) + graph)
    refuse(artifact, "nests deeper")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",  # field number 0
        b"\x3b",  # a group
        b"\x3e",  # wire type 6
        b"\x3a",  # a length that is missing
        b"\x3a\x05abc",  # a length beyond the end
        b"\x3a" + b"\xff" * 9 + b"\x7f",  # an enormous length
        b"\x3a" + b"\x80" * 20,  # a number without an end
        b"\xff\xff\xff\xff\xff\x0f",  # a field number over 32 bits
        b"\x38\x01",  # a graph that is a number
        b"\x08\x08",  # no graph
        b"PK\x03\x04",
        b"{}",
    ],
)
def test_bytes_that_are_not_an_onnx_file_are_refused(version: Path, content: bytes) -> None:
    artifact = version / "model.onnx"
    artifact.write_bytes(content)
    refuse(artifact, "ONNX|graph")


def test_a_folder_or_fifo_in_place_of_the_model_is_refused(version: Path) -> None:
    (version / "model.onnx").mkdir()
    refuse(version / "model.onnx", "is a folder")
    os.mkfifo(version / "pipe")
    refuse(version / "pipe", "is a fifo")


def test_a_large_sparse_file_costs_no_memory_or_time(version: Path) -> None:
    """3 GiB of weights in one field, most of it a hole: skipped, not read."""
    artifact = version / "model.onnx"
    size = 3 << 30
    with artifact.open("wb") as file:
        tensor = b"\x4a" + _varint(size)  # raw_data of a tensor
        initializer = b"\x2a" + _varint(len(tensor) + size) + tensor
        file.write(b"\x3a" + _varint(len(initializer) + size) + initializer)
        file.truncate(file.tell() + size)
    assert check_onnx_files(artifact).total_bytes > size


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _sample(tmp: Path) -> bytes:
    return add_weights(tmp, external_tensor("w.bin", offset="0", length="8")).read_bytes()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_pass_or_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    _judge(tmp_path_factory.getbasetemp() / "random.onnx", content)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 300))
def test_a_changed_model_passes_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutants"
    content = bytearray(_sample(folder))
    (folder / "w.bin").write_bytes(bytes(8))
    for position, value in changes:
        content[position % len(content)] = value
    _judge(folder / "model.onnx", bytes(content[: len(content) - cut % 20]))


def _judge(artifact: Path, content: bytes) -> None:
    """Either a verdict that names only files inside, or a refusal; never another exception."""
    artifact.write_bytes(content)
    try:
        files = check_onnx_files(artifact)
    except LoadFailed:
        return
    folder = artifact.parent.resolve()
    assert all((folder / location).resolve().is_relative_to(folder) for location in files.locations)
