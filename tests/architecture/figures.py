"""Prints how large the house is, and follows one real request and one update through our own files.

`python -m tests.architecture.figures [--calls]`: --calls lists each function on the way. Figures are not quotas; they
show which way a change went. A function is on the way of a request when it is called while the request is answered and
not while the daemon is idle; a comprehension or lambda counts as the function that holds it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.architecture.next_door import REASONS
from tests.architecture.source_tree import PACKAGE, ROOT, Module, imports_of, own_modules, package_modules
from tests.architecture.test_imports import part_of, ring_of
from tests.architecture.test_names_of_rings import core_modules, names_in

READ = {"HTTP": "http", "MQTT": "mqtt", "Triton": "triton"}
"""Capabilities of which it is counted how many packages one opens to read them, and the word that names each."""

PRODUCT = (PACKAGE, "edge_runtime_converters", "converters")
IDLE_S = 1.5


def product_modules() -> list[Module]:
    """What is shipped."""
    return [module for module in own_modules() if module.name.split(".")[0] in PRODUCT]


@dataclass(frozen=True)
class Figures:
    """What can be counted in the source."""

    lines: int
    files: int
    core_lines: int
    core_files: int
    packages: dict[str, list[str]]
    small_files: int
    next_door: list[str]
    repeated_classes: list[str]
    see_docstrings: list[str]
    callables: list[str]


def count() -> Figures:
    """Read every product module."""
    modules = product_modules()
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for each in imports_of(module):
            target = each.target if each.target in names else each.target.rpartition(".")[0]
            if target in names and target != module.name:
                importers[target].add(module.name)
    sources = [module.path.read_text(encoding="utf-8") for module in modules]
    classes = Counter(
        node.name
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    core = [module.path.read_text(encoding="utf-8") for module in core_modules().values()]
    return Figures(
        lines=sum(source.count("\n") for source in sources),
        files=len(modules),
        core_lines=sum(source.count("\n") for source in core),
        core_files=len(core),
        packages=_packages_to_open(),
        small_files=sum(
            source.count("\n") < 40 and module.path.name != "__init__.py"
            for source, module in zip(sources, modules, strict=True)
        ),
        next_door=sorted(
            name for name, users in importers.items() if len(users) == 1 and _is_next_door(name, next(iter(users)))
        ),
        repeated_classes=sorted(name for name, times in classes.items() if times > 1),
        see_docstrings=sorted(found for module in modules for found in _see_docstrings(module)),
        callables=sorted(found for module in modules for found in _constructor_callables(module)),
    )


def _packages_to_open() -> dict[str, list[str]]:
    """The rings and parts of the core whose code names a capability."""
    found: dict[str, set[str]] = {title: set() for title in READ}
    for module in package_modules():
        named = names_in(module)
        name = module.name.removeprefix(f"{PACKAGE}.")
        for title, word in READ.items():
            if word in named and name != "shipped":
                found[title].add(ring_of(name) or part_of(module.name))
    return {title: sorted(packages) for title, packages in found.items()}


def _is_next_door(name: str, user: str) -> bool:
    """Whether both lie in one folder, and the user is not what opens the folder: a door, a verb or a backend."""
    folder, _, stem = user.rpartition(".")
    return name.rpartition(".")[0] == folder and stem not in ("backend", "command", "door", "verbs")


def _see_docstrings(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if re.match(r"(As|See) [`\w'.]+( [A-Za-z`']+)?\.?$", text):
                yield f"{module.name}.{node.name}: {text}"


def _constructor_callables(module: Module) -> Iterator[str]:
    """Parameters of constructors, and fields of dataclasses, that are functions; named types of functions included."""
    aliases = {
        target.id
        for node in module.tree.body
        if isinstance(node, ast.Assign) and "Callable[" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    wanted = re.compile(rf"\b({'|'.join(['Callable', *aliases])})\b")
    for node in module.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                arguments = [*each.args.args, *each.args.kwonlyargs]
                found = [one.arg for one in arguments if one.annotation and wanted.search(ast.unparse(one.annotation))]
            elif is_dataclass and isinstance(each, ast.AnnAssign) and wanted.search(ast.unparse(each.annotation)):
                found = [ast.unparse(each.target)]
            else:
                continue
            yield from (f"{module.name}.{node.name}.{name}" for name in found)


class Follower:
    """Notes each of our functions that is called in any thread started after `install`, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: dict[tuple[str, str], int] = {}
        self._home = f"{ROOT}/"
        self._home_package = f"{ROOT}/{PACKAGE}/"

    def install(self) -> None:
        """Follow this thread and every thread that starts from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        """Stop following."""
        threading.setprofile(None)
        sys.setprofile(None)

    def record(self, act: Callable[[], object]) -> dict[tuple[str, str], int]:
        """Call `act`; return our functions called meanwhile, by file and name, in order of their first call."""
        self.calls, self.is_on = {}, True
        act()
        self.is_on = False
        return self.calls

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        path = code.co_filename
        if path.startswith(self._home_package):
            path = path[len(self._home) :]
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            key = (path, re.sub(r"\.<locals>\.<\w+>", "", name))
            self.calls[key] = self.calls.get(key, 0) + 1


INSIDE, HOSTED = 'mode = "workers"\n', 'isolation = "always"\n'
"""Of a model that a worker runs, and of one in a host."""


def follow_request(follower: Follower, toml: str) -> dict[tuple[str, str], int]:
    """One request for the demo's digits over ZeroMQ with a known header. toml: the model's settings."""
    import numpy as np

    from tests.contract.running_daemon import RawClient, header, running_daemon

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models" / "digits"
        (models / "1").mkdir(parents=True)
        (models / "1" / "model.onnx").write_bytes((ROOT / "demo/models/digits/1/model.onnx").read_bytes())
        (models / "model.toml").write_text(toml)
        with running_daemon(models.parent, Path(folder) / "state", calibrate=False) as daemon:
            with RawClient(f"ipc://{folder}/state/infer.sock") as client:
                metadata = client.result("metadata", model="digits")
                (tensor,) = metadata["inputs"]
                shape = [1 if size < 0 else size for size in tensor["shape"]]
                asked = header("digits", inputs=[{**tensor, "shape": shape}])
                data = np.zeros(shape, np.float32).tobytes()
                for _ in range(20):
                    client.ask(asked, b"", data)
                idle = follower.record(lambda: time.sleep(IDLE_S))
                found: dict[tuple[str, str], int] = {}
                for _ in range(5):  # the beat may fall into one of them
                    one = follower.record(
                        lambda: (client.send(asked, b"", data), client.socket.poll(), time.sleep(0.05))
                    )
                    client.receive()
                    found = {key: found.get(key, 0) + times for key, times in one.items()}
            del daemon
    return {key: times for key, times in found.items() if key not in idle and times >= 5}


def follow_others(follower: Follower, toml: str) -> dict[str, dict[tuple[str, str], int]]:
    """Requests by other ways, each known: JSON over HTTP, a picture over MQTT, a pipeline. toml: of the models."""
    import json

    import numpy as np

    from edge_runtime.doors.http.settings import HttpSettings
    from edge_runtime.doors.mqtt.settings import MqttSettings
    from tests.contract.pictures.test_pictures import COLOURS, picture
    from tests.contract.raw_http import RawHttp, request
    from tests.contract.running_daemon import RawClient, header, http_url, put_model, running_daemon
    from tests.fakes.broker import MOSQUITTO, Broker
    from tests.fakes.mqtt_peer import Peer
    from tests.models import onnx_models

    found: dict[str, dict[tuple[str, str], int]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        models, settings = Path(folder) / "models", {}
        for name in ("a", "b"):
            put_model(models, name, onnx_models.mlp, toml=toml)
        put_model(models, "colours", onnx_models.colours, toml=toml + COLOURS)
        (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
        (models / "both").mkdir()
        step = '[[step]]\nname = "{0}"\nmodel = "{0}"\ninputs = {{x = "input.x"}}\n'
        output = '[output]\ny = "a.y"\nz = "b.y"\n'
        (models / "both" / "pipeline.toml").write_text(step.format("a") + step.format("b") + output)
        if MOSQUITTO is not None:
            (Path(folder) / "broker").mkdir()
            broker = stack.enter_context(Broker(Path(folder) / "broker"))
            settings["mqtt"] = MqttSettings(url=f"{broker.url}/dev1")
        state, http = Path(folder) / "state", HttpSettings(endpoint="127.0.0.1:0")
        daemon = stack.enter_context(running_daemon(models, state, calibrate=False, http=http, **settings))
        web = stack.enter_context(RawHttp(http_url(daemon)))
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
        asked = request("POST", "/v2/models/a/infer", json.dumps({"id": "1", "inputs": [tensor]}).encode())
        found["a request in JSON over HTTP"] = _follow(follower, lambda: web.send(asked), web.response)
        if MOSQUITTO is not None:
            peer, red = stack.enter_context(Peer(broker.url)), picture("red")
            peer.subscribe("reply/x")
            found["a picture over MQTT"] = _follow(
                follower, lambda: peer.publish("edge/dev1/infer/colours", red, response_topic="reply/x"), peer.next
            )
        raw = stack.enter_context(RawClient(f"ipc://{state}/infer.sock"))
        both, data = header("both"), np.ones((1, 16), np.float32).tobytes()
        found["a pipeline of two steps"] = _follow(follower, lambda: raw.send(both, b"", data), raw.receive)
    return found


def _follow(
    follower: Follower, send: Callable[[], object], receive: Callable[[], object]
) -> dict[tuple[str, str], int]:
    """What each of five requests calls, and an idle daemon does not."""
    for _ in range(20):
        send()
        receive()
    idle = follower.record(lambda: time.sleep(IDLE_S))
    found: dict[tuple[str, str], int] = {}
    for _ in range(5):  # the beat may fall into one of them
        one = follower.record(lambda: (send(), time.sleep(0.1)))
        receive()
        found = {key: found.get(key, 0) + times for key, times in one.items()}
    return {key: times for key, times in found.items() if key not in idle and times >= 5}


def follow_update(follower: Follower) -> dict[tuple[str, str], int]:
    """One release from check to commit, installed in the place of another."""
    from tests.contract.updates.updated_device import Fleet

    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        with fleet.device() as device:
            fleet.release(1)
            device.outcome()
            fleet.release(2)
            idle = follower.record(lambda: time.sleep(IDLE_S))
            found = dict(follower.record(device.outcome))
    return {key: times for key, times in found.items() if key not in idle}


def report(*, lists_calls: bool = False) -> str:
    """Everything, as lines."""
    figures = count()
    follower = Follower()
    follower.install()
    try:
        found = {
            "a worker request": follow_request(follower, INSIDE),
            "an update from check to commit": follow_update(follower),
            **follow_others(follower, INSIDE),
            "a hosted request": follow_request(follower, HOSTED),
            **{f"{name}, hosted": calls for name, calls in follow_others(follower, HOSTED).items()},
        }
    finally:
        follower.remove()
    lines = [
        f"lines: {figures.lines}",
        f"files: {figures.files} (under 40 lines: {figures.small_files})",
        f"core: {figures.core_lines} lines, {figures.core_files} files",
        *(f"packages that name {title}: {len(names)} {' '.join(names)}" for title, names in figures.packages.items()),
        f"modules with one importer next door: {len(figures.next_door)}",
        f"class names used twice: {len(figures.repeated_classes)} {' '.join(figures.repeated_classes)}",
        f'docstrings "See X.": {len(figures.see_docstrings)}',
        f"callables handed to constructors: {len(figures.callables)}",
    ]
    for name, calls in found.items():
        lines.append(f"{name}: {len({file for file, _ in calls})} files, {len(calls)} functions")
        if lists_calls:
            lines += [f"  {file}: {function}" for file, function in calls]
    if lists_calls:
        lines += [
            "one importer next door:",
            *(f"  {each}: {REASONS.get(each, 'no reason yet')}" for each in figures.next_door),
        ]
        lines += ["callables:", *(f"  {each}" for each in figures.callables)]
    return "\n".join(lines)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="how large the house is")
    parser.add_argument("--calls", action="store_true", help="list the functions on the way")
    print(report(lists_calls=parser.parse_args().calls))


if __name__ == "__main__":
    main()
