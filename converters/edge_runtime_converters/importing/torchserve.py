"""TorchServe's model archives (`.mar`), and the model stores that hold them with a `config.properties`.

Owns: what a manifest, a handler and their settings become. A picture classifier becomes a model with declared steps;
any other handler runs as a Python model, beside a network of its own where the weights are a form that is served.
Handlers are read as text, and never run here; no pickle is opened.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field

from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.models import kinds
from edge_runtime.torchserve.handlers import BUILT_IN, DEVIATION, MEAN, PICTURE_SIDE, SHORTER_SIDE
from edge_runtime.torchserve.model import ARCHIVE_FOLDER, MANIFEST_FILE, MODEL_TEXT, SETTINGS_FILE
from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.plan import (
    ImportPlan,
    Piece,
    PlannedModel,
    labels_text,
    model_name,
    refusal,
    settings_piece,
)
from edge_runtime_converters.importing.source_folder import MAX_ENTRIES, SourceFolder
from edge_runtime_converters.importing.torchserve_workflows import planned_workflow
from edge_runtime_converters.libraries import reason_of
from edge_runtime_converters.options import parse_shapes

ARCHIVE, STORE = "a TorchServe model archive", "a TorchServe model store"
WORKFLOW = "a TorchServe workflow"
SYSTEM = "TorchServe"

PROPERTIES_FILE = "config.properties"
STORE_FOLDERS = ("model-store", "model_store")
NAMES_FILE, LABELS_FILE = "index_to_name.json", "labels.txt"
MAX_CLASSES = 100_000
MAX_PROGRAM_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 1 << 20
MAX_NOTES = 100
"""Keys of `config.properties` that are reported; it has some seventy."""

PICTURE_SHAPE = f"-1,3,{PICTURE_SIDE},{PICTURE_SIDE}"
"""The shape that TorchServe's handlers of pictures give any picture."""

_MAR, _WAR, _TAR = ".mar", ".war", (".tar.gz", ".tgz")
_LINE = re.compile(r"\s*([^=:\s]+)\s*[=:]?\s*(.*)", re.DOTALL)

_BATCH_KEYS = ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers", "responseTimeout")
"""Of `config.properties`, by model and version, and of a model's YAML: they become `model.toml`."""

_ADVICE: Mapping[str, str] = {
    "inference_address": "say serve --http ADDRESS --torchserve",
    "management_address": "say serve --http-control ADDRESS, or --allow-control",
    "metrics_address": "say serve --metrics PORT",
    "grpc_inference_port": "say serve --grpc ADDRESS (the Open Inference Protocol)",
    "private_key_file": "say [http] cert_file and key_file",
    "certificate_file": "say [http] cert_file and key_file",
    "keystore": "say [http] cert_file and key_file (PEM)",
    "cors_allowed_origin": "say [http] allowed_origins",
    "disable_token_authorization": "say [http] tokens_file; edge-runtime token makes tokens",
    "enable_model_api": "say --allow-control",
    "max_request_size": "say [http] max_body_bytes",
    "install_py_dep_per_model": "nothing is installed here; install what handlers import beside the daemon",
    "number_of_gpu": "the device profile says what runs where",
    "default_workers_per_model": "the device profile says how many runs are on at once",
    "allowed_urls": "say [http] torchserve_hosts",
}
_READ_KEYS = ("models", "model_snapshot", "load_models", "model_store", "default_response_timeout", "job_queue_size")


class ArchivedModel(Struct, frozen=True, rename="camel"):
    """The model of a manifest, as torch-model-archiver writes it."""

    model_name: str
    handler: str = "base_handler"
    serialized_file: str = ""
    model_file: str = ""
    model_version: str = "1.0"
    requirements_file: str = ""
    config_file: str = ""
    extensions: dict[str, Any] = field(default_factory=dict)


class ArchiveManifest(Struct, frozen=True):
    """`MAR-INF/MANIFEST.json`."""

    model: ArchivedModel
    runtime: str = "python"


class Network(NamedTuple):
    """The served model that an archive's weights become. inputs: as the handler gives them, by place."""

    pieces: tuple[Piece, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class ArchivedVersion(NamedTuple):
    """One archive, as a version of its model. network: of the handler, None where it has none of its own."""

    name: str
    text: str
    settings: Mapping[str, Any]
    pieces: tuple[Piece, ...]
    network: Network | None
    remarks: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


class HandlerFile(NamedTuple):
    """A handler's file, read as text. loads_by_base: BaseHandler loads its network.

    methods: those that it defines, of its class or of the module. imports: modules that are neither Python's, nor
    TorchServe's, nor the archive's.
    """

    methods: tuple[str, ...]
    loads_by_base: bool
    imports: tuple[str, ...]


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models of an archive or a store; None: it is neither."""
    if source.file is not None and source.file.name != PROPERTIES_FILE:
        if source.file.name.endswith(_WAR):
            archives = [path for path in source.files() if path.name.endswith(_MAR)]
            return _planned(source, WORKFLOW, archives, {}, [source.file])
        if not _is_archive(source.file):
            return None
        return _planned(source, ARCHIVE, [source.file], _properties(source, source.root / PROPERTIES_FILE))
    if (source.root / MANIFEST_FILE).is_file():
        return _planned(source, ARCHIVE, [source.root], {})
    properties = _properties(source, source.root / PROPERTIES_FILE) or _properties(
        source, source.root / "config" / PROPERTIES_FILE
    )
    for folder in _store_folders(source, properties):
        archives = [path for path in source.files(folder) if path.name.endswith(_MAR)]
        archives += [path for path in source.folders(folder) if (path / MANIFEST_FILE).is_file()]
        workflows = [path for path in source.files(folder) if path.name.endswith(_WAR)]
        if archives or workflows:
            return _planned(source, STORE, archives, properties, workflows)
    return None


# ---- private: a store -----------------------------------------------------------------------------------------------


def _is_archive(path: Path) -> bool:
    if path.name.endswith(_MAR):
        return True
    if not path.name.endswith(_TAR):
        return False
    try:
        with tarfile.open(path, "r|*") as opened:
            for count, member in enumerate(opened):
                if count > MAX_ENTRIES:
                    return False
                if member.name.endswith(MANIFEST_FILE):
                    return True
    except (tarfile.TarError, OSError, EOFError, ValueError):
        return False
    return False


def _store_folders(source: SourceFolder, properties: Mapping[str, str]) -> list[Path]:
    """Where a store's archives may lie: where it says, if that is inside the source, else where they usually lie."""
    named = Path(properties.get("model_store", "")).name
    found = [source.root, *(source.root / name for name in (named, *STORE_FOLDERS) if name)]
    return [path for path in found if path.is_dir() and source.holds(path)]


def _properties(source: SourceFolder, path: Path) -> dict[str, str]:
    """Read `config.properties`; empty where there is none. Raises ConversionFailed."""
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    text = re.sub(r"\\\r?\n[ \t]*", "", source.text(path, MAX_MANIFEST_BYTES))
    for line in text.splitlines():
        if line.strip() and line.lstrip()[0] not in "#!":
            match = _LINE.fullmatch(line)
            if match is not None:
                found[match[1]] = match[2].strip()
    return found


def _planned(
    source: SourceFolder,
    system: str,
    archives: Sequence[Path],
    properties: Mapping[str, str],
    workflows: Sequence[Path] = (),
) -> ImportPlan:
    handlers: dict[str, str] = {}
    names, settings = _listed(properties)
    versions: list[ArchivedVersion] = []
    models: list[PlannedModel] = []
    for archive in archives:
        if names is not None and archive.name not in names and archive.stem not in names:
            continue
        was = f"{archive.name} of {SYSTEM}"
        try:
            renamed = (names or {}).get(archive.name, "") or (names or {}).get(archive.stem, "")
            version = _version(source, archive, renamed, settings.get(archive.name, {}), properties)
            versions.append(version)
            if any(piece.place.endswith(SETTINGS_FILE) for piece in version.pieces):
                handlers[archive.name] = version.name
        except ConversionFailed as error:
            models.append(refusal(_fallback_name(archive), was, error.message))
    for name in dict.fromkeys(each.name for each in versions):
        models += _models(name, [each for each in versions if each.name == name])
    for workflow in workflows:
        try:
            models.append(planned_workflow(_opened(source, workflow), handlers))
        except ConversionFailed as error:
            models.append(refusal(_fallback_name(workflow), f"{workflow.name} of {SYSTEM}", error.message))
    return ImportPlan(system, tuple(models), tuple(_notes(properties, names, archives)))


def _fallback_name(archive: Path) -> str:
    try:
        return model_name(archive.name.removesuffix(_MAR).removesuffix(_WAR))
    except ConversionFailed:
        return "archive"


def _listed(properties: Mapping[str, str]) -> tuple[dict[str, str] | None, dict[str, dict[str, Any]]]:
    """Names by archive that a store loads, None for all as they are; and what it sets, by archive.

    Raises ConversionFailed.
    """
    snapshot = _json_property(properties, "model_snapshot").get("models")
    models = snapshot if isinstance(snapshot, dict) else _json_property(properties, "models")
    settings: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for name, versions in models.items():
        for each in versions.values() if isinstance(versions, dict) else ():
            if isinstance(each, dict) and isinstance(each.get("marName"), str):
                settings[each["marName"]] = each
                names[each["marName"]] = name
    load = properties.get("load_models", "").strip()
    if load and load not in ("all", "standalone", "none"):
        for word in load.split(","):
            name, equals, archive = (part.strip() for part in word.partition("="))
            names[Path(archive if equals else name).name] = name if equals else ""
        return names, settings
    return (names or None) if load != "all" else None, settings


def _json_property(properties: Mapping[str, str], key: str) -> dict[str, Any]:
    text = properties.get(key, "")
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConversionFailed(f"{PROPERTIES_FILE}: {key}: {reason_of(error)}; wanted JSON") from error
    return found if isinstance(found, dict) else {}


def _notes(properties: Mapping[str, str], names: Mapping[str, str] | None, archives: Sequence[Path]) -> Iterator[str]:
    for key in list(properties)[:MAX_NOTES]:
        if key in _ADVICE:
            yield f"{PROPERTIES_FILE}: {key}: {_ADVICE[key]}"
        elif key not in _READ_KEYS:
            yield f"{PROPERTIES_FILE}: {key} has no meaning here"
    left = [each.name for each in archives if names is not None and each.name not in names and each.stem not in names]
    if left:
        yield f"not loaded by {PROPERTIES_FILE}, and left out: {', '.join(left[:20])}"


# ---- private: one model ---------------------------------------------------------------------------------------------


def _models(name: str, versions: Sequence[ArchivedVersion]) -> Iterator[PlannedModel]:
    """One model of all its versions, and its network."""
    ordered = sorted(versions, key=lambda each: _order(each.text))
    numbers = _numbers([each.text for each in ordered])
    network_name = _network_name(name)
    main: list[Piece] = []
    network: list[Piece] = []
    notes: list[str] = []
    for version, number in zip(ordered, numbers, strict=True):
        if version.text not in (str(number), f"{number}.0"):
            notes.append(f"version {version.text} is version {number} here: clients that name it say {number}")
        main += [_at(piece, number, network_name) for piece in version.pieces]
        if version.network is not None:
            network += [_at(piece, number, network_name) for piece in version.network.pieces]
    newest = ordered[-1]
    settings = {**newest.settings, **({"versions": {"all": True}} if len(ordered) > 1 else {})}
    notes += [note for version in ordered for note in version.notes]
    if network:
        yield PlannedModel(
            name=network_name,
            was=f"the weights of {name}",
            pieces=tuple(network),
            notes=(f"{name} calls it; clients may too",),
        )
    yield PlannedModel(
        name=name,
        was=f"{SYSTEM} archive of {name}",
        pieces=(*settings_piece(settings, SYSTEM), *_once(main)),
        needs=(network_name,) if network else (),
        notes=tuple(dict.fromkeys(notes)),
        remarks=newest.remarks,
    )


def _network_name(name: str) -> str:
    return model_name(f"{name[:55]}.network")


def _order(text: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in re.findall(r"[0-9]+", text)) or (0,)


def _numbers(texts: Sequence[str]) -> list[int]:
    """Version numbers: those of the texts where all are whole, else 1, 2, …, by their order."""
    whole = [re.fullmatch(r"([1-9][0-9]{0,8})(?:\.0)*", text) for text in texts]
    numbers = [int(found[1]) for found in whole if found is not None]
    if len(numbers) == len(texts) and len(set(numbers)) == len(texts):
        return numbers
    return list(range(1, len(texts) + 1))


def _at(piece: Piece, number: int, network_name: str) -> Piece:
    """A piece in the folder of its version; settings with the name and version of the network."""
    text = piece.text
    if piece.place.endswith(SETTINGS_FILE) and '"network": {' in text:
        said = json.loads(text)
        said["network"] |= {"model": network_name, "version": number}
        text = json.dumps(said, indent=1)
    place = piece.place.replace("VERSION/", f"{number}/", 1)
    return msgspec.structs.replace(piece, place=place, text=text)


def _once(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Each place once: labels lie in a version's folder, so only equal pieces meet."""
    return tuple({piece.place: piece for piece in pieces}.values())


# ---- private: one archive -------------------------------------------------------------------------------------------


def _version(
    source: SourceFolder, archive: Path, renamed: str, stored: Mapping[str, Any], properties: Mapping[str, str]
) -> ArchivedVersion:
    """Plan one archive. Raises ConversionFailed."""
    opened = source if archive == source.root else _opened(source, archive)
    manifest_path = opened.root / MANIFEST_FILE
    if not manifest_path.is_file():
        raise ConversionFailed(f"{archive.name}: holds no {MANIFEST_FILE}; make it with torch-model-archiver")
    opened.bytes(manifest_path, MAX_MANIFEST_BYTES)
    manifest = opened.json_as(manifest_path, ArchiveManifest)
    model = manifest.model
    if manifest.runtime.lower() not in {"python", "python3"}:
        raise ConversionFailed(f"{archive.name}: runtime {manifest.runtime[:40]!r}; wanted python")
    yaml = _yaml(opened, model)
    batching = {key: value for key, value in (*yaml.items(), *stored.items()) if key in _BATCH_KEYS}
    settings, notes = _settings(batching, properties)
    stem = Path(model.handler.partition(":")[0]).name.removesuffix(".py")
    is_built_in = stem in BUILT_IN and not (opened.root / f"{stem}.py").exists()
    network = _network(opened, model, stem if is_built_in else "")
    name = model_name(renamed or model.model_name)
    if is_built_in and network is not None and stem in {"image_classifier", "image_segmenter"}:
        declared = _declared(opened, stem, network)
        if declared is not None:
            pieces, steps, remarks = declared
            if "instances" in settings:
                said = f"minWorkers {settings['instances']}: `instances` in model.toml"
                notes.append(f"{said}; as many runs are on at once where the cores allow it")
            left = [key for key in yaml if key not in _BATCH_KEYS]
            if left:
                notes.append(f"{model.config_file}: {', '.join(left[:20])}: no meaning here")
            return ArchivedVersion(
                name, model.model_version, {**settings, **steps}, pieces, None, remarks, tuple(notes)
            )
    return _hosted(opened, archive, model, stem, is_built_in, network, yaml, batching, settings, notes, name)


def _opened(source: SourceFolder, archive: Path) -> SourceFolder:
    """An archive's files. Raises ConversionFailed."""
    if archive.is_dir():
        return SourceFolder(archive.resolve(), source.work, shapes=source.shapes)
    if archive.name.endswith((_MAR, _WAR)) and not zipfile.is_zipfile(archive):
        raise ConversionFailed(f"{archive.name}: is not an archive (.mar and .war are zips); copy it again")
    opened = source.unpack(archive)
    if (opened.root / MANIFEST_FILE).is_file():
        return opened
    inner = [path for path in opened.folders() if (path / MANIFEST_FILE).is_file()]
    return SourceFolder(inner[0], source.work, shapes=source.shapes) if len(inner) == 1 else opened


def _yaml(opened: SourceFolder, model: ArchivedModel) -> dict[str, Any]:
    """A model's own settings; empty where it has none. Raises ConversionFailed."""
    if not model.config_file:
        return {}
    found: dict[str, Any] = opened.yaml_as(opened.inside(model.config_file), dict[str, Any] | None) or {}
    return found


def _settings(batching: Mapping[str, Any], properties: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """`model.toml` of TorchServe's settings, and what has no meaning here. Raises ConversionFailed."""
    settings: dict[str, Any] = {}
    rows = _whole(batching, "batchSize", 1)
    if rows > 1:
        settings |= {"max_batch_rows": rows, "max_queue_delay_ms": float(_whole(batching, "maxBatchDelay", 100))}
    seconds = batching.get("responseTimeout") or properties.get("default_response_timeout")
    if seconds is not None:
        settings["default_timeout_ms"] = 1e3 * _whole({"responseTimeout": _number_of(seconds)}, "responseTimeout", 120)
    queued = _number_of(properties.get("job_queue_size", 0))
    if isinstance(queued, int) and queued > 0:
        settings["max_queue_rows"] = queued
    workers = _whole(batching, "minWorkers", 1)
    if workers > 1:
        settings["instances"] = workers
    notes = []
    if _whole(batching, "maxWorkers", max(workers, 1)) > max(workers, 1):
        notes.append(f"maxWorkers {batching['maxWorkers']}: has no meaning here, nothing is scaled by load")
    return settings, notes


def _number_of(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _whole(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000_000:
        raise ConversionFailed(f"{key}: got {str(value)[:60]!r}, wanted a whole number")
    return value


# ---- private: weights -----------------------------------------------------------------------------------------------


def _network(opened: SourceFolder, model: ArchivedModel, built_in: str) -> Network | None:
    """The served model that the weights become; None where they stay as they are. Raises ConversionFailed."""
    if not model.serialized_file or model.model_file:
        return None
    path = opened.inside(model.serialized_file)
    kind = kinds.kind_of(path)
    shapes = opened.shapes
    if kind is kinds.ONNX:
        try:
            spec = declared_interface(path)
        except LoadFailed as error:
            raise ConversionFailed(f"{model.serialized_file}: {error.message}") from error
        return Network(artifact_pieces(opened, path, "VERSION"), spec.inputs, spec.outputs)
    if kind is kinds.PYTORCH_PROGRAM:
        inputs = _program_inputs(path)
    elif kind is kinds.TORCHSCRIPT and (shapes or built_in == "image_classifier"):
        shapes = shapes or (f"image={PICTURE_SHAPE}",)
        inputs = tuple(parse_shapes(shapes).values())
    else:
        return None
    if inputs is None:
        return None
    # As the converters name a single output.
    outputs = (TensorSpec("output", "FP32", (DYNAMIC, DYNAMIC)),) if built_in == "image_classifier" else ()
    return Network(artifact_pieces(opened, path, "VERSION", shapes), inputs, outputs)


def _program_inputs(path: Path) -> tuple[TensorSpec, ...] | None:
    """The inputs of an exported program (.pt2), by its own description; None where it says none."""
    try:
        with zipfile.ZipFile(path) as opened:
            member = next((each for each in opened.infolist() if each.filename.endswith("models/model.json")), None)
            if member is None or member.file_size > MAX_PROGRAM_BYTES:
                return None
            with opened.open(member) as content:
                graph = msgspec.json.decode(content.read(MAX_PROGRAM_BYTES))["graph_module"]
        found = []
        for each in graph["signature"]["input_specs"]:
            if "user_input" in each:
                name = each["user_input"]["arg"]["as_tensor"]["name"]
                rank = len(graph["graph"]["tensor_values"][name]["sizes"])
                sizes = [size.get("as_int", DYNAMIC) for size in graph["graph"]["tensor_values"][name]["sizes"]]
                found.append(TensorSpec(str(name), "FP32", tuple(int(size) for size in sizes[:rank])))
    except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError, zipfile.BadZipFile,
            msgspec.MsgspecError, NotImplementedError, RuntimeError):  # fmt: skip
        return None
    return tuple(found) or None


# ---- private: declared steps ----------------------------------------------------------------------------------------


def _declared(
    opened: SourceFolder, handler: str, network: Network
) -> tuple[tuple[Piece, ...], dict[str, Any], tuple[tuple[str, str], ...]] | None:
    """A network of pictures with its handler as declared steps: pieces, settings and notes; None: none fits."""
    if len(network.inputs) != 1:
        return None
    (given,) = network.inputs
    if given.datatype != "FP32" or len(given.shape) != 4 or given.shape[1] not in (3, DYNAMIC):
        return None
    rank = 2 if handler == "image_classifier" else 4
    output = next((each for each in network.outputs if each.name == "out"), None) or (
        network.outputs[0] if len(network.outputs) == 1 else None
    )
    if output is None or len(output.shape) != rank:
        return None
    steps: dict[str, Any] = {
        "from": "picture",
        "fit": "crop",
        "shorter_side": SHORTER_SIDE,
        "mean": [round(255 * each, 3) for each in MEAN],
        "scale": [round(1 / (255 * each), 9) for each in DEVIATION],
    }
    if DYNAMIC in given.shape[2:]:
        steps["size"] = [PICTURE_SIDE, PICTURE_SIDE]
    labels = _labels(opened)
    answer: dict[str, Any] = {"answer": "mask"}
    if handler == "image_classifier":
        answer = {"answer": "classes", "softmax": True, "top_k": 5}
        if labels:
            answer["labels"] = LABELS_FILE
    pieces = network.pieces
    if labels and handler == "image_classifier":
        pieces = (*pieces, Piece(place=f"VERSION/{LABELS_FILE}", text=labels_text(labels)))
    said = f"{SHORTER_SIDE} scaled, {PICTURE_SIDE} cut out, normalised: [input.{given.name}] of model.toml"
    remarks = [("preprocess", said), ("inference", "the network itself")]
    if handler == "image_classifier":
        remarks.append(("postprocess", f"softmax, best 5: [output.{output.name}] of model.toml"))
        named = f"{len(labels)} labels" if labels else "is not there: classes are told by number"
        remarks.append((NAMES_FILE, named))
    else:
        remarks.append(("postprocess", f"class of each pixel: [output.{output.name}]; probabilities on /predictions"))
    return pieces, {"input": {given.name: steps}, "output": {output.name: answer}}, tuple(remarks)


def _labels(opened: SourceFolder) -> list[str]:
    """Names of classes, by number; empty without. Raises ConversionFailed."""
    path = opened.root / NAMES_FILE
    if not path.is_file():
        return []
    mapping = opened.json_as(path, dict[str, Any])
    listed = mapping.get("object_type_names")
    if isinstance(listed, list):
        return [str(each) for each in listed[:MAX_CLASSES]]
    named: dict[int, str] = {}
    for key, value in mapping.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 6 and int(key) < MAX_CLASSES):
            raise ConversionFailed(f"{NAMES_FILE}: got the class {key[:40]!r}, wanted a number below {MAX_CLASSES}")
        named[int(key)] = str(value[-1] if isinstance(value, list) and value else value)
    return [named.get(number, str(number)) for number in range(max(named, default=-1) + 1)]


# ---- private: a handler in a host -----------------------------------------------------------------------------------


def _hosted(  # noqa: PLR0917 (one archive, and all that was read of it)
    opened: SourceFolder,
    archive: Path,
    model: ArchivedModel,
    stem: str,
    is_built_in: bool,
    network: Network | None,
    yaml: Mapping[str, Any],
    batching: Mapping[str, Any],
    settings: dict[str, Any],
    notes: list[str],
    name: str,
) -> ArchivedVersion:
    """A handler that runs as a Python model."""
    handler = None if is_built_in else _handler(opened, stem)
    if handler is not None and not handler.loads_by_base:
        network = None  # it loads its weights itself
    files = _files(opened)
    if network is not None and (is_built_in or (handler is not None and "initialize" not in handler.methods)):
        files = [path for path in files if path.relative_to(opened.root) != Path(model.serialized_file)]
    said = {
        "model_name": name,
        "batch_size": _whole(batching, "batchSize", 1),
        "model_yaml_config": json.loads(json.dumps(yaml, default=str)),
    }
    if network is not None:
        inputs = [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in network.inputs]
        said["network"] = {"inputs": inputs}
    pieces = [
        Piece(place="VERSION/model.py", text=MODEL_TEXT.format(handler=_plain(stem), source=_plain(archive.name))),
        Piece(place=f"VERSION/{SETTINGS_FILE}", text=json.dumps(said, indent=1)),
        *(Piece(place=f"VERSION/{ARCHIVE_FOLDER}/{path.relative_to(opened.root)}", source=str(path)) for path in files),
    ]
    workers = settings.pop("instances", 1)
    if workers > 1:
        notes.append(f"minWorkers {workers}: a handler has one process, with one run at a time; it took 1")
    settings = {"max_batch_rows": 1, **settings, "batch": True, "warmup": {"runs": 0}}
    remarks = [*_told_methods(model, stem, handler, network, _network_name(name))]
    if handler is not None and handler.imports:
        notes.append(f"imports {', '.join(handler.imports)}: install them beside the daemon")
    if model.requirements_file:
        remarks.append((model.requirements_file, "is not installed here: pip install -r it beside the daemon"))
    notes.append("it is Python code: it runs where python_models = true (serve --python-models)")
    return ArchivedVersion(name, model.model_version, settings, tuple(pieces), network, tuple(remarks), tuple(notes))


def _plain(name: str) -> str:
    """A name for the text of `model.py`, where a quote would end it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _files(opened: SourceFolder) -> list[Path]:
    found: list[Path] = []
    waiting = [opened.root]
    while waiting:
        folder = waiting.pop()
        for path in opened.entries(folder):
            if not opened.holds(path):
                raise ConversionFailed(f"{path.name}: leads out of the archive; nothing of it was taken")
            if path.is_dir():
                waiting += [path] if path.name != "__pycache__" else []
            elif path.suffix != ".pyc":
                found.append(path)
            if len(found) + len(waiting) > MAX_ENTRIES:
                raise ConversionFailed(f"{opened.root}: more than {MAX_ENTRIES} files, or links that lead in a circle")
    return sorted(found)


def _handler(opened: SourceFolder, stem: str) -> HandlerFile:
    """Read a handler's file. Raises ConversionFailed: it is not there, or no Python 3."""
    path = opened.root / f"{stem}.py"
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        raise ConversionFailed(f"handler {stem[:80]!r}: is not in the archive, nor one of TorchServe's: {known}")
    try:
        tree = ast.parse(opened.text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConversionFailed(f"{path.name}: is not Python 3: {reason_of(error)}") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    handlers = [node for node in classes if _bases(node)] or classes
    methods = [each.name for node in handlers for each in node.body if isinstance(each, ast.FunctionDef)]
    own = {each.stem for each in opened.files() if each.suffix == ".py"} | {each.name for each in opened.folders()}
    imports = sorted(_imported(tree) - own - set(sys.stdlib_module_names) - {"ts", "numpy"})
    loads_by_base = "handle" not in functions and any(_loads_by_base(node) for node in handlers)
    return HandlerFile(tuple(dict.fromkeys([*methods, *functions])), loads_by_base, tuple(imports))


def _bases(node: ast.ClassDef) -> list[str]:
    names = [
        base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        for base in node.bases
    ]
    return [name for name in names if name not in {"", "object", "ABC"}]


def _loads_by_base(node: ast.ClassDef) -> bool:
    """Whether a class leaves loading to the handler that it extends."""
    if not _bases(node):
        return False
    own = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "initialize"), None)
    if own is None:
        return True
    calls = (each.func for each in ast.walk(own) if isinstance(each, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr == "initialize" for call in calls)


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _told_methods(
    model: ArchivedModel, stem: str, handler: HandlerFile | None, network: Network | None, network_name: str
) -> Iterator[tuple[str, str]]:
    """Return notes on each method of a handler."""
    own = handler.methods if handler is not None else ()
    weights = model.serialized_file or "no weights"
    kept = f"{weights} stays as it is" + (f", with {model.model_file}" if model.model_file else "")
    loads = f"the network is the served model {network_name}" if network is not None else kept
    who = "TorchServe's own, written anew" if handler is None else "runs as it is in the model's host"
    inherited = "inherited" if handler is not None else who
    for method in ("initialize", "preprocess", "inference", "postprocess", "handle"):
        said = who if method in own else inherited
        if handler is not None and not handler.loads_by_base and method not in own:
            continue
        if method == "initialize":
            said = f"{said}; {loads}"
        elif method == "inference" and network is not None:
            said = f"{said}; self.model asks {network_name}"
        yield method, said
    for method in own:
        if method in {"explain_handle", "get_insights", "describe_handle"}:
            yield method, "is never called: explanations and descriptions are not offered"
    if handler is None or handler.loads_by_base:
        needs = network is None and weights != "no weights"
        if needs:
            yield weights, (
                "needs torch beside the daemon; with --shapes NAME=-1,3,224,224 a TorchScript file becomes a served "
                "model, and so does an .onnx or .pt2 in its place" if not model.model_file else
                f"numbers for {model.model_file}, which needs torch beside the daemon; export the module as .pt2 "
                "(torch.export.save) to have it served without"
            )  # fmt: skip
    elif stem:
        yield weights, "the handler loads it itself, so what it loads it with must be installed beside the daemon"
