"""Conversions as a kind of build: a model's file that no backend here reads, turned into one that a backend does.

Owns: which file of a version is converted, what the result depends on (the key), and the child process that converts
it, forked where its libraries are imported already: it sees the file alone and its work folder. What is made must
answer as its source does, or it is refused. Knows the converters by name only: they import this package, never the
other way. Called by loading.py and build_store.py.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import resource
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Struct

from edge_runtime import __version__
from edge_runtime.builds.build_cache import BuildCache
from edge_runtime.config.settings import ModelSettings
from edge_runtime.durable import SYSTEM_DISK
from edge_runtime.errors import LoadFailed, NotBuiltYet, NotConvertedYet, StorageFailed
from edge_runtime.models.builds import Conversion
from edge_runtime.models.digest import sha256_of_file
from edge_runtime.models.folder import VersionFolder
from edge_runtime.models.kinds import FileKind, kind_of, may_be_model
from edge_runtime.models.walk import MAX_VERSION_FILES
from edge_runtime.sandbox.child import ChildFunction
from edge_runtime.sandbox.ending import Cause, ChildLimits, Ending, ShowProgress

if TYPE_CHECKING:
    from edge_runtime.models.model_table import ModelTable

FORMAT = 1
"""Of the key; raised when files are converted differently and no field of the plan shows it."""

CONVERTERS = "edge_runtime_converters"

MADE = {"onnx": "model.onnx", "openvino": "model.xml"}
"""The file that a conversion makes, by what it converts to."""

LIBRARIES = {
    "convert-pytorch": ("torch", "onnx", "onnxscript", "onnxruntime"),
    "convert-keras": ("keras", "torch", "onnx", "onnxscript", "onnxruntime"),
    "convert-sklearn": ("sklearn", "skops", "skl2onnx", "onnx", "onnxruntime"),
    "convert-xgboost": ("xgboost", "onnx", "onnxruntime"),
    "convert-lightgbm": ("lightgbm", "onnx", "onnxruntime"),
    "convert-catboost": ("catboost", "onnx", "onnxruntime"),
    "convert-openvino": ("openvino",),
}
"""The modules that each extra's converters import. With another version of one, a file is converted anew."""

_DISTRIBUTIONS = {"sklearn": ("scikit-learn",), "xgboost": ("xgboost", "xgboost-cpu")}
"""Of modules that are installed under another name."""

_FULL_BYTES = 1 << 16
"""Free space below which a disk counts as full: every single write of a conversion is larger."""

_SPARED_BYTES, _SPARED_SHARE = 64 << 20, 8
"""The free space that a conversion leaves on a disk, that or an eighth of it: the daemon's own files go on."""

IDLE_S = 60.0
"""A conversion that takes no CPU for that long waits for what never comes, and others wait for it."""

_PASSES, _LEAST_WRITTEN_BYTES = 2, 64 << 20
"""Of a conversion's steps, what it writes beside its result is as large as that; libraries have files of their own."""

_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Told = str | _Number | float | bool | None

ConversionReport = dict[str, _Told | list[str | dict[str, _Told]]]
"""A converter's report, for clients: flat, its numbers as every client reads them, since a hostile source may have
written it."""


class ConversionPlan(Struct, frozen=True):
    """A conversion to do. artifact: the file, or the folder that is one model. libraries: name and version.

    shapes: of inputs that the file leaves out, as `edge-runtime convert --shapes` takes them. extra: that brings the
    libraries. within: real folders that the artifact must lie in, wherever links lead by then; () for anywhere.
    """

    artifact: str
    kind: str
    target: str
    libraries: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...] = ()
    extra: str = ""
    within: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the modules that converting takes and that are not installed."""
        return [name for name in (CONVERTERS, *dict(self.libraries)) if find_spec(name) is None]

    def key(self) -> str:
        """Hash all that the result depends on, the content of the source above all. Raises LoadFailed: unreadable."""
        parts = (FORMAT, __version__, self.kind, self.target, self.libraries, self.shapes)
        digest = hashlib.sha256(msgspec.json.encode(parts))
        try:
            files = _files_of(Path(self.artifact))
            nbytes = sum(path.lstat().st_size for _, path in files)
            if nbytes > machine_bytes():
                raise LoadFailed(
                    f"{self.artifact}: has {nbytes} bytes, and this machine {machine_bytes()} of memory; convert it "
                    "where there is more, with edge-runtime convert"
                )
            for name, path in files:
                digest.update(f"\n{name}\n{sha256_of_file(path, self.within)}".encode())
        except OSError as error:
            raise LoadFailed(f"{self.artifact}: cannot be read: {error.strerror}") from error
        return digest.hexdigest()


class ConvertTask(Struct, frozen=True):
    """A plan for the child. work: a folder with an empty `out/` in it. limit_bytes: of one file that it writes."""

    plan: ConversionPlan
    work: str
    memory_bytes: int
    limit_bytes: int


def plan_conversion(
    settings: ModelSettings, version: VersionFolder, artifacts: Collection[str]
) -> ConversionPlan | None:
    """Return how a version's file is converted; None where it has none that can be, or is not to be.

    artifacts: names of files that backends here load. Raises LoadFailed: several files could be meant.
    """
    if settings.convert == "never":
        return None
    found = {
        path: kind
        for path, kind in _sources(version)
        if kind.extra in LIBRARIES and MADE.get(kind.converts_to) in artifacts
    }
    own = {path: kind for path, kind in found.items() if path.stem == "model"} or found
    if len(own) > 1:
        names = " and ".join(sorted(path.name for path in own))
        raise LoadFailed(f"{version.path} holds {names}; which one is the model? Name it model")
    for path, kind in own.items():
        modules = LIBRARIES[kind.extra]
        shapes = tuple(
            f"{name}=-1,{','.join(map(str, shape))}"
            for name, shape in settings.warmup.shapes.items()  # in their order
        )
        libraries = tuple((name, _version_of(name)) for name in modules)
        source = str(path.absolute())
        return ConversionPlan(source, kind.name, kind.converts_to, libraries, shapes, kind.extra, version.within)
    return None


def prepare(extra: str) -> None:
    """Import what conversions by the libraries of an extra need, in the process that forks them. Runs no model."""
    importlib.import_module(f"{CONVERTERS}.preparation").prepare(extra)


def convert_in_child(task: ConvertTask, progress: ShowProgress) -> ConversionReport:
    """Convert into `out/` of the work folder; returns the converter's report. Raises ConversionFailed, MemoryError."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = task.limit_bytes if hard == resource.RLIM_INFINITY else min(task.limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    converter = importlib.import_module(f"{CONVERTERS}.conversion")
    report = converter.convert_to_serve(
        task.plan.artifact,
        task.plan.target,
        shapes=task.plan.shapes,
        work=task.work,
        memory_limit_bytes=task.memory_bytes,
        progress=progress,
    )
    return msgspec.convert(msgspec.to_builtins(report), ConversionReport)


class ConversionBuilds:
    """A BuildKind. limit_s: against a converter that hangs; ResNet-50 takes a minute on two cores of a server.

    final: whatever ended one, it is tried again only when its file changes. table: knows which conversions are served,
    which stay on the disk. memory_bytes: None for the machine's.
    """

    doing, done, lacking = "converting a model", "a model is converted", "not converted"
    waits, runs, fails = "{name} is waiting to be converted", "{name} is being converted", "{name} was not converted"
    is_conversion = True
    limit_s = 900.0
    final = frozenset(Cause) - {Cause.RETURNED, Cause.STOPPED}
    not_yet: type[NotBuiltYet] = NotConvertedYet

    def __init__(
        self,
        cache: BuildCache,
        child: ChildFunction[ConvertTask, ConversionReport],
        table: ModelTable,
        memory_bytes: int | None,
    ) -> None:
        self.cache = cache
        self._child = child
        self._table = table
        self._memory_bytes = memory_bytes or machine_bytes()

    def find(self, key: str) -> Conversion | None:
        """Return the conversion; None where it is not there."""
        return self.cache.conversion(key)

    def build(
        self, plan: ConversionPlan, key: str, run: Callable[..., Ending[ConversionReport]]
    ) -> Ending[ConversionReport]:
        """Let a child convert, and keep what it made of these very bytes.

        Raises StorageFailed, LoadFailed, OSError: no process can be made.
        """
        with self.cache.work_folder(key) as work:
            made = work / "out"
            made.mkdir()
            task = ConvertTask(plan, str(work), self._memory_bytes, self.cache.limit_bytes)
            free_bytes = SYSTEM_DISK.free_bytes(work)
            spared_bytes = min(_SPARED_BYTES, free_bytes // _SPARED_SHARE)
            ending = run(
                self._child,
                task,
                reads=[Path(plan.artifact)],
                writes=[work],
                within=plan.within,
                written=ChildLimits(
                    idle_s=IDLE_S,
                    folder=str(work),
                    folder_bytes=max(_PASSES * self.cache.limit_bytes, _LEAST_WRITTEN_BYTES),
                    spared_bytes=spared_bytes,
                ),
                prepare=prepare,
                what=plan.extra,
            )
            if ending.cause is not Cause.STOPPED and not _is_as_before(plan, key):
                raise StorageFailed(f"{plan.artifact} changed while it was converted; it is read again")
            if ending.result is not None:
                in_use = self._table.conversions_in_use()
                self.cache.keep_conversion(key, made, MADE[plan.target], ending.result, in_use)
            elif ending.cause is not Cause.STOPPED and SYSTEM_DISK.free_bytes(work) < max(_FULL_BYTES, spared_bytes):
                raise StorageFailed(  # libraries do not name a full disk
                    f"the disk of {self.cache.folder} is full; free some space, and start the daemon again"
                )
        return ending


# ---- private --------------------------------------------------------------------------------------------------------


def _sources(version: VersionFolder) -> Iterator[tuple[Path, FileKind]]:
    """Yield the models among a version's files, with their kinds; a SavedModel is its folder."""
    for name, path in version.files.items():
        kind = kind_of(path) if may_be_model(name) else None
        if kind is not None:
            yield (path.parent if name == "saved_model.pb" else path), kind


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _files_of(source: Path) -> list[tuple[str, Path]]:
    """Return the plain files of a model by relative name, in one order.

    Raises OSError; LoadFailed: too many, or a link among those of a folder, which no converter follows.
    """
    if not source.is_dir():
        return [("", source)]
    found: list[tuple[str, Path]] = []
    left = [source]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    raise LoadFailed(f"{path}: is a symbolic link; copy the file instead")
                if entry.is_dir(follow_symlinks=False):
                    left.append(path)
                elif entry.is_file(follow_symlinks=False):
                    found.append((str(path.relative_to(source)), path))
                if len(found) + len(left) > MAX_VERSION_FILES:
                    raise LoadFailed(f"{source}: holds more than {MAX_VERSION_FILES} files, wanted at most that many")
    return sorted(found)


def _is_as_before(plan: ConversionPlan, key: str) -> bool:
    try:
        return plan.key() == key
    except LoadFailed:
        return False


def _version_of(module: str) -> str:
    """The version of an installed module; "" where it does not say."""
    from importlib import metadata

    for name in _DISTRIBUTIONS.get(module, (module,)):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""
