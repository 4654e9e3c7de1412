"""Every name of TensorRT's API that our code uses, looked for in the real bindings of each version supported.

The bindings come without the libraries behind them. So that the dynamic linker loads them, empty libraries of those
names are compiled, whose functions are never called: only the real modules are looked at.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.backends.model_files import ArtifactFiles
from edge_runtime.backends.tensorrt.library import FULL, RTX, Traits, installed_library, traits_of
from edge_runtime.backends.tensorrt.plan import choose_typing
from edge_runtime.errors import EdgeRuntimeError

ROOT = Path(__file__).parents[2]
BACKENDS = ROOT / "edge_runtime" / "backends" / "tensorrt"
KEPT = ROOT / "build" / "tensorrt-bindings"
LOCK = Path(__file__).parents[2] / "requirements" / "tensorrt-bindings.lock"

VERSIONS = {"8.6.1": "8.6", "10.3.0": "10.3", "10.13.3.9": "10.13", "10.16.1.11": "10.16", "11.4.0.106": "11.4"}

CLASSES = {
    "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser", "config": "IBuilderConfig",
    "profile": "IOptimizationProfile", "engine": "ICudaEngine", "loaded": "ICudaEngine",
    "_context": "IExecutionContext", "context": "IExecutionContext", "runtime": "Runtime",
    "flag": "NetworkDefinitionCreationFlag", "inspector": "EngineInspector", "kept": "ITimingCache",
    "problem": "ParserError",
}  # fmt: skip
"""What a variable of this name is, in the files that call TensorRT."""

FILES = ("build.py", "instance.py", "backend.py")

OURS = frozenset(("plan", "spec", "_spec", "inputs", "outputs"))
"""Attributes of variables of these names that are ours: `loaded` is a LoadedEngine elsewhere."""


def names_used() -> set[str]:
    """`Class.attribute` for each that our code uses, and `Enum.MEMBER`."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse((BACKENDS / file).read_text())):
            if isinstance(node, ast.Attribute):
                found.update(_name(node))
    return found


def _name(node: ast.Attribute) -> Iterator[str]:
    owner = node.value
    if isinstance(owner, ast.Attribute) and owner.attr == "_context":
        yield f"{CLASSES['_context']}.{node.attr}"
    elif isinstance(owner, ast.Name) and owner.id in CLASSES and node.attr not in OURS:
        yield f"{CLASSES[owner.id]}.{node.attr}"
    elif "module" in {getattr(owner, "id", ""), getattr(owner, "attr", "")}:
        yield node.attr
    elif isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "module":
        yield f"{owner.attr}.{node.attr}"


def wanted_of(traits: Traits, name: str) -> set[str]:
    """The names that our code uses with a version: what its traits leave out is not asked for."""
    leaving_out = {
        "IProgressMonitor": traits.progress, "IProgressMonitor.__init__": traits.progress,
        "IBuilderConfig.progress_monitor": traits.progress,
        "NetworkDefinitionCreationFlag.EXPLICIT_BATCH": traits.explicit_batch,
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED": traits.strong_flag,
        "ComputeCapability": name == RTX, "IBuilderConfig.num_compute_capabilities": name == RTX,
        "IBuilderConfig.set_compute_capability": name == RTX,
        "IBuilderConfig.create_timing_cache": traits.timing_cache,
        "IBuilderConfig.set_timing_cache": traits.timing_cache,
        "BuilderFlag.GPU_FALLBACK": traits.weak_typing,
        "init_libnvinfer_plugins": name == FULL,
    }  # fmt: skip
    wanted = {each for each in names_used() if leaving_out.get(each, True)}
    for asked in ("", "f16", "bf16", "int8"):
        for exported in ("f32", "f16", "bf16", "int8", "mixed"):
            files = ArtifactFiles((), 0, exported, holds_int8=exported == "int8")
            try:
                wanted |= {f"BuilderFlag.{flag}" for flag in choose_typing(asked, files, traits, "").flags}
            except EdgeRuntimeError:
                continue
    return wanted


LOOK = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
found = {name: dir(getattr(module, name)) for name in dir(module) if not name.startswith("__")}
print(json.dumps(found))
"""


def missing(api: dict[str, list[str]], wanted: set[str]) -> list[str]:
    def is_there(name: str) -> bool:
        owner, dot, attribute = name.partition(".")
        return owner in api and (not dot or attribute in api[owner])

    return sorted(name for name in wanted if not is_there(name))


def look(module: str, **environment: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    api: dict[str, list[str]] = json.loads(done.stdout)
    return api


def fetched(version: str) -> Path:
    """The folder of one version's bindings, fetched once, checked against its hash. Skips where it cannot be had."""
    blocks = LOCK.read_text().split("\ntensorrt")
    block = next((f"tensorrt{each}" for each in blocks if f"=={version} " in each), "")
    assert block, f"{LOCK} has no {version}"
    digest = hashlib.sha256((block + sys.version).encode()).hexdigest()[:16]
    folder = KEPT / f"{version}-{digest}"
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as part:
            requirements = Path(part) / "requirements.txt"
            requirements.write_text(block)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
            done = subprocess.run(
                [*pip, "--require-hashes", "--no-deps", "--target", f"{part}/site", "-r", str(requirements)],
                capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            if done.returncode != 0:
                pytest.skip(f"the bindings of TensorRT {version} cannot be fetched: {done.stderr.strip()[-300:]}")
            Path(part, "site").rename(folder)
    return folder


def placeholders(bindings: Path, folder: Path) -> None:
    """Compile libraries of the names that the bindings want, with the functions that the linker looks for."""
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: what the bindings are linked to cannot be put in place")
    symbols = subprocess.run(["nm", "-D", "--undefined-only", bindings], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in symbols.stdout.splitlines() if line.split()[0] == "U"]
    own = [name for name in names if "@" not in name and not name.lstrip("_").startswith("Py")]
    source = folder / "placeholders.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in own))
    needed = subprocess.run(["readelf", "-d", bindings], capture_output=True, text=True, check=True).stdout
    for line in needed.splitlines():
        if "(NEEDED)" in line and "[libnv" in line:
            library = line.split("[")[1].rstrip("]")
            command = ["gcc", "-shared", "-fPIC", str(source), f"-Wl,-soname,{library}", "-o", str(folder / library)]
            subprocess.run(command, check=True)


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_we_use_is_in_the_real_bindings(version: str, tmp_path: Path) -> None:
    bindings = fetched(version) / "tensorrt_bindings"
    placeholders(bindings / "tensorrt.so", tmp_path)
    api = look("tensorrt", PYTHONPATH=str(bindings), LD_LIBRARY_PATH=str(tmp_path))
    assert missing(api, wanted_of(traits_of(FULL, VERSIONS[version]), FULL)) == []
    assert missing(api, {"IBuilderConfig.abracadabra", "BuilderFlag.NONE_SUCH"})


@pytest.mark.skipif(installed_library() != RTX, reason="TensorRT for RTX is not installed: make test-tensorrt")
def test_every_name_that_we_use_is_in_the_real_rtx_library() -> None:
    assert missing(look(RTX), wanted_of(traits_of(RTX, "1.7"), RTX)) == []


def test_the_names_are_found_by_reading_the_code() -> None:
    used = names_used()
    assert {
        "Builder.build_serialized_network", "OnnxParser.parse_from_file", "IBuilderConfig.set_flag", "BuilderFlag.TF32",
        "IExecutionContext.execute_async_v3", "Runtime.deserialize_cuda_engine", "ICudaEngine.num_io_tensors",
        "Runtime.num_DLA_cores", "EngineInspector.get_engine_information", "ITimingCache.serialize", "ParserError.desc",
    } <= used  # fmt: skip


def test_every_name_of_cuda_that_we_use_is_in_the_real_bindings() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed: make test-tensorrt")
    tree = ast.parse((BACKENDS / "cuda.py").read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "cuda")
            or (isinstance(node.value, ast.Attribute) and node.value.attr == "_cuda")
        )
    }
    assert len(used) > 20
    assert [name for name in sorted(used) if not hasattr(runtime, name)] == []
