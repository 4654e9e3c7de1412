"""What the smallest daemon imports: one net of ONNX Runtime's inside it, asked over ZeroMQ, and nothing configured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from edge_runtime.backends.registry import known_backends
from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import effective_profile
from edge_runtime.enrolment.certificates import Issuer, key_pem, new_authority, new_key, pem, signing_request
from edge_runtime.enrolment.device import Identity
from edge_runtime.plugins import code_backends
from edge_runtime.profiles.detect import detect
from edge_runtime.shipped import SHIPPED
from tests.architecture.source_tree import PACKAGE, ROOT, package_modules
from tests.architecture.test_imports import RINGS, ring_of
from tests.fakes.update_site import UpdateSite
from tests.models import bert_models, onnx_models, series_models

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

MOST_MODULES = 127
"""Of our own. They cost .4 ms and 50 KiB each. Raise it with a reason. Seven are declarations of the backends that the
profile of this device names; one finds the loader of pipelines when a first pipeline comes; one has what models keep
between requests, which settings hold. One is the seam of traces, which
requests, doors and the wire read."""

PROGRAM = """
import json
import math
import sys

from edge_runtime.cli.main import main
from edge_runtime.daemon import run


def serve(settings, read_settings=None, early=None, parent=None, lock=None):
    import msgpack
    import zmq

    daemon = run.assemble_daemon(settings.config, early=early, lock=lock)
    try:
        daemon.start()
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 16]}]
        header = {"v": 1, "op": "infer", "model": "mlp", "inputs": inputs, "parameters": {"raw": False}}
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


class Capability(NamedTuple):
    """One that is switched on, alone. rings: those that the daemon then imports beside the smallest's.

    table: of `config.toml`; in it, {folder} is the test's. put: makes what it wants, in the same folder.
    """

    rings: tuple[str, ...]
    table: str = ""
    put: Callable[[Path], object] = Path


def put(maker: Callable[[Path], object], toml: str = "", name: str = "more/1") -> Callable[[Path], None]:
    """Return what makes a model, `more` beside `mlp`, with a `model.toml`."""

    def make(folder: Path) -> None:
        model = folder / "models" / name
        model.mkdir(parents=True)
        maker(model)
        if toml:
            (folder / "models" / "more" / "model.toml").write_text(toml)

    return make


def put_repository(folder: Path) -> None:
    site = UpdateSite()
    (folder / "1.root.json").write_bytes(site.root)
    site.write(folder / "mirror")


def put_identity(folder: Path) -> None:
    key, now_utc = new_key(), datetime.now(timezone.utc)
    authority = new_authority(key, now_utc)
    certificate = Issuer(authority, key).for_device("dev1", signing_request("dev1", key), now_utc, timedelta(days=90))
    Identity(folder / "identity").write(pem(certificate).decode(), key_pem(key), pem(authority).decode())


def put_pipeline(folder: Path) -> None:
    (folder / "models" / "more").mkdir(parents=True)
    step = '[[step]]\nname = "only"\nmodel = "mlp"\ninputs = {x = "input.x"}\n[output]\ny = "only.y"\n'
    (folder / "models" / "more" / "pipeline.toml").write_text(step)


def put_answer(folder: Path) -> None:
    (folder / "models" / "mlp").mkdir(parents=True)
    (folder / "models" / "mlp" / "model.toml").write_text('[output.y]\nanswer = "classes"\n')


def put_config(folder: Path) -> None:
    put(onnx_models.mlp)(folder)
    (folder / "models" / "more" / "config.pbtxt").write_text('name: "more"\nbackend: "onnxruntime"\n')


def put_source(model: Path) -> None:
    """What no backend reads, and no converter either once it looks inside."""
    (model / "model.json").write_text('{"learner": {}, "version": [2, 0, 0]}')


ADDRESS = 'endpoint = "127.0.0.1:0"'
HTTP = ("doors.access", "doors.http", "doors.open_inference", "triton")
MQTT = 'mqtt.url = "mqtt://127.0.0.1:1/dev1"\n'
"""Where no broker is."""

SWITCHED_ON: dict[str, Capability] = {
    "enrolment": Capability(
        ("enrolment",), '[enrolment]\nurl = "https://127.0.0.1:9"\nidentity = "{folder}/identity"', put_identity
    ),
    "http": Capability(HTTP, f"http = {{{{ {ADDRESS}, page = false }}}}"),
    "page": Capability((*HTTP, "pages"), f"http = {{{{ {ADDRESS} }}}}"),
    "grpc": Capability(
        ("doors.access", "doors.grpc", "doors.open_inference", "triton"), 'grpc.endpoint = "127.0.0.1:0"'
    ),
    "ollama": Capability((*HTTP, "language", "ollama"), f"http = {{{{ {ADDRESS}, page = false, ollama = true }}}}"),
    "openai": Capability((*HTTP, "language", "openai"), f"http = {{{{ {ADDRESS}, page = false, openai = true }}}}"),
    "tensorflow_serving": Capability(
        (*HTTP, "tensorflow_serving"), f"http = {{{{ {ADDRESS}, page = false, tensorflow_serving = true }}}}"
    ),
    "torchserve": Capability((*HTTP, "torchserve"), f"http = {{{{ {ADDRESS}, page = false, torchserve = true }}}}"),
    "metrics": Capability((), "metrics.port = 0"),
    "triton_names": Capability(("triton",), "metrics = {{ port = 0, triton_names = true }}"),
    "mqtt": Capability(("doors.mqtt",), MQTT),
    "heat": Capability(("heat",), "thermal.limit_celsius = 80"),
    "frigate": Capability(
        ("frigate", "pictures"), '[frigate]\nendpoint = "ipc://{folder}/f.sock"\nmodels = {{ a = "mlp" }}'
    ),
    "publish": Capability(("doors.mqtt", "pictures", "site"), MQTT + '[[publish]]\nmodel = "mlp"\n'),
    "camera": Capability(
        ("doors.mqtt", "pictures", "site"), MQTT + '[[camera]]\nname = "door"\nurl = "http://127.0.0.1:1/"\n'
    ),
    "tracks": Capability(
        ("doors.mqtt", "pictures", "site", "tracks"),
        MQTT + '[[publish]]\nmodel = "mlp"\nsource = "camera"\ncamera = "http://127.0.0.1:1/"\ntrack = true\n',
    ),
    "tracing": Capability(("otel",), '[tracing]\nendpoint = "http://127.0.0.1:9"\n'),
    "update": Capability(
        # Engines of a release; the device's id, which is that of topics; releases that are pipelines.
        ("builds", "doors.mqtt", "pipelines", "updates"),
        '[update]\nroot_file = "{folder}/1.root.json"\nfolder = "{folder}/mirror"\nrequire_signed = false\n',
        put_repository,
    ),
    "builds": Capability(("builds",), put=put(put_source)),
    "pipelines": Capability(("pipelines",), put=put_pipeline),
    "triton": Capability(("triton",), put=put_config),
    "sequences": Capability(
        ("sequences",),
        put=put(
            onnx_models.accumulator,
            '[sequence]\ncontrols = { START = "START" }\n[[sequence.state]]\ninput = "a_sum"\noutput = "z_sum"\n'
            '[[sequence.state]]\ninput = "b_count"\noutput = "y_count"\n',
        ),
    ),
    # Labels may stand in a model's own metadata, which pictures read.
    "words": Capability(("pictures", "words"), put=put_answer),
    "pictures": Capability(("pictures",), put=put(onnx_models.colours, '[input.image]\nrange = "0..1"\n')),
    "series": Capability(("series",), put=put(series_models.shaking, "[input.samples]\nrate = 1000\nwindow = 1000\n")),
    "text": Capability(("pictures", "text", "words"), put=put(bert_models.classifier, name="more")),
}
"""What a table of the configuration or a folder switches on."""

OF_VERBS = {"fleet", "publish", "ray_serve", "rollouts", "testing", "tuning"}
"""Rings that no daemon imports: those of verbs, the contract suites, and the runtime inside another engine."""

VERBS = tuple(name for name, place in SHIPPED["verbs"].items() if place.startswith(f"{PACKAGE}."))


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


def rings_in(modules: Iterable[str]) -> set[str]:
    """The rings of which modules are imported; a declaration, in a ring's `__init__`, is none."""
    always = ("backends.onnx", "backends.onnxruntime")
    return {
        ring for ring in RINGS if ring not in always and any(each.startswith(f"{PACKAGE}.{ring}.") for each in modules)
    }


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
    capability = SWITCHED_ON[name]
    (tmp_path / "config.toml").write_text(capability.table.format(folder=tmp_path))
    capability.put(tmp_path)
    modules = started(tmp_path, "--config", str(tmp_path / "config.toml")).modules
    assert rings_in(modules) == set(capability.rings)


def test_every_ring_of_a_daemon_is_switched_on_by_something() -> None:
    tested = {ring for each in SWITCHED_ON.values() for ring in each.rings}
    assert {each for each in RINGS if not each.startswith("backends.")} - tested == OF_VERBS


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_imports_no_ring_but_its_own(name: str) -> None:
    program = f"""
import json, sys
from edge_runtime.cli.main import main
try:
    main([{name!r}, "--help"])
except SystemExit:
    pass
print(json.dumps([*sys.modules]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = rings_in(json.loads(done.stderr))
    declared_by = ring_of(SHIPPED["verbs"][name].partition(":")[0].removeprefix(f"{PACKAGE}."))
    assert loaded <= {declared_by, *RINGS.get(declared_by, ())}


def test_the_smallest_daemon_imports_the_declarations_of_its_profiles_backends_alone(start: Start) -> None:
    asked = {*(choice.name for choice in effective_profile(Config(), detect()).backends), *code_backends()}
    packages = {name: f"{PACKAGE}.backends.{name.replace('-', '_')}" for name in known_backends()}
    assert {name for name, package in packages.items() if package in start.modules} == asked


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
