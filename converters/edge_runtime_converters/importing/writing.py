"""A plan carried out: each model is made whole in a hidden folder of the models folder, then gets its name at once.

Owns: the order stage -> convert and compare -> check -> fsync -> rename -> fsync(folder); what may be replaced; and
that a model of which one part fails leaves nothing. Conversions run in the child of `convert`; files are copied here,
byte by byte, and never read for what they say.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from msgspec import Struct

from edge_runtime.durable import sync_folder
from edge_runtime.errors import ConversionFailed
from edge_runtime.models.names import NAME_RULE, is_ignored, is_model_name
from edge_runtime.models.walk import MAX_DEPTH, MAX_VERSION_FILES, scan
from edge_runtime.sandbox.child import Show
from edge_runtime_converters.comparison import Report
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.importing.onnx_interface import set_interface
from edge_runtime_converters.importing.plan import ImportPlan, Piece, PlannedModel, refusal
from edge_runtime_converters.importing.reading import read_source
from edge_runtime_converters.importing.report import ImportedModel, ImportReport
from edge_runtime_converters.options import TIMEOUT_S, ConversionOptions
from edge_runtime_converters.output_files import work_folder

_AT_FDCWD = -100
_BOTH = 2
"""RENAME_EXCHANGE: each path gets the other's file. Source: renameat2(2)."""


class ImportOptions(Struct, frozen=True, kw_only=True):
    """One import, as a person asks for it.

    name: for the only model of a source, "" for its own. only: names of the models to take, empty for all. shapes,
    tolerance, timeout_s: of each conversion, as `convert` has them. is_dry: plan and report only.
    """

    source: str
    models: str
    name: str = ""
    only: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    tolerance: float | None = None
    timeout_s: float = TIMEOUT_S
    replace: bool = False
    is_dry: bool = False


def import_source(options: ImportOptions, show: Show | None = None) -> ImportReport:
    """Import a source into a models folder. show: gets each stage, on this thread.

    A model that cannot be taken is one `refused` of the report, and leaves nothing. Raises ConversionFailed: the source
    is none, or nothing can be written at all.
    """
    began_s = time.monotonic()
    models_folder = Path(options.models).absolute()
    if models_folder.resolve().is_relative_to(Path(options.source).resolve()) and Path(options.source).is_dir():
        raise ConversionFailed(f"{options.models}: lies in the source, {options.source}; name another with --models")
    with _work_folder(models_folder, options) as work:
        plan = _chosen(read_source(Path(options.source), work, show, shapes=options.shapes), options)
        done: dict[str, ImportedModel] = {}
        for model in _in_order(plan.models):
            inside = _inside(model, (Path(options.source), work))
            done[model.name] = _taken(inside, options, models_folder, work, done, show=show)
    return ImportReport(
        source=options.source,
        system=plan.system,
        models_folder=options.models,
        models=tuple(done[model.name] for model in plan.models),
        notes=plan.notes,
        seconds=round(time.monotonic() - began_s, 3),
    )


@contextmanager
def _work_folder(models_folder: Path, options: ImportOptions) -> Iterator[Path]:
    """A folder to unpack archives and to make models in: beside the models, or with temporary files if it is dry.

    Invariant: all that an import leaves when it is killed lies in it, so that the next import removes it.
    """
    if options.is_dry:
        with tempfile.TemporaryDirectory(prefix="import-") as folder:
            yield Path(folder)
    else:
        with work_folder(models_folder / "import") as work:
            yield work


# ---- private: which models, in which order ---------------------------------------------------------------------------


def _chosen(plan: ImportPlan, options: ImportOptions) -> ImportPlan:
    """The plan of the models asked for, under the names asked for. Raises ConversionFailed."""
    models = plan.models
    if options.only:
        names = [model.name for model in models]
        absent = [name for name in options.only if name not in names]
        if absent:
            held = ", ".join(names) or "no model"
            raise ConversionFailed(f"{options.source}: holds no model {', '.join(absent)}; it holds {held}")
        models = _with_needs(models, options.only)
    if not models:
        raise ConversionFailed(f"{options.source}: is {plan.system}, and holds no model")
    if options.name:
        needed = {need for model in models for need in model.needs}
        named = [model for model in models if model.name not in needed]
        if len(named) != 1:
            raise ConversionFailed(
                f"--name {options.name} is for one model, and {options.source} holds {len(models)}; take one with "
                f"--only NAME: {', '.join(model.name for model in models)}"
            )
        models = tuple(_renamed(model, options.name) if model is named[0] else model for model in models)
    doubles = {model.name for model in models if [each.name for each in models].count(model.name) > 1}
    if doubles:
        raise ConversionFailed(f"{options.source}: several models are called {', '.join(sorted(doubles))}; rename one")
    return ImportPlan(plan.system, models, plan.notes)


def _inside(model: PlannedModel, roots: Sequence[Path]) -> PlannedModel:
    """The model; refused where the child that read the source names another file of this machine."""
    real = [root.resolve() for root in roots]
    real += [root.parent for root in real if root.is_file()]
    for piece in model.pieces:
        found = Path(piece.source).resolve() if piece.source else real[0]
        if not any(found.is_relative_to(root) for root in real):
            reason = f"{piece.source}: leads out of the source; copy the files themselves into it (cp -rL)"
            return refusal(model.name, model.was, reason)
    return model


def _with_needs(models: Sequence[PlannedModel], names: Sequence[str]) -> tuple[PlannedModel, ...]:
    """The models of these names, and those that they call."""
    wanted = set(names)
    while more := {need for model in models if model.name in wanted for need in model.needs} - wanted:
        wanted |= more
    return tuple(model for model in models if model.name in wanted)


def _renamed(model: PlannedModel, name: str) -> PlannedModel:
    if not is_model_name(name):
        raise ConversionFailed(f"--name {name!r} is not a model name; wanted {NAME_RULE}")
    values = {field: getattr(model, field) for field in model.__struct_fields__}
    return PlannedModel(**{**values, "name": name})


def _in_order(models: Sequence[PlannedModel]) -> Iterator[PlannedModel]:
    """Yield models after those that they call; those of a circle as they come, since loading names a circle."""
    left = {model.name: model for model in models}
    while left:
        free = [model for model in left.values() if not any(need in left for need in model.needs)]
        for model in free or list(left.values()):
            del left[model.name]
            yield model


# ---- private: one model ----------------------------------------------------------------------------------------------


def _taken(
    model: PlannedModel,
    options: ImportOptions,
    models_folder: Path,
    work: Path,
    done: dict[str, ImportedModel],
    *,
    show: Show | None,
) -> ImportedModel:
    """Make a model, and give it its name. A failure is reported, not raised."""
    files: tuple[str, ...] = tuple(piece.place for piece in model.pieces)
    try:
        if model.refused:
            raise ConversionFailed(model.refused)
        target = _target(model, models_folder, may_replace=options.replace)
        _check_needs(model, models_folder, done)
        _check_places(model)
        conversions: tuple[Report, ...] = ()
        notes: tuple[str, ...] = ()
        if not options.is_dry:
            with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as made:
                staged = Path(made) / model.name
                staged.mkdir()
                conversions = tuple(_made(model, staged, options, show))
                notes = _checked(model, staged)
                files = tuple(_synced(staged))
                _placed(staged, target)
    except (ConversionFailed, OSError) as error:
        reason = error.message if isinstance(error, ConversionFailed) else _words(error, model, models_folder)
        return ImportedModel(
            name=model.name, was=model.was, state="refused", notes=model.notes, remarks=model.remarks, reason=reason
        )
    return ImportedModel(
        name=model.name,
        was=model.was,
        state="planned" if options.is_dry else "taken",
        folder="" if options.is_dry else str(target),
        files=files,
        conversions=conversions,
        notes=(*model.notes, *notes),
        remarks=model.remarks,
    )


def _target(model: PlannedModel, models_folder: Path, *, may_replace: bool) -> Path:
    """The folder that the model will be. Raises ConversionFailed: no name for one, or it is there already."""
    if not is_model_name(model.name):
        raise ConversionFailed(f"{model.name[:80]!r} is not a model name; wanted {NAME_RULE}; give one with --name")
    target = models_folder / model.name
    known = scan(models_folder).models.get(model.name)
    if known is not None and known.path != target:
        raise ConversionFailed(f"{model.name}: is there already, as a file of {models_folder}; move it away first")
    if os.path.lexists(target) and not may_replace:
        raise ConversionFailed(f"{target} is there already; replace it with --replace, or take this under --name NAME")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConversionFailed(f"{target} is not a folder of its own; remove it first")
    return target


def _check_needs(model: PlannedModel, models_folder: Path, done: dict[str, ImportedModel]) -> None:
    there = scan(models_folder).models if model.needs else {}
    for need in model.needs:
        found = done.get(need)
        if (found is None or found.state == "refused") and need not in there:
            why = f"was not imported: {found.reason}" if found is not None else "is not in the source"
            raise ConversionFailed(f"{model.name}: calls {need}, which {why}")


def _check_places(model: PlannedModel) -> None:
    """Raise ConversionFailed unless each piece has a place of its own in the model's folder."""
    places = [piece.place for piece in model.pieces]
    for place in places:
        path = PurePosixPath(place)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in place:
            raise ConversionFailed(f"{model.name}: {place[:80]!r} leads out of the model's folder")
        if places.count(place) > 1:
            raise ConversionFailed(f"{model.name}: two files would be {place}; keep one of them")
    if not places:
        raise ConversionFailed(f"{model.name}: holds no file that could be taken")


def _made(model: PlannedModel, staged: Path, options: ImportOptions, show: Show | None) -> Iterator[Report]:
    """Put each piece into its place; yields the report of each conversion. Raises ConversionFailed, OSError."""
    for piece in model.pieces:
        place = staged / piece.place
        place.parent.mkdir(parents=True, exist_ok=True)
        if piece.target:
            yield _converted(model, piece, place, options, show)
            continue
        if show is not None:
            show(f"{model.name}: {'copying' if piece.source else 'writing'} {piece.place}", None)
        if piece.source:
            _copy(Path(piece.source), place)
        else:
            place.write_text(piece.text, encoding="utf-8")


def _converted(model: PlannedModel, piece: Piece, place: Path, options: ImportOptions, show: Show | None) -> Report:
    """Convert one piece. Raises ConversionFailed: among others, too far from its source."""

    def tell(stage: str, share: float | None = None) -> None:
        if show is not None:
            show(f"{model.name}: {stage}", share)

    assert piece.target
    report = convert(
        ConversionOptions(
            source=piece.source,
            target=piece.target,
            output=str(place),
            shapes=options.shapes or piece.shapes,
            tolerance=options.tolerance,
            accepts_unjudged=True,  # a source brings no data: the report says what made-up ones could not judge
            timeout_s=options.timeout_s,
        ),
        tell,
    )
    if not report.is_near_enough:
        raise ConversionFailed(
            f"{piece.source}: was converted, and answers otherwise than its source: {'; '.join(report.faults)}; "
            "--tolerance X allows more"
        )
    if piece.inputs or piece.outputs:
        set_interface(place, piece.inputs, piece.outputs)
    return report


def _checked(model: PlannedModel, staged: Path) -> tuple[str, ...]:
    """Return the daemon's notes on the model as it lies there. Raises ConversionFailed: its settings are wrong."""
    found = scan(None, named={model.name: staged})
    folder = found.models.get(model.name)
    if folder is not None and folder.settings_error is not None:
        raise ConversionFailed(f"{model.name}: {folder.settings_error.replace(str(staged), model.name)}")
    return tuple(f"{problem.path.relative_to(staged)}: {problem.reason}" for problem in found.problems)


# ---- private: the disk -----------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder of plain files, links followed: the reader saw that they stay inside.

    Raises OSError, ConversionFailed: too many files, or one that is none.
    """
    if not source.is_dir():
        _copy_file(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    count = 0
    root = source.resolve()
    for folder, names, files in os.walk(root):
        below = Path(folder).relative_to(root)
        names[:] = sorted(name for name in names if not is_ignored(name))
        if len(below.parts) > MAX_DEPTH:
            raise ConversionFailed(f"{source}: has more than {MAX_DEPTH} folders in one another")
        for name in sorted(files):
            count += 1
            if count > MAX_VERSION_FILES:
                raise ConversionFailed(f"{source}: holds more than {MAX_VERSION_FILES} files; is it the right folder?")
            if is_ignored(name):
                continue
            if not (Path(folder) / name).resolve().is_relative_to(root):
                raise ConversionFailed(f"{Path(folder) / name}: is a link that leads out of its folder; copy the file")
            _copy_file(Path(folder) / name, target / below / name)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise ConversionFailed(f"{source}: is not a plain file")
        with target.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)


def _synced(staged: Path) -> Iterator[str]:
    """Make all files durable; yields their names below the model's folder. Raises OSError."""
    for folder, names, files in os.walk(staged):
        names.sort()
        Path(folder).chmod(0o755)
        for name in sorted(files):
            path = Path(folder) / name
            path.chmod(0o644)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield str(path.relative_to(staged))
        sync_folder(Path(folder))


def _placed(staged: Path, target: Path) -> None:
    """Give the staged folder its name; one that has it goes away with the work folder. Raises OSError."""
    if target.exists():
        _swap(staged, target)
    else:
        staged.rename(target)
    sync_folder(target.parent)


def _swap(one: Path, other: Path) -> None:
    """Swap two folders in one step, so that a killed import leaves the old model or the new. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _BOTH)
    if done == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(other))
    old = one.with_name("old")  # a disk that cannot do that, such as NFS
    other.rename(old)
    try:
        one.rename(other)
    except OSError:
        old.rename(other)
        raise


def _words(error: OSError, model: PlannedModel, models_folder: Path) -> str:
    advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "look at its permissions"
    place = error.filename or models_folder
    return f"{model.name}: {place}: {error.strerror}; {advice}; nothing of the model was written"
