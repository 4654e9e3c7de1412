"""The core decides by declarations: no file of it names an optional backend, a door or another server's capability.

A name counts in code: as a word of an identifier, of an import or of a text. Docstrings and comments may name anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from edge_runtime import plugins
from edge_runtime.hosts.steps_instance import step_declarations
from tests.architecture.source_tree import PACKAGE, Module, package_modules, parse
from tests.architecture.test_imports import ring_of

BACKENDS = tuple(name for name in plugins.names("backends") if name not in plugins.code_backends())
"""The backend of code has the name of the language, so that it counts only as a text of its own."""

CAPABILITIES = ("triton", "torchserve", "tensorflow_serving", "openai", "ollama", "frigate", "open_inference")
"""The others have names of everyday things: test_imports.py holds that the core imports none of them."""

DOORS = tuple(name for name in plugins.names("doors") if name not in (*CAPABILITIES, "camera", "publish", "thermal"))

SHIPPED = "shipped"
"""The one file of the core that may name them all."""

HONEST: dict[str, tuple[str, ...]] = {
    # The scheme of a proxy's address.
    "addresses": ("http",),
    # The language's own module of that name.
    "bounded_server": ("http",),
    "timed_answer": ("http",),
    # The public API: `from edge_runtime import MqttClient` is promised.
    "__init__": ("mqtt", "open_inference"),
    # A step's key in the metadata of a pipeline, as its owner wrote it.
    "cli.models": ("python",),
    # Help on --model-control-mode, whose words are that server's.
    "cli.serve": ("triton",),
    # A label of the metric `build_info`: the language's version.
    "daemon.core": ("python",),
    # Keys that are promised: [metrics] triton_names, [update] allow_http.
    "config.settings": ("http", "triton"),
    # What lies in models' folders is of all the world, most of it served by nothing here; the words say what it lacks.
    "models.kinds": ("catboost", "litert", "onnxruntime", "openvino", "pytorch", "tensorrt", "torchserve"),
    # The words of rows that are promised, in help and in documents.
    "operations": ("mqtt", "triton"),
    # A kind of plug-in is a protocol on that door.
    "plugins": ("http",),
    # A function of prometheus-client's.
    "telemetry.prometheus": ("http",),
}
"""Files of the core that may name some, with the reason: what is promised, and what is the world's."""


@cache
def names_in(module: Module) -> frozenset[str]:
    """The backends, doors and capabilities that a file's code names, as words of `mqtt_door`, `MqttDoor` or a text."""
    texts = set(_texts(module))
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", "\n".join(text for _, text in texts)).lower()
    found = {name for name in (*BACKENDS, *DOORS, *CAPABILITIES) if name in words and _says(words, name)}
    return frozenset(found | {text for is_constant, text in texts if is_constant and text in plugins.code_backends()})


def _says(words: str, name: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9]|://)", words) is not None  # a URL's scheme is not the door


def _texts(module: Module) -> Iterator[tuple[bool, str]]:
    """Texts but docstrings, and identifiers and imported names; whether each is a text."""
    described = {
        id(node.value) for node in module.nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in module.nodes:
        match node:
            case ast.Constant(str(text)) if id(node) not in described:
                yield True, text
            case ast.Name(text) | ast.Attribute(attr=text) | ast.arg(text) | ast.alias(text):
                yield False, text
            case ast.FunctionDef(text) | ast.AsyncFunctionDef(text) | ast.ClassDef(text):
                yield False, text
            case ast.keyword(str(text)) | ast.ImportFrom(str(text)):
                yield False, text


def core_modules() -> dict[str, Module]:
    """The files of the core by their names below edge_runtime, but the table of what is shipped."""
    named = {module.name.removeprefix(f"{PACKAGE}.").removeprefix(PACKAGE) or "__init__": module
             for module in package_modules()}  # fmt: skip
    return {name: module for name, module in named.items() if not ring_of(name) and name != SHIPPED}


@pytest.mark.parametrize("name", core_modules())
def test_a_file_of_the_core_names_no_backend_door_or_capability(name: str) -> None:
    assert names_in(core_modules()[name]) == {*HONEST.get(name, ())}


@pytest.mark.parametrize(
    "name", [name for name in core_modules() if name.partition(".")[0] in ("backends", "hosts", "models", "request")]
)
def test_a_file_on_the_way_of_a_request_knows_no_value_of_from(name: str) -> None:
    """What may be sent in place of a tensor is said by the table that declares it."""
    sources = {source for each in step_declarations() for source in each.sources}
    texts = {text for is_constant, text in _texts(core_modules()[name]) if is_constant}
    assert texts & sources == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('if backend == "onnxruntime":\n    pass', {"onnxruntime"}),
        ("def open_mqtt_door(): ...", {"mqtt"}),
        ("from edge_runtime.triton.words import PLATFORMS", {"triton"}),
        ('READERS = ("openvino", "python")', {"openvino", "python"}),
        ("class MqttDoor: ...", {"mqtt"}),
        ('page = f"http://{host}/metrics"\ndoor = "http"', {"http"}),
        ('page = f"http://{host}/metrics"', set()),
        ('"""Not the door of HTTP, nor TensorRT."""\nimport python_models', set()),
    ],
)
def test_a_name_is_found_in_code_alone(source: str, found: set[str]) -> None:
    assert names_in(parse("edge_runtime.newcomer", source)) == found
