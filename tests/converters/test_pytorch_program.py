"""What torch.export.load would execute of a .pt2 never reaches it (pytorch_program.py lists it by PyTorch's source)."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters import conversion
from edge_runtime_converters.formats import SourceFormat
from edge_runtime_converters.onnx_from_pytorch import convert
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.pytorch_archives import write_safe_program
from tests.converters.programs import PROGRAM, WEIGHTS, Json, change_program, program, write_archive, write_program
from tests.converters.sources import needs, source_of

CALL = "__import__('pathlib').Path('canary').touch()"


def size(text: str) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

    return change


def target(text: str) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = text

    return change


def called(old: str, new: str) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        text = json.dumps(document).replace(json.dumps(old), json.dumps(new))
        document.clear()
        document.update(json.loads(text))

    return change


def nesting(tree: Json) -> Callable[[Json], None]:
    def change(document: Json) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, tree])

    return change


def hidden_subgraph(document: Json) -> None:
    graph = program(target("torch.os.system"))["graph_module"]["graph"]
    argument = {"name": "branch", "arg": {"as_graph": {"name": "branch", "graph": graph}}, "kind": 1}
    document["graph_module"]["graph"]["nodes"][0]["inputs"].append(argument)


def custom_object(document: Json) -> None:
    document["graph_module"]["graph"]["inputs"].append({"as_custom_obj": {"name": "o", "class_fqn": "a.B"}})


def passed_operator(document: Json) -> None:
    argument = {"name": "f", "arg": {"as_operator": "torch.os.system"}, "kind": 1}
    document["graph_module"]["graph"]["nodes"][0]["inputs"].append(argument)


LEAF: Json = {"type": None, "context": None, "children_spec": []}

HOSTILE: dict[str, Callable[[Json], None]] = {
    "a size that calls": size(f"{CALL} or s77"),
    "a size with an attribute": size("s77.__class__"),
    "a size with a subscript": size("[s77][0]"),
    "a size that calls what is called": size("Symbol('s77')()"),
    "a size that is a lambda": size("(lambda: s77)"),
    "a symbol of another name": size("Symbol('__import__')"),
    "a size with a string": size("'s77 or x'"),
    "a size that is too long": size("+".join(["s77"] * 1000)),
    "an operator of Python": target("torch.os.system"),
    "an operator that writes a file": target("torch.ops.aten.save.default"),
    "an operator that maps a file": target("torch.ops.aten.from_file.default"),
    "an operator of a library": target("torch.ops.load_library"),
    "an operator registered by somebody": target("torch.ops.custom.run.default"),
    "an extension's operator": target("#custom.run"),
    "a name that is source": called("mul", f"mul; {CALL}; mul"),
    "an argument's name that is source": called("x", f"x={CALL}"),
    "a weight's name that is source": called("weight", f"weight; {CALL}"),
    "a tree that imports a module": nesting(
        {"type": "collections.defaultdict", "children_spec": [], "context": {
            "default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}}
    ),
    "a tree that imports an enum": nesting(
        {"type": "builtins.dict", "context": json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "y"}]),
         "children_spec": [LEAF]}
    ),
    "a tree of another class": nesting({"type": "some.Class", "context": "null", "children_spec": [LEAF]}),
    "a graph inside a node": hidden_subgraph,
    "an object of C++": custom_object,
    "an operator that is passed on": passed_operator,
}  # fmt: skip


def test_a_sound_program_passes_and_keeps_its_numbers(tmp_path: Path) -> None:
    write_safe_program(write_program(tmp_path / "model.pt2"), tmp_path / "safe.pt2")
    with zipfile.ZipFile(tmp_path / "safe.pt2") as archive:
        assert archive.read("model/data/weights/weight_0") == b"\x00\x00\x80?" * 3
        document = json.loads(archive.read("model/models/model.json"))
    assert document["graph_module"]["graph"]["nodes"][0]["target"] == "torch.ops.aten.mul.Tensor"


@pytest.mark.parametrize("text", ["s77", "2*s77 + 1", "Max(1, FloorDiv(s77, 2))", "Eq(s0, 4)", "-1 + s77**2"])
def test_arithmetic_of_sizes_passes(tmp_path: Path, text: str) -> None:
    write_safe_program(write_program(tmp_path / "model.pt2", program(size(text))), tmp_path / "safe.pt2")


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_program_of_more_than_arithmetic_is_refused(tmp_path: Path, change: Callable[[Json], None]) -> None:
    path = write_program(tmp_path / "model.pt2", program(change))
    with pytest.raises(ConversionFailed, match=r"nothing of it was loaded|export it again"):
        write_safe_program(path, tmp_path / "safe.pt2")


def test_guards_and_pickled_example_inputs_are_left_out(tmp_path: Path) -> None:
    document = program(lambda changed: changed.update(guards_code=[f"{CALL} or True"]))
    path = write_program(tmp_path / "model.pt2", document, more={"data/sample_inputs/model.pt": b"\x80\x04 a pickle"})
    write_safe_program(path, tmp_path / "safe.pt2")
    with zipfile.ZipFile(tmp_path / "safe.pt2") as archive:
        assert archive.read("model/data/sample_inputs/model.pt") == b""
        assert json.loads(archive.read("model/models/model.json"))["guards_code"] == []


@pytest.mark.parametrize(
    "entry",
    [{"use_pickle": True}, {"use_pickle": 0}, {"path_name": "opaque_obj_0"}, {"path_name": "custom_obj_0"},
     {"path_name": "../../../etc/passwd"}],
)  # fmt: skip
def test_weights_that_are_not_tensors_are_refused(tmp_path: Path, entry: Json) -> None:
    weights = {"config": {"weight": {**WEIGHTS["config"]["weight"], **entry}}}
    with pytest.raises(ConversionFailed, match="nothing of it was loaded"):
        write_safe_program(write_program(tmp_path / "model.pt2", weights=weights), tmp_path / "safe.pt2")


@pytest.mark.parametrize(
    "name", ["data/weights/model.pt", "data/aotinductor/model/a.so", "data/constants/opaque_obj_0", "anything.py"]
)
def test_members_that_a_program_does_not_have_are_refused(tmp_path: Path, name: str) -> None:
    path = write_program(tmp_path / "model.pt2", more={name: b"\x80\x04"})
    with pytest.raises(ConversionFailed, match="none of a program's own files"):
        write_safe_program(path, tmp_path / "safe.pt2")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_program(tmp_path / "model.pt2")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/models/model.json", json.dumps(program(target("torch.os.system"))))
    with pytest.raises(ConversionFailed, match="two members of one name"):
        write_safe_program(path, tmp_path / "safe.pt2")


def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "bomb.pt2", {"models/model.json": b" " * 50_000_000}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(ConversionFailed, match="says it holds"):
        write_safe_program(path, tmp_path / "safe.pt2")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    content = write_program(tmp_path / "model.pt2").read_bytes()
    for length in range(0, len(content), 97):
        (tmp_path / "cut.pt2").write_bytes(content[:length])
        with pytest.raises(ConversionFailed):
            write_safe_program(tmp_path / "cut.pt2", tmp_path / "safe.pt2")


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_program_is_refused(tmp_path: Path, text: bytes) -> None:
    path = write_program(tmp_path / "model.pt2", more={"models/model.json": text})
    with pytest.raises(ConversionFailed, match="damaged"):
        write_safe_program(path, tmp_path / "safe.pt2")


# ---- with PyTorch itself --------------------------------------------------------------------------------------------


def test_the_hand_written_program_is_one_that_pytorch_loads(tmp_path: Path) -> None:
    (torch,) = needs("torch")
    loaded = torch.export.load(str(write_program(tmp_path / "model.pt2")))
    assert loaded.module()(torch.ones(4, 3)).tolist() == [[1.0] * 3] * 4


def first_size(document: Json) -> None:
    for value in document["graph_module"]["graph"]["tensor_values"].values():
        for each in value["sizes"]:
            if "as_expr" in each:
                each["as_expr"]["expr_str"] = f"{CALL} or s77"


def guard(document: Json) -> None:
    document["guards_code"] = [f"{CALL} or True"]


@pytest.mark.long
@pytest.mark.parametrize(("change", "converts"), [(first_size, False), (guard, True)])
def test_pytorch_by_itself_runs_what_a_program_says_and_the_conversion_does_not(
    tmp_path: Path, change: Callable[[Json], None], converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (torch,) = needs("torch")
    monkeypatch.chdir(tmp_path)
    path = change_program(source_of(SourceFormat.PYTORCH, tmp_path), tmp_path / "model.pt2", change)
    with contextlib.suppress(Exception):
        torch.export.load(str(path)).module()(torch.ones(4, 64))
    canary = tmp_path / "canary"
    assert canary.exists(), "the attack is one"
    canary.unlink()
    options = ConversionOptions(source=str(path), target="onnx")
    if converts:
        assert conversion.convert(options).is_near_enough
    else:
        with pytest.raises(ConversionFailed, match="nothing of it was loaded"):
            conversion.convert(options)
    assert (tmp_path / "model.onnx").exists() is converts
    assert not canary.exists()


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_hostile_program_leaves_a_trace(
    tmp_path: Path, change: Callable[[Json], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("torch", "onnxscript")
    monkeypatch.chdir(tmp_path)
    path = write_program(tmp_path / "model.pt2", program(change))
    with pytest.raises(ConversionFailed):
        convert(path, tmp_path / "model.onnx", {})
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"]


# ---- every string ---------------------------------------------------------------------------------------------------


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every string of a document is; a key's place ends in None."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key, None)
            yield from strings(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from strings(inner, (*path, place))
    elif isinstance(value, str):
        yield path


def with_source(path: tuple[Any, ...]) -> Json:
    """A sound program with Python source in one of its strings."""
    document: Any = program()
    inner = document
    for step in path[:-1] if path[-1] is not None else path[:-2]:
        inner = inner[step]
    if path[-1] is None:
        inner[f"{path[-2]}; {CALL}"] = inner.pop(path[-2])
    else:
        inner[path[-1]] = f"{inner[path[-1]]}; {CALL}"
    return cast("Json", document)


@pytest.mark.parametrize("path", list(strings(PROGRAM)), ids=lambda path: ".".join(map(str, path))[-60:])
def test_python_source_in_any_string_never_reaches_pytorch(path: tuple[Any, ...], tmp_path: Path) -> None:
    source = write_program(tmp_path / "model.pt2", with_source(path))
    try:
        write_safe_program(source, tmp_path / "safe.pt2")
    except ConversionFailed:
        return
    # It was in what the copy leaves out.
    with zipfile.ZipFile(tmp_path / "safe.pt2") as archive:
        assert b"__import__" not in b"".join(map(archive.read, archive.namelist()))
