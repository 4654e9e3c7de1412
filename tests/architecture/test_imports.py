"""A module imports its own package and lower levels, never a neighbour; third-party packages stay behind fences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from edge_runtime.typed_toml import parse_toml
from tests.architecture.source_tree import PACKAGE, ROOT, Module, imports_of, own_modules, package_modules, parse

LEVELS: dict[str, int] = {
    **dict.fromkeys(("errors", "tensors", "messages", "model_spec", "steps", "answers", "pipelines"), 0),
    **dict.fromkeys(("clock", "typed_toml", "protobufs", "extras"), 0),
    **dict.fromkeys(("config", "profiles", "telemetry", "sandbox", "regions"), 1),
    **dict.fromkeys(("backends", "repository", "scheduling", "wire", "transports"), 2),
    **dict.fromkeys(("serving", "client"), 3),
    **dict.fromkeys(("frontend", "update", "publish"), 4),
    "fleet": 5,
    "daemon": 6,
    "tuning": 7,
    "cli": 8,
}
"""docs/architecture.md, "Levels". The nouns of level 0 are one package in this sense: they may import one another."""

ENTRANCES = ("__init__", "__main__")
"""Files that belong to no level: the lazy public API and `python -m edge_runtime`."""

FENCES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("backends.onnxruntime",),
    "openvino": ("backends.openvino",),
    # torchserve_handlers: what handlers of TorchServe's find in a host, where they use both themselves.
    "torch": ("backends.pytorch", "backends.torchserve_handlers"),
    "ai_edge_litert": ("backends.litert_backend",),
    "catboost": ("backends.catboost_backend",),
    **dict.fromkeys(("tensorrt", "tensorrt_rtx", "cuda"), ("backends.tensorrt",)),
    "zmq": ("client.",),
    "nacl": ("transports.zmtp_curve",),
    "paho": ("transports.", "client."),
    "httptools": ("transports.http_head",),
    "orjson": ("wire.json_codec",),
    "msgpack": ("wire.codec",),
    "google": ("protobufs",),
    "grpc": ("client.",),
    "hpack": ("transports.http2_head",),
    "prometheus_client": ("telemetry.",),
    "ml_dtypes": ("tensors",),
    "PIL": ("backends.pictures", "backends.torchserve_handlers", "cli.", "client."),
    "av": ("fleet.camera_child",),
    "tuf": ("update.", "publish."),
    "securesystemslib": ("update.", "publish."),
    "cryptography": ("publish.",),
    "backports": ("repository.patch",),
    "edge_runtime_converters": (),
    "tomli": ("typed_toml",),
    "tomllib": ("typed_toml",),
    # The sandbox starts every child process but one: `bench` runs a load generator of its own, which reads no file.
    "subprocess": ("sandbox.child", "client.load_generator"),
    "multiprocessing": (),
    # Needed to build, train or check models, never to serve them.
    **dict.fromkeys(("onnx", "tensorflow", "sklearn", "scipy", "hypothesis", "psutil", "pytest"), ()),
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


def broken_directions(module: Module) -> Iterator[str]:
    own = part_of(module.name)
    if own in ENTRANCES:
        return
    if own not in LEVELS:
        yield f"{module.name}: {own!r} has no level; give it one here and in docs/architecture.md"
        return
    for found in imports_of(module):
        part = part_of(found.target) if found.target.split(".")[0] == PACKAGE else own
        if found.target == PACKAGE or part in (own, "__version__") or (part in LEVELS and LEVELS[part] < LEVELS[own]):
            continue
        if LEVELS.get(part) == 0 and LEVELS[own] == 0:
            continue
        yield f"{module.name}:{found.line} (level {LEVELS[own]}) imports {found.target} (level {LEVELS.get(part)})"


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
    """The first name below edge_runtime, which has a level."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("module", package_modules(), ids=lambda module: module.name)
def test_a_module_imports_only_its_own_package_and_lower_levels(module: Module) -> None:
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
        ("edge_runtime.scheduling.request", "from edge_runtime.backends.base import Instance"),
        ("edge_runtime.scheduling.request", "import edge_runtime.serving"),
        ("edge_runtime.scheduling.request", "from edge_runtime import serving"),
        ("edge_runtime.scheduling.request", "from ..wire import codec"),
        ("edge_runtime.scheduling.request", "def late():\n    from edge_runtime.daemon import run"),
        ("edge_runtime.scheduling.request", "import importlib\nimportlib.import_module('edge_runtime.cli.main')"),
        ("edge_runtime.tensors", "from edge_runtime.config.settings import Config"),
        ("edge_runtime.newcomer", "import os"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(name: str, source: str) -> None:
    assert len(list(broken_directions(parse(name, source)))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("edge_runtime.scheduling.request", "from edge_runtime.errors import QueueFull\nfrom . import policy"),
        ("edge_runtime.tensors", "from edge_runtime.errors import TensorMismatch"),
        ("edge_runtime.client.zmq_client", "import edge_runtime"),
        ("edge_runtime.cli.main", "from edge_runtime import __version__\nfrom edge_runtime.daemon import run"),
    ],
)
def test_an_import_in_the_right_direction_is_allowed(name: str, source: str) -> None:
    assert list(broken_directions(parse(name, source))) == []


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("edge_runtime.backends.onnxruntime_backend", "def load():\n    import onnxruntime as ort", True),
        ("edge_runtime.backends.base", "import onnxruntime", False),
        ("edge_runtime.backends.onnxruntime_backend", "from openvino import Core", False),
        ("edge_runtime.client.channel", "from zmq.backend import Socket", True),
        ("edge_runtime.transports.zmq_transport", "from zmq.backend import Socket", False),
        ("edge_runtime.frontend.infer_frontend", "import zmq", False),
        ("edge_runtime.wire.codec", "import msgpack", True),
        ("edge_runtime.wire.topics", "import msgpack", False),
        ("edge_runtime.backends.openvino_backend", "import onnx", False),
        ("edge_runtime.serving.servable", "import psutil", False),
    ],
)
def test_a_fence_lets_through_only_its_own(name: str, source: str, allowed: bool) -> None:
    assert (list(climbed_fences(parse(name, source))) == []) is allowed
