"""What the smallest daemon imports: one net of ONNX Runtime's inside it, asked over ZeroMQ, and nothing configured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from edge_runtime.backends.registry import known_backends
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import effective_profile
from edge_runtime.plugins import code_backends
from edge_runtime.profiles.detect import detect
from tests.architecture.source_tree import PACKAGE, ROOT, package_modules
from tests.architecture.test_imports import RINGS
from tests.models import onnx_models

LATER = {
    "backends": ("declared_instance",),
    "hosts": (
        "child", "instance", "keeper", "messages", "parent", "prepared_parent", "process", "runner",
    ),
    "models": ("digest", "self_check", "split", "swap",),
    "request": ("runs",),
    "sandbox": ("child", "child_main", "confinement", "folder_lock", "folder_tree",),
    "telemetry": ("prometheus",),
}  # fmt: skip
"""Modules below edge_runtime that come with what asks for them: another backend, a host, a build or conversion, a door,
a pipeline, a picture, a `config.pbtxt`, a copy's judge, the watchdog of systemd."""

LATER_PACKAGES = ("client", *(ring for ring in RINGS if ring not in ("backends.onnx", "backends.onnxruntime")))
"""Packages of which the start imports nothing."""

LATER_NOUNS = ("protobufs",)

LATER_LIBRARY = (
    "asyncio", "csv", "difflib", "email", "hashlib", "hmac", "html", "http", "importlib.metadata", "secrets", "ssl",
    "subprocess", "tempfile", "xml.etree", "zipfile",
)  # fmt: skip
"""Of the standard library."""

LATER_REQUIREMENTS = ("psutil",)
"""That the daemon requires, and imports at first use."""

LIBRARIES = "import json, sys, argparse, msgpack, msgspec, numpy, onnxruntime, orjson, zmq"
"""What the daemon is made of: what these import is not ours to leave out."""

DATACLASSES = {"edge_runtime.messages.InferResult"}
"""Each is compiled when its module is imported, for .5 to 1 ms: a `msgspec.Struct` is made in a fiftieth of that. This
one is a Mapping, which no Struct can be."""

MOST_MODULES = 126
"""Of our own. They cost .4 ms and 50 KiB each. Raise it with a reason. Six are declarations of the backends that the
profile of this device names; one finds the loader of pipelines when a first pipeline comes; one has what models keep
between requests, which settings hold."""

PROGRAM = """
import json
import math
import sys

from edge_runtime.cli.main import main
from edge_runtime.daemon import run


def serve(config, read_config=None, early=None, parent=None):
    import msgpack
    import zmq

    daemon = run.assemble_daemon(config, early=early)
    try:
        daemon.start()
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 16]}]
        header = {"v": 1, "op": "infer", "model": "mlp", "inputs": inputs}
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(daemon.endpoints[1])
            socket.send_multipart([msgpack.packb(header), b"1", bytes(64)])
            assert socket.poll(60_000)
            assert "error" not in msgpack.unpackb(socket.recv_multipart()[0])
        modules = list(sys.modules.items())
        compiled = [
            f"{name}.{kind.__name__}"
            for name, module in modules
            if name.startswith("edge_runtime")
            for kind in vars(module).values()
            if isinstance(kind, type) and kind.__module__ == name and "__dataclass_fields__" in vars(kind)
        ]
        mode = daemon._core.table.find("mlp", 1).mode
        print(json.dumps([mode, sorted(name for name, _ in modules), compiled]), flush=True)
    finally:
        daemon.stop()
    return 0


run.serve = serve
folder, *more = sys.argv[1:]
options = ["--models", f"{folder}/models", "--state", f"{folder}/state", "--zmq", f"ipc://{folder}/i.sock"]
sys.exit(main(["serve", *options, *more]))
"""

SWITCHED_ON: dict[str, tuple[str, tuple[str, ...]]] = {
    "http": (
        '[http]\nendpoint = "127.0.0.1:0"\npage = false',
        ("doors.access", "doors.http", "doors.open_inference", "triton"),
    ),
    "page": (
        'http.endpoint = "127.0.0.1:0"',
        ("doors.access", "doors.http", "doors.open_inference", "pages", "triton"),
    ),
    "grpc": ('grpc.endpoint = "127.0.0.1:0"', ("doors.access", "doors.grpc", "doors.open_inference", "triton")),
    "frigate": ('[frigate]\nendpoint = "ipc://{folder}/f.sock"\nmodels = {{ a = "mlp" }}', ("frigate", "pictures")),
}
"""One capability of each case: its configuration, and the rings that it may import beside the smallest daemon's."""


class Start(NamedTuple):
    """A daemon after its first answer. mode: of its model. modules: that it has imported. dataclasses: of ours."""

    mode: str
    modules: set[str]
    dataclasses: set[str]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return started(tmp_path_factory.mktemp("s"))


def started(folder: Path, *options: str) -> Start:
    onnx_models.mlp(folder / "models" / "mlp" / "1")
    command = [sys.executable, "-c", PROGRAM, str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    mode, modules, dataclasses = json.loads(done.stdout)
    return Start(mode, set(modules), set(dataclasses))


def later_modules() -> set[str]:
    return {
        *(f"{PACKAGE}.{package}.{name}" for package, names in LATER.items() for name in names),
        *(f"{PACKAGE}.{name}" for name in LATER_NOUNS),
    }


def test_the_smallest_daemon_imports_no_module_of_what_nothing_asks_for(start: Start) -> None:
    assert start.mode == "inline"
    assert sorted(start.modules & later_modules()) == []
    late = tuple(f"{PACKAGE}.{each}{'.' if each.startswith('backends.') else ''}" for each in LATER_PACKAGES)
    assert {name.removeprefix(f"{PACKAGE}.") for name in start.modules if name.startswith(late)} == set()


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_a_daemon_imports_no_ring_of_a_capability_that_is_off(name: str, tmp_path: Path) -> None:
    text, rings = SWITCHED_ON[name]
    (tmp_path / "config.toml").write_text(text.format(folder=tmp_path))
    modules = started(tmp_path, "--config", str(tmp_path / "config.toml")).modules
    loaded = {ring for ring in LATER_PACKAGES if any(each.startswith(f"{PACKAGE}.{ring}.") for each in modules)}
    assert loaded == set(rings)


def test_the_smallest_daemon_imports_the_declarations_of_its_profiles_backends_alone(start: Start) -> None:
    asked = {*(choice.name for choice in effective_profile(Config(), detect()).backends), *code_backends()}
    assert {name for name in known_backends() if f"{PACKAGE}.backends.{name}" in start.modules} == asked


def test_the_smallest_daemon_imports_few_modules_of_ours(start: Start) -> None:
    own = sorted(name for name in start.modules if name.split(".")[0] == PACKAGE)
    assert f"{PACKAGE}.models.loader" in own
    assert len(own) <= MOST_MODULES, own


def test_the_smallest_daemon_leaves_out_slow_modules(start: Start) -> None:
    program = f"{LIBRARIES}; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True)
    assert sorted(start.modules & {*LATER_LIBRARY, *LATER_REQUIREMENTS} - set(json.loads(done.stdout))) == []


def test_the_smallest_daemon_compiles_no_dataclass(start: Start) -> None:
    assert sorted(start.dataclasses - DATACLASSES) == []


def test_every_module_that_comes_later_is_one_of_ours() -> None:
    assert later_modules() - {module.name for module in package_modules()} == set()
    assert {f"{PACKAGE}.{each}" for each in LATER_PACKAGES} <= {module.name for module in package_modules()}
