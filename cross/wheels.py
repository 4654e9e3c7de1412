"""The Python packages of an image or a package: wheels for the target, in the versions and with the hashes of the lock.

Owns: which packages an extra needs on the target (markers are read for the target, not for this machine), their
download by pip, their cache, and the choice of files for serving. Called by build_image and deploy/debian.
"""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cross.building import ShowStep, show_nothing
from cross.tree import Tree

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "cache"
"""The default folder of downloads."""

FETCH_LIMIT_S = 900.0
BUILD_LIMIT_S = 120.0

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's word for an architecture, and the kernel's."""

LEFT_OUT = (
    "*/tests/*", "*/test/*", "*/_tests/*", "*_tests.*", "*.gitignore", "*.dist-info/RECORD", "*.dist-info/RECORD.jws",
    "*.pyi", "*.pxd", "*.pyx", "*.a", "*.h", "*.hpp", "*.c", "*.f", "*.f90", "*.cmake", "*.js", "*.sh",
    "numpy/f2py/*", "numpy/distutils/*", "numpy/_core/include/*", "numpy/_core/lib/*", "numpy/_pyinstaller/*",
    "numpy/random/lib/*", "numpy/random/_examples/*",
    "onnxruntime/backend/*", "onnxruntime/datasets/*", "onnxruntime/quantization/*", "onnxruntime/tools/*",
    "onnxruntime/transformers/*",
    "PIL/_avif*", "PIL/_imagingcms*", "PIL/_imagingtk*", "pillow.libs/libavif*", "pillow.libs/liblcms2*",
    "openvino/tools/*", "openvino/include/*", "openvino/cmake/*", "openvino/frontend/*/*",
    "ai_edge_litert/libLiteRt*", "ai_edge_litert/aot/*", "ai_edge_litert/tflite/*", "ai_edge_litert/tools/*",
    "ai_edge_litert/vendors/*", "ai_edge_litert/*_pb2.py", "ai_edge_litert/schema_py_generated.py",
)  # fmt: skip
"""Tests, headers, types, converters: files for building, not for serving; and what no picture that is taken needs."""

NEEDED_BESIDE = {"numpy/f2py/*": "scipy"}
"""Of LEFT_OUT, what a package imports: scipy takes all names of numpy."""

NOT_NEEDED = {
    "backports-strenum": "ai-edge-litert's converter imports it",
    "ml-dtypes": "ai-edge-litert imports it for inputs and outputs of BF16, which no converter writes",
    "tqdm": "ai-edge-litert's converter imports it",
    "coloredlogs": "onnxruntime 1.23 imports it in its tools alone",
    "sympy": "onnxruntime 1.23 imports it in its tools alone",
    "huggingface-hub": "tokenizers imports it to download alone",
    "pycparser": "cffi imports it to compile alone",
    "nvidia-nccl-cu12": "xgboost loads it to train on several GPUs alone",
}
"""Packages that others require and never import while serving, with the reason."""

NEEDED_ALL_THE_SAME = {"ml-dtypes": "onnx"}
"""Of NOT_NEEDED, what another package imports always."""

LOCKS = ("dev.lock", "sources.lock")
"""The versions of packages; a later lock has those of packages that no earlier one has."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that an image or a package is for. minor: of Python 3; glibc: the minor version of its glibc 2."""

    architecture: str
    minor: int
    glibc: int

    @property
    def machine(self) -> str:
        """The architecture as wheels and Linux name it."""
        return MACHINES[self.architecture]

    def tags(self) -> list[str]:
        """Platform tags of wheels, newest first (PEP 600): 2.17 is the oldest glibc that any aarch64 wheel is for."""
        oldest = 5 if self.architecture == "amd64" else 17
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, oldest - 1, -1)]
        return [*tags, *(f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux"))]

    def environment(self, extra: str = "") -> dict[str, str]:
        """The environment for markers (PEP 508)."""
        return {
            "extra": extra, "implementation_name": "cpython", "os_name": "posix", "platform_machine": self.machine,
            "platform_python_implementation": "CPython", "platform_system": "Linux", "sys_platform": "linux",
            "python_version": f"3.{self.minor}", "python_full_version": f"3.{self.minor}.0",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inside:
    """What a wheel holds of others: shared libraries by path with their SHA-256, and the entries of its own bills."""

    libraries: dict[str, str]
    told: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on disk, its hash and its METADATA."""

    path: Path
    sha256: str
    metadata: email.message.Message

    @property
    def name(self) -> str:
        """The normalised name."""
        return canonicalize_name(self.metadata["Name"])

    @property
    def version(self) -> str:
        """The version in METADATA."""
        return str(self.metadata["Version"])


def build_own(folder: Path) -> Wheel:
    """This package's wheel from the working tree; the same bytes for the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("edge_runtime-*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder.resolve())]
    # hatchling dates files by this; the time of the commit is not part of a wheel.
    subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=BUILD_LIMIT_S,
        env={"SOURCE_DATE_EPOCH": "1580601600"},
    )  # fmt: skip
    (found,) = folder.glob("edge_runtime-*.whl")
    return read_wheel(found)


def collect(
    own: Wheel,
    extras: Iterable[str],
    target: Target,
    cache: Path,
    replacements: Iterable[Path] = (),
    *,
    show_step: ShowStep = show_nothing,
) -> list[Wheel]:
    """Every wheel that `own` with its extras requires on the target, sorted by name; downloads those not cached.

    replacements: wheels given by hand, unhashed; onnxruntime_gpu stands for onnxruntime.
    """
    # One folder for each target: a wheel's name says its platform, the lock's hashes do not.
    cache = cache / f"{target.architecture}-3.{target.minor}-glibc2.{target.glibc}"
    locked = _locked(target)
    found = {_STANDS_FOR.get(wheel.name, wheel.name): wheel for wheel in map(read_wheel, replacements)}
    wanted = [need for wheel in found.values() for need in _requirements(wheel, ("",), target)]
    wanted += _requirements(own, ("", *extras), target)
    while wanted:
        fresh = sorted((name, extra) for name, extra in wanted if name not in found)
        _download([locked[name] for name in sorted({name for name, _ in fresh})], target, cache, show_step)
        for name, _ in fresh:
            version = re.split(r"==| ", locked[name])[1]
            found[name] = _find(cache, name, version, _hashes(locked[name]))
        wanted = [need for name, extra in fresh for need in _requirements(found[name], ("", extra), target)]
        wanted = [need for need in wanted if need[0] not in found]
    return [found[name] for name in sorted(found)]


def is_left_out(path: str) -> bool:
    """Whether an image goes without a file of a wheel. Of our own there is none: scripts and styles are its page's."""
    return not path.startswith("edge_runtime/") and any(fnmatch(path, pattern) for pattern in LEFT_OUT)


def read_wheel(path: Path) -> Wheel:
    """Read a wheel's hash and METADATA."""
    data = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    return Wheel(path, hashlib.sha256(data).hexdigest(), metadata)


def inside(wheel: Wheel) -> Inside:
    """Read what a wheel holds of others, as far as an image has it. Modules of Python are the wheel's own."""
    found = Inside({}, [])
    with zipfile.ZipFile(wheel.path) as archive:
        for name in sorted(archive.namelist()):
            if re.search(r"(^|/)lib[^/]*\.so[.\d]*$", name) and not is_left_out(name):
                found.libraries[name] = hashlib.sha256(archive.read(name)).hexdigest()
            elif re.search(r"\.dist-info/sboms/[^/]*\.json$", name):
                told = json.loads(archive.read(name))
                found.told.extend(told.get("components", ()) if told.get("bomFormat") == "CycloneDX" else ())
    return found


def unpack(wheel: Wheel, folder: str, beside: frozenset[str] = frozenset()) -> Tree:
    """A wheel's files below a folder of the image, without its commands: the image has one of its own.

    beside: names of the image's packages.
    """
    tree, kept = Tree(), [pattern for pattern, name in NEEDED_BESIDE.items() if name in beside]
    with zipfile.ZipFile(wheel.path) as archive:
        for member in archive.infolist():
            path = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member.filename)
            if member.is_dir() or ".data/" in path:
                continue
            if is_left_out(path) and not any(fnmatch(path, pattern) for pattern in kept):
                continue
            tree.file(f"{folder}/{path}", archive.read(member))
    return tree


# ---- private --------------------------------------------------------------------------------------------------------

_STANDS_FOR = {"onnxruntime-gpu": "onnxruntime"}


def _locked(target: Target) -> dict[str, str]:
    """The locks' requirements that hold on the target, by name, each one line for pip with its hashes."""
    found: dict[str, str] = {}
    text = "".join((ROOT / "requirements" / name).read_text() for name in LOCKS).replace("\\\n", " ")
    for line in text.splitlines():
        if not re.match(r"[a-z0-9]", line):
            continue
        requirement = Requirement(line.partition(" --hash")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate(target.environment()):
            hashes = " ".join(f"--hash=sha256:{digest}" for digest in _hashes(line))
            wanted = f"{requirement.name}{requirement.specifier} {hashes}"
            found.setdefault(canonicalize_name(requirement.name), wanted)
    return found


def _hashes(line: str) -> list[str]:
    return re.findall(r"--hash=sha256:([0-9a-f]{64})", line)


def _requirements(wheel: Wheel, extras: Iterable[str], target: Target) -> list[tuple[str, str]]:
    """Names (and an extra of theirs) that a wheel requires on the target."""
    needs: list[tuple[str, str]] = []
    for text in wheel.metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(target.environment(extra)) for extra in extras):
            needs += [(canonicalize_name(requirement.name), extra) for extra in requirement.extras or {""}]
    return [need for need in needs if need[0] not in NOT_NEEDED or NEEDED_ALL_THE_SAME.get(need[0]) == wheel.name]


def _download(lines: list[str], target: Target, cache: Path, show_step: ShowStep) -> None:
    """Download missing wheels with pip from this machine's index.

    They go to a temporary folder first, so that a concurrent build sees whole wheels or none.
    """
    cache.mkdir(parents=True, exist_ok=True)
    lines = [line for line in lines if not _in_cache(line, cache)]
    if not lines:
        return
    show_step(f"fetching {len(lines)} packages of the locks for {target.architecture}, Python 3.{target.minor}")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetched-") as fetched:
        listing = Path(fetched) / "wanted.txt"
        listing.write_text("\n".join(lines) + "\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-qq", "--no-deps",
             "--only-binary=:all:", "--require-hashes", "--implementation=cp", f"--python-version=3.{target.minor}",
             *(f"--abi={abi}" for abi in (f"cp3{target.minor}", "abi3", "none")),
             *(f"--platform={tag}" for tag in target.tags()),
             "--dest", fetched, "-r", str(listing)],
            check=True, timeout=FETCH_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        for wheel in Path(fetched).glob("*.whl"):
            wheel.replace(cache / wheel.name)


def _in_cache(line: str, cache: Path) -> bool:
    name, version = line.partition(" ")[0].split("==")
    try:
        _find(cache, name, version, _hashes(line))
    except FileNotFoundError:
        return False
    return True


def _find(cache: Path, name: str, version: str, hashes: list[str]) -> Wheel:
    for path in sorted(cache.glob(f"*-{version}-*.whl")):
        if canonicalize_name(path.name.partition("-")[0]) == name:
            wheel = read_wheel(path)
            if wheel.sha256 in hashes:
                return wheel
    raise FileNotFoundError(f"{name} {version} in {cache}")
