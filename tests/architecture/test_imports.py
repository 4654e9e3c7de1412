"""The core imports no ring and nothing above it, a ring only the siblings of its row; libraries stay behind fences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from edge_runtime.typed_toml import parse_toml
from tests.architecture.source_tree import PACKAGE, ROOT, Module, imports_of, own_modules, package_modules, parse

CORE: dict[str, int] = {
    **dict.fromkeys(("errors", "tensors", "model_spec"), 0),
    **dict.fromkeys(("clock", "typed_toml", "protobufs", "extras", "durable", "shipped"), 0),
    **dict.fromkeys(("config", "telemetry", "sandbox", "plugins", "plugin_trials", "messages", "steps", "answers"), 1),
    **dict.fromkeys(("kept_state", "steady", "bounded_server", "addresses", "timed_answer"), 1),
    **dict.fromkeys(("wire", "operations", "profiles"), 2),
    **dict.fromkeys(("backends", "hosts"), 3),
    **dict.fromkeys(("request", "models"), 4),
    **dict.fromkeys(("doors", "client"), 5),
    "daemon": 6,
    "cli": 7,
}
"""docs/architecture.md, "Levels": each part of the core and its level. Parts of one level may import one another."""

RINGS: dict[str, tuple[str, ...]] = {
    "backends.onnx": (),
    "backends.onnxruntime": ("backends.onnx",),
    "backends.openvino": ("backends.onnx", "backends.litert"),
    "backends.openvino_genai": ("language", "pictures"),
    "backends.litert": (),
    "backends.catboost": (),
    "backends.pytorch": ("torchserve",),
    "backends.tensorrt": ("backends.onnx", "builds"),
    "backends.python": ("pictures", "triton"),
    "doors.access": (),
    "doors.open_inference": ("doors.access", "triton", "doors.http", "doors.grpc"),
    "doors.http": (
        "doors.access",
        "doors.open_inference",
    ),
    "doors.grpc": (
        "doors.access",
        "doors.open_inference",
    ),
    "doors.mqtt": (),
    "builds": (),
    "language": (),
    "otel": (),
    "words": (),
    "pictures": ("backends.onnx", "words"),
    "pipelines": (),
    "sequences": (),
    "series": (),
    "triton": ("backends.python", "pipelines"),
    "ollama": ("doors.http", "doors.open_inference", "language"),
    "openai": ("doors.http", "doors.open_inference", "language"),
    "pages": ("doors.access", "doors.http", "doors.open_inference", "tuning.found", "updates.releases"),
    "tensorflow_serving": ("doors.http", "doors.open_inference"),
    "torchserve": ("doors.http", "doors.open_inference", "pictures", "updates"),
    "frigate": ("pictures",),
    "heat": ("doors.mqtt.publishing",),
    "fleet": ("doors.mqtt", "doors.http", "doors.access", "pages", "updates"),
    "updates": ("builds", "pipelines", "publish", "doors.mqtt"),
    "publish": ("updates", "pictures", "pipelines", "triton", "backends.onnx", "rollouts"),
    "ray_serve": ("doors.access", "doors.http", "doors.open_inference"),
    "rollouts": ("publish", "fleet", "updates"),
    "enrolment": (),
    "site": ("doors.mqtt.publishing", "pictures", "series.series_steps"),
    "testing": (),
    "tracks": ("site", "pictures"),
    "tuning": ("pictures", "updates"),
    "text": ("pictures",),
}
"""Each optional backend, door and capability, and the siblings that it may import beside the core, or one module of a
sibling."""

DEBTS: dict[str, tuple[str, ...]] = {}
"""Modules of the core that still import a ring, and which. None may be added; one that no longer does is taken out."""

ENTRANCES = ("__init__", "__main__")
"""Files that belong to no part: the lazy public API and `python -m edge_runtime`."""

FENCES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("backends.onnxruntime.",),
    "openvino": ("backends.openvino.", "backends.openvino_genai."),
    "openvino_genai": ("backends.openvino_genai.",),
    "openvino_tokenizers": ("backends.openvino_genai.",),
    "jsonschema": ("language.",),
    # torchserve.handlers: what handlers of TorchServe's find in a host, where they use both themselves.
    "torch": ("backends.pytorch.", "torchserve.handlers"),
    "ai_edge_litert": ("backends.litert.backend",),
    "catboost": ("backends.catboost.backend",),
    **dict.fromkeys(("tensorrt", "tensorrt_rtx", "cuda"), ("backends.tensorrt.",)),
    "zmq": ("doors.zmq.",),
    "nacl": ("doors.zmq.curve",),
    "paho": ("doors.mqtt.",),
    "httptools": ("doors.http.head",),
    "orjson": ("wire.json_codec",),
    "msgpack": ("wire.codec",),
    "google": ("protobufs",),
    "grpc": ("doors.grpc.link",),
    **dict.fromkeys(("ray", "starlette"), ("ray_serve.",)),
    "hpack": ("doors.grpc.http2_head",),
    "prometheus_client": ("telemetry.prometheus", "triton.metrics"),
    "psutil": ("telemetry.host", "tuning.other_work"),
    "ml_dtypes": ("tensors",),
    "PIL": ("pictures.", "torchserve.handlers", "client.pictures", "client.input_files"),
    "soundfile": ("series.sound_files",),
    "av": (
        "site.camera_child",
        "site.microphone_child",
    ),
    "tuf": ("updates.", "publish."),
    "securesystemslib": ("updates.", "publish."),
    "cryptography": ("publish.", "enrolment."),
    "backports": ("updates.patch",),
    "edge_runtime_converters": (),
    "tokenizers": ("text.",),
    "tomli": ("typed_toml",),
    "tomllib": ("typed_toml",),
    # The sandbox starts every child process but one: `bench` runs a load generator of its own, which reads no file.
    "subprocess": ("sandbox.child", "doors.zmq.load_generator"),
    "multiprocessing": (),
    # Needed to build, train or check models, never to serve them.
    **dict.fromkeys(("onnx", "tensorflow", "sklearn", "scipy", "hypothesis"), ()),
    "pytest": ("testing.",),
}
"""Package -> beginnings of the module names (below edge_runtime) that may import it."""


FOLDERS: dict[str, int] = {PACKAGE: 0, "cross": 1, "deploy": 2, "demo": 3, "tests": 4, "bench": 4}
"""What is around the package, lowest first: images, packages that take wheels as images do, demonstrations that install
packages, and tests and benchmarks of all, which share fakes and models."""


def upward_imports(module: Module) -> Iterator[str]:
    """Imports of a folder that stands above the module's own."""
    own = FOLDERS[module.name.split(".")[0]]
    for found in imports_of(module):
        if FOLDERS.get(found.target.split(".")[0], own) > own:
            yield f"{module.name}:{found.line} imports {found.target}"


def ring_of(name: str) -> str:
    """The optional backend, door or capability that a module (below edge_runtime) belongs to; empty for the core."""
    first, *rest = name.split(".")
    return next((ring for ring in (first, f"{first}.{rest[0]}" if rest else "") if ring in RINGS), "")


def broken_directions(module: Module) -> Iterator[str]:
    """Imports of the core that lead to a ring or upward in it, and imports of a ring that its row does not name."""
    name = module.name.removeprefix(f"{PACKAGE}.")
    ring, part = ring_of(name), part_of(module.name)
    if part in ENTRANCES:
        return
    if not ring and part not in CORE:
        yield f"{module.name}: {part!r} is not a part of the core or a ring; add it here and to docs/architecture.md"
        return
    for found in imports_of(module):
        if found.target.split(".")[0] != PACKAGE or found.target == PACKAGE:
            continue
        target = found.target.removeprefix(f"{PACKAGE}.")
        other = ring_of(target)
        line = f"{module.name}:{found.line} imports {found.target}"
        if ring and other not in ("", ring) and not any(f"{target}.".startswith(f"{each}.") for each in RINGS[ring]):
            yield f"{line}: a sibling that the row of {ring} does not name"
        if not ring and other and other not in DEBTS.get(name, ()):
            yield f"{line}: the core imports no ring"
        if not ring and not other and CORE.get(target.split(".")[0], 0) > CORE[part]:
            yield f"{line}: upward, from level {CORE[part]} to {CORE[target.split('.')[0]]}"


def climbed_fences(module: Module) -> Iterator[str]:
    inner = module.name.removeprefix(f"{PACKAGE}.") + ("." if module.path.name == "__init__.py" else "")
    for found in imports_of(module):
        package = found.target.split(".")[0]
        if package in FENCES and not inner.startswith(FENCES[package]):
            yield f"{module.name}:{found.line} imports {package}; allowed: {FENCES[package] or 'nowhere'}"


def imported_nowhere(requirements: Iterable[str], modules: Iterable[Module]) -> list[str]:
    """The distributions that no module imports by name."""
    imported = {found.target.split(".")[0] for module in modules for found in imports_of(module)}
    names = [re.split(r"[^\w-]", each, maxsplit=1)[0] for each in requirements]
    return [name for name in names if {"pyzmq": "zmq"}.get(name, name) not in imported]


def part_of(name: str) -> str:
    """The first name below edge_runtime."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("module", package_modules(), ids=lambda module: module.name)
def test_a_module_imports_only_what_its_place_allows(module: Module) -> None:
    assert list(broken_directions(module)) == []


@pytest.mark.parametrize("module", package_modules(), ids=lambda module: module.name)
def test_a_third_party_package_is_imported_only_behind_its_fence(module: Module) -> None:
    assert list(climbed_fences(module)) == []


def test_the_package_imports_all_that_it_makes_a_device_install() -> None:
    stated = parse_toml((ROOT / "pyproject.toml").read_text(), "pyproject.toml")["project"]["dependencies"]
    assert imported_nowhere(stated, package_modules()) == []
    assert imported_nowhere(["left-pad>=1", "pyzmq>=26"], package_modules()) == ["left-pad"]


@pytest.mark.parametrize(
    "module", [each for each in own_modules() if each.name.split(".")[0] in FOLDERS], ids=lambda module: module.name
)
def test_a_folder_imports_only_itself_and_folders_below_it(module: Module) -> None:
    assert list(upward_imports(module)) == []


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("edge_runtime.cli.serve", "import cross.wheels", False),
        ("cross.wheels", "from deploy.debian import build_deb", False),
        ("demo.device_root", "from tests.system.debian_root import DebianRoot", False),
        ("deploy.debian.build_deb", "from cross import wheels", True),
        ("tests.system.test_deb", "from demo.digits import load_held_out", True),
    ],
)
def test_an_import_of_a_folder_above_is_found(name: str, source: str, allowed: bool) -> None:
    assert (list(upward_imports(parse(name, source))) == []) is allowed


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("edge_runtime.request.request", "from edge_runtime.doors.zmq.transport import Endpoint"),
        ("edge_runtime.request.request", "import edge_runtime.daemon"),
        ("edge_runtime.request.request", "from edge_runtime import client"),
        ("edge_runtime.hosts.hosts", "from ..models import walk"),
        ("edge_runtime.request.request", "def late():\n    from edge_runtime.daemon import run"),
        ("edge_runtime.request.request", "import importlib\nimportlib.import_module('edge_runtime.cli.main')"),
        ("edge_runtime.tensors", "from edge_runtime.config.settings import Config"),
        ("edge_runtime.newcomer", "import os"),
        ("edge_runtime.request.queue", "from edge_runtime.pipelines.chain import Chain"),
        ("edge_runtime.backends.base", "from edge_runtime.backends.openvino import backend"),
        ("edge_runtime.backends.openvino.backend", "from edge_runtime.backends.tensorrt import backend"),
        ("edge_runtime.tuning.tune", "from edge_runtime.site.results import ResultPublisher"),
        ("edge_runtime.site.results", "from edge_runtime.doors.mqtt.topics import DeviceTopics"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(name: str, source: str) -> None:
    assert len(list(broken_directions(parse(name, source)))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("edge_runtime.request.request", "from edge_runtime.errors import QueueFull\nfrom . import policy"),
        ("edge_runtime.request.infer", "from edge_runtime.models.model_table import ModelTable"),
        ("edge_runtime.tensors", "from edge_runtime.errors import TensorMismatch"),
        ("edge_runtime.client.core", "import edge_runtime"),
        ("edge_runtime.cli.main", "from edge_runtime import __version__\nfrom edge_runtime.daemon import run"),
        ("edge_runtime.backends.openvino.backend", "from edge_runtime.backends.onnx.files import check"),
        ("edge_runtime.tuning.tune", "from edge_runtime.daemon import run\nfrom edge_runtime.tuning import race"),
        ("edge_runtime.site.results", "from edge_runtime.doors.mqtt.publishing import DevicePublisher"),
    ],
)
def test_an_import_in_the_right_direction_is_allowed(name: str, source: str) -> None:
    assert list(broken_directions(parse(name, source))) == []


def test_no_debt_is_listed_that_was_paid() -> None:
    modules = {module.name.removeprefix(f"{PACKAGE}."): module for module in package_modules()}
    owed = {
        name: {ring_of(found.target.removeprefix(f"{PACKAGE}.")) for found in imports_of(modules[name])}
        for name in DEBTS
    }
    assert [(name, ring) for name, rings in DEBTS.items() for ring in rings if ring not in owed[name]] == []


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("edge_runtime.backends.onnxruntime.backend", "def load():\n    import onnxruntime as ort", True),
        ("edge_runtime.backends.base", "import onnxruntime", False),
        ("edge_runtime.backends.onnxruntime.backend", "from openvino import Core", False),
        ("edge_runtime.doors.zmq.channel", "from zmq.backend import Socket", True),
        ("edge_runtime.doors.io_loop", "from zmq.backend import Socket", False),
        ("edge_runtime.request.infer_frontend", "import zmq", False),
        ("edge_runtime.wire.codec", "import msgpack", True),
        ("edge_runtime.doors.mqtt.topics", "import msgpack", False),
        ("edge_runtime.backends.openvino.backend", "import onnx", False),
        ("edge_runtime.models.servable", "import psutil", False),
    ],
)
def test_a_fence_lets_through_only_its_own(name: str, source: str, allowed: bool) -> None:
    assert (list(climbed_fences(parse(name, source))) == []) is allowed
