"""The ways to load a version: which backend of the profile takes which of its files, and with which options.

Owns: the profile's order of backends, overlaid by each model's own settings; when a file is converted first; the words
for backends that were passed over. Loads no model. Thread: the loader's; the updater's asks for plans, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.registry import Backends, declaration_of, find_declaration, known_backends
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import BackendError, LoadFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.artifacts import Want, choose_artifacts
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.kinds import PICKLE, kind_of, may_be_model, stand_ins
from edge_runtime.models.names import is_code, is_source, suffix_of, variant_of
from edge_runtime.profiles.profile import BackendChoice

if TYPE_CHECKING:
    from edge_runtime.models.builds import Builds, Conversion

CONVERTED_COST = 100
"""Of a file that no backend reads: more than the `load_cost` of any backend."""


class ServingLimits(Struct, frozen=True):
    """Limits of the profile: cores that all runs share, rows a request may have, queue bounds of each model.

    host_memory_bytes: the bound of each host's allocations, None for no limit. run_limit_ms: how long a run in a host
    may take, None: as the curve says.
    """

    cores: int
    max_batch_rows: int
    queue_rows: int
    queue_bytes: int
    host_memory_bytes: int | None = None
    run_limit_ms: float | None = None


class PassedOver(Struct, frozen=True):
    """A backend that did not load a version, and why. is_absent: of the profile's order, and not installed.

    is_of_file: the file was tried, and is what it could not load, or run first.
    """

    choice: BackendChoice
    reason: str
    is_absent: bool = False
    is_of_file: bool = False

    def __str__(self) -> str:
        return f"{self.choice.name}: {self.reason}"


class LoadPlan(Struct, frozen=True):
    """One way to load a version: a backend of the profile, the artifact it takes, and how.

    declaration: the backend's. conversion: that the artifact is part of, where the version's own file was converted.
    """

    choice: BackendChoice
    artifact: Path
    options: LoadOptions
    declaration: Declaration
    conversion: Conversion | None = None

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.choice.name


class LoadPlans:
    """Plans loads by the profile's backend order, overlaid by each model's own settings."""

    def __init__(
        self, choices: Sequence[BackendChoice], backends: Backends, builds: Builds, limits: ServingLimits
    ) -> None:
        """builds: converts files that no backend reads."""
        self._choices = choices
        self._backends = backends
        self._builds = builds
        self._limits = limits

    def of(self, folder: ModelFolder, version: VersionFolder) -> list[LoadPlan]:
        """Return the ways that a load would try, in its order. Raises as `choose`; LoadFailed: there is none."""
        passed: list[PassedOver] = []
        found = self.choose(folder.settings, version, passed)
        if not found:
            raise LoadFailed("; ".join(map(str, passed)))
        return found

    def cost(self, settings: ModelSettings, version: VersionFolder) -> tuple[int, int]:
        """Return the cost of a load, to sort by: as its backend says, the cheapest first, and its bytes.

        A file that no backend reads is converted, which takes longest. Thread: any.
        """
        wants, _ = self._usable(settings, version, [])
        costs = (declaration_of(want.backend).load_cost for want in wants if want.find(version) is not None)
        return next(costs, CONVERTED_COST), sum(path.stat().st_size for path in version.files.values() if path.exists())

    def choose(self, settings: ModelSettings, version: VersionFolder, passed: list[PassedOver]) -> list[LoadPlan]:
        """Return the ways to load a version, best first, and add the backends that cannot to `passed`.

        Raises LoadFailed: there is no artifact; NotConvertedYet: there will be.
        """
        wants, usable = self._usable(settings, version, passed)
        conversion = None
        try:
            found = choose_artifacts(version, wants) if wants else []
        except LoadFailed as error:
            why_none = LoadFailed("; ".join([error.message, *map(str, passed)]))
            conversion = self._converted(settings, version, wants, why_none)
            found = choose_artifacts(replace(version, path=conversion.folder, files=conversion.files), wants)
        return self._plans_of(settings, version, zip(usable, found, strict=True), conversion)

    def instead(self, settings: ModelSettings, version: VersionFolder, tried: Sequence[LoadPlan]) -> list[LoadPlan]:
        """Return the ways to load another file of a version, by a conversion, where those tried came to nothing.

        Raises LoadFailed: why that cannot be converted; NotConvertedYet: it will be.
        """
        if not tried or any(plan.conversion is not None or plan.declaration.is_code for plan in tried):
            return []
        wants, usable = self._usable(settings, version, [])
        names = {plan.artifact.name for plan in tried}
        others = replace(version, files={name: path for name, path in version.files.items() if name not in names})
        builder = self._builds.builder
        plan = builder.plan_conversion(settings, others, {name for want in wants for name in want.artifacts})
        if plan is None:
            return []
        name = Path(plan.artifact).name
        if missing := plan.missing():
            raise LoadFailed(f"{name} would be tried next (not installed: {', '.join(missing)})")
        try:
            conversion = builder.converted(plan)
        except LoadFailed as error:
            raise type(error)(f"{name}, which is tried next: {error.message}") from error
        found = choose_artifacts(replace(version, path=conversion.folder, files=conversion.files), wants)
        return self._plans_of(settings, version, zip(usable, found, strict=True), conversion)

    def _usable(
        self, settings: ModelSettings, version: VersionFolder, passed: list[PassedOver]
    ) -> tuple[list[Want], list[BackendChoice]]:
        """Return the wants of the profile's backends here, and add those that are not here to `passed`."""
        choices = [choice for choice in self._choices if settings.backend in {None, choice.name}]
        if not choices and settings.backend is not None:
            choices = [BackendChoice(name=settings.backend)]
        wants: list[Want] = []
        usable: list[BackendChoice] = []
        for choice in choices:
            is_wanted = settings.backend is not None or _is_read_by(choice.name, version)
            if not is_wanted and not self._backends.has(choice.name):
                continue  # what to install is not said, and takes long to find out
            try:
                declared = self._backends.installed(choice.name)
            except BackendError as error:
                if is_wanted:
                    passed.append(PassedOver(choice, error.message, is_absent=settings.backend is None))
                continue
            precision = settings.precision or choice.precision
            wants.append(Want(choice.name, declared.artifacts, precision, declared.beside))
            usable.append(choice)
        return wants, usable

    def _plans_of(
        self,
        settings: ModelSettings,
        version: VersionFolder,
        found: Iterable[tuple[BackendChoice, Path | None]],
        conversion: Conversion | None,
    ) -> list[LoadPlan]:
        within = version.within if conversion is None else ()
        plans = [
            LoadPlan(
                choice,
                path,
                _options(choice, settings, self._limits, within),
                self._backends.installed(choice.name),
                conversion,
            )
            for choice, path in found
            if path is not None
        ]
        # A model.py that is allowed has other tensors than the net that it is the front of: that never stands in.
        return plans[:1] if plans and plans[0].declaration.is_code else plans

    def prepare(self, folder: ModelFolder, version: VersionFolder, stop: threading.Event) -> None:
        """Compile the engines that `load` needs, and wait for them, or until `stop` is set. Not on the loader's thread.

        Raises nothing: `load` says which cannot be compiled.
        """
        with contextlib.suppress(BackendError):
            for plan in self.of(folder, version):
                if plan.declaration.builder:
                    with contextlib.suppress(BackendError):
                        self._backends.here(plan.backend).prepare(plan.artifact, plan.options, stop)

    def suffixes(self) -> frozenset[str]:
        """Return the suffixes of artifacts that an update may bring: of backends here, no code, plans and sources.

        Of a backend that loads several files as one model the whole name.
        """
        names, whole = set[str](), set[str]()
        for choice in self._choices:
            with contextlib.suppress(BackendError):
                declared = self._backends.installed(choice.name)
                (whole if declared.beside else names).update(declared.artifacts)
        return frozenset({suffix_of(name) for name in names if not is_code(name) and not is_source(name)} | whole)

    def precisions(self) -> frozenset[str]:
        """Return the precisions of the profile: variants of a release in others are of no use here."""
        return frozenset(choice.precision for choice in self._choices)

    def front_note(self, settings: ModelSettings, version: VersionFolder, artifact: Path) -> str:
        """Say which of a `model.py` and a net beside it is served; "" where there is only one of them."""
        codes: set[str] = set()
        nets: set[str] = set()
        for declared in (find_declaration(each.name) for each in self._choices if self._backends.has(each.name)):
            if declared is not None:
                (codes if declared.is_code else nets).update(declared.artifacts)
        if artifact.name not in codes:
            code = min(codes & set(version.files), default="")
            if not code:
                return ""
            why = f"backend is {settings.backend!r}" if settings.backend else "python_models = true is not configured"
            return f"{code} was left out, and {artifact.name} is served: {why}"
        beside = sorted((nets & set(version.files)) - codes)
        return f"{artifact.name} is the front of {' and '.join(beside)}, which only it reads" if beside else ""

    # ---- private ----------------------------------------------------------------------------------------------------

    def _converted(
        self, settings: ModelSettings, version: VersionFolder, wants: Sequence[Want], why_none: LoadFailed
    ) -> Conversion:
        """Return the conversion of the version's file.

        why_none: no backend reads the files. Raises it, with the packages not installed, where none can be converted;
        LoadFailed, NotConvertedYet.
        """
        builder = self._builds.builder
        plan = builder.plan_conversion(settings, version, {name for want in wants for name in want.artifacts})
        if plan is None:
            raise why_none
        if missing := plan.missing():
            raise LoadFailed(f"{why_none.message} (not installed: {', '.join(missing)})") from why_none
        return builder.converted(plan)


def why_not_loaded(passed: Sequence[PassedOver], version: VersionFolder) -> list[str]:
    """Return why no backend loaded a version, each fault once, those that a person can act on first.

    Files that stand in for others come first. A backend that is not installed is a reason only where no installed one
    was tried on a file. Where a backend could not load the file either whose words are clearer, those of another about
    the same file are left out.
    """
    names = dict.fromkeys((*version.files, *(name for name, *_ in version.fingerprint)))
    notes = list(stand_ins(version.path, names))
    tried = {each.choice.name for each in passed if each.is_of_file}
    said: set[str] = set()
    for each in sorted(passed, key=lambda each: each.is_absent):
        declared = find_declaration(each.choice.name)
        is_noise = each.is_of_file and declared is not None and not tried.isdisjoint(declared.less_clear_than)
        is_noise = is_noise or (bool(tried) and each.is_absent)
        if not is_noise and each.reason not in said:
            notes.append(str(each))
            said.add(each.reason)
    return notes


def worth_telling(passed: Sequence[PassedOver], device: str) -> list[str]:
    """Return the backends that did not load a version, and that its owner should know of. device: where it runs.

    A library that is not installed is how this device was set up (`profile show` lists it), unless it would have run
    on an accelerator and the CPU does it instead: a fall back to slower hardware is never silent.
    """
    return [
        str(each)
        for each in passed
        if not each.is_absent or (device == "CPU" and each.choice.device not in ("", "CPU"))
    ]


def why_backend(settings: ModelSettings, served: LoadPlan, passed: Sequence[PassedOver]) -> str:
    """Return who chose the backend of a version, and which would have come before it, each with its reason."""
    if settings.backend is not None:
        return f'model.toml says backend = "{settings.backend}".'
    why = f"It is the first backend of the profile that loads {served.artifact.name}."
    return f"{why} Passed over: {'; '.join(map(str, passed))}." if passed else why


def left_out(version: VersionFolder, served: LoadPlan, tried: Sequence[LoadPlan]) -> list[str]:
    """Return the files of a version that are not served beside the one that is, each with its reason.

    Weights that it was made of are left out, and other forms of the same model, which a profile may prefer.
    """
    source = served.conversion.report.get("source") if served.conversion is not None else None
    name = Path(source).name if isinstance(source, str) else served.artifact.name
    failed = dict.fromkeys(plan.artifact.name for plan in tried if plan.artifact != served.artifact)
    notes = [f"{each} failed, and {name} is served instead" for each in failed if each in version.files]
    for each, path in version.files.items():
        if each not in failed and may_be_model(each) and (kind := kind_of(path)) is PICKLE:
            notes.append(f"{each} {kind.sentence(str(path))}")
    return notes


def variant_note(artifact: Path, options: LoadOptions) -> str:
    """Say of a variant that no setting asks for why it is served; "" of any other artifact."""
    if variant_of(artifact.name) in ("", options.precision):
        return ""
    return f"{artifact.name} is served, since no other model lies beside it"


def _options(
    choice: BackendChoice, settings: ModelSettings, limits: ServingLimits, within: tuple[str, ...]
) -> LoadOptions:
    cores = limits.cores
    threads = min(settings.threads or choice.threads or 1, cores)
    return LoadOptions(
        threads=threads,
        precision=settings.precision or choice.precision,
        device=settings.device or choice.device,
        spin=choice.spin,
        extra=_options_for(choice.name, {**choice.extra, **settings.options}),
        concurrency=min(settings.instances or cores, max(cores // threads, 1)),
        max_rows=settings.max_batch_rows,
        declared=_declared(settings),
        host_memory_bytes=settings.limits.host_memory_bytes or limits.host_memory_bytes,
        delegate=choice.delegate,
        delegate_options=choice.delegate_options,
        within=within,
        language=settings.language,
    )


def _is_read_by(backend: str, version: VersionFolder) -> bool:
    """Return whether a version has a file that a backend, which may not be installed, would load."""
    declared = find_declaration(backend)
    if declared is None:
        return False
    return Want(backend, declared.artifacts, beside=declared.beside).find(version) is not None


def _declared(settings: ModelSettings) -> ModelSpec | None:
    """Return the tensors that `[input.NAME]` and `[output.NAME]` describe; None where they describe none."""
    inputs, outputs = (
        tuple(
            TensorSpec(name, datatype or default, shape or ())
            for name, each in tables.items()
            for shape, datatype in [(getattr(each, "shape", None), getattr(each, "datatype", None))]
            if shape is not None or datatype is not None
        )
        for tables, default in ((settings.input, "FP32"), (settings.output, ""))
    )
    return ModelSpec(inputs, outputs) if inputs or outputs else None


def _options_for(backend: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return a backend's options: the general ones, and its own `<backend>.<option>`, which others never get."""
    mine: dict[str, str] = {}
    for key, value in options.items():
        owner, dot, option = key.partition(".")
        if not dot or owner not in known_backends():
            mine[key] = value
        elif owner == backend:
            mine[option] = value
    return mine
