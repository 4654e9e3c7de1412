"""The signed description of a release, and the assignments of a group: their form, and the rules inside them.

Owns: `manifest.json` and `assign.json`, written by the publisher and read by devices, and the settings that a release
may bring. Decoding checks everything: a signature does not say that the bytes make sense. Unknown keys are ignored,
since publishers may be newer than devices; `min_runtime` covers what a device must understand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError, UpdateError
from edge_runtime.models.names import is_model_name
from edge_runtime.typed_toml import build
from edge_runtime.updates.release_paths import ReleasePath, parse_release_file, place_of

MAX_MANIFEST_BYTES = 1 << 20
"""A manifest names files and holds no tensors: a few KB, and 100 bytes for each file of external data."""

MAX_ASSIGNMENTS_BYTES = 1 << 20
"""4 000 models in one group."""

PATCH_ALGORITHM = "zstd-prefix"
"""A zstd frame whose prefix (a raw dictionary) is the old file; its window covers the longer of the old and new one."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Bytes = Annotated[int, Meta(ge=0, le=1 << 53)]
Counter = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Percent = Annotated[float, Meta(gt=0, le=100)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Milliseconds = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]

ANY_PROFILE = "*"
"""In bounds: every profile that is not named."""


REFUSED_SETTINGS = {
    "options": "they are in a library's own words, which may name code",
    "device": "a device's profile says it",
    "versions": "a group is assigned one version",
    "convert": "a release carries what was converted, never its source",
}
"""Keys of `model.toml` that a release may not bring, and why."""


class Artifact(Struct, frozen=True):
    """One file of a version.

    path: of the TUF target. backend: which loads it, or whose data it is ("model.bin"); "" for a file that the model's
    host opens beside any graph, such as a tokenizer. precision: of a variant (`model.int8.onnx`) and its data; "" for
    the model itself. A device always fetches the model itself, and a variant where its profile or the release's
    settings ask for that precision. model: of a pipeline's release, the one of its models that the file is of.
    """

    path: str
    sha256: Sha256
    length: Bytes
    backend: str
    precision: str = ""
    model: str = ""

    @property
    def place(self) -> str:
        """Return where the file lies in a release's folder: under its name, or as `models/MODEL/NAME`."""
        return place_of(self.path, self.model)


class TensorForm(Struct, frozen=True):
    """An input or output: its wire datatype and its whole shape, -1 where it is open."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Tolerance(Struct, frozen=True, omit_defaults=True):
    """How far a float may be from the golden one: relative * |golden| + absolute * largest |golden| of its output.

    exact: whether whole numbers and text must be equal. Below f32 they need not: rounding then decides which of two
    near scores is the highest. begins_alike: outputs of text that need not be equal, and begin with the same character
    all the same; an older device does not look at that.
    """

    relative: NotNegative
    absolute: NotNegative
    exact: bool
    begins_alike: tuple[str, ...] = ()


class Golden(Struct, frozen=True):
    """An input with its output. The tensors of `inputs`, then of `outputs`, lie one after another in the file `path`.

    Each as on the wire: little-endian, C order, BYTES with a uint32 length before each element; `lengths` are the
    bytes of each tensor in that order. precision: of the publisher's run. tolerance: by the precision of a device's.
    """

    path: str
    sha256: Sha256
    length: Bytes
    precision: str
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    lengths: tuple[Bytes, ...]
    tolerance: dict[str, Tolerance]


class Delta(Struct, frozen=True):
    """A patch from a file with one hash to an artifact of this release. target, sha256, size: of the patch itself.

    algorithm: PATCH_ALGORITHM; a patch of an unknown one is ignored.
    """

    from_sha256: Sha256
    to_sha256: Sha256
    target: str
    sha256: Sha256
    algorithm: str
    size: Bytes


class StepModel(Struct, frozen=True):
    """A model of a pipeline's release: the pipeline's steps call it by `name`. settings: as in `model.toml`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


class ReleaseBounds(Struct, frozen=True, omit_defaults=True):
    """The bounds that a release must keep on every device, one without a version before it included.

    max_p95_ms: of its run times, by profile; ANY_PROFILE for those that are not named. max_failure_share: of its
    requests. min_agreement: the share of golden rows of scores whose highest one must be the publisher's.
    """

    max_p95_ms: dict[str, Milliseconds] = {}
    max_failure_share: Share | None = None
    min_agreement: Share | None = None

    def max_p95_s(self, profile: str) -> float | None:
        """Return the bound of run times on a profile, in seconds; None: there is none."""
        bound_ms = self.max_p95_ms.get(profile, self.max_p95_ms.get(ANY_PROFILE))
        return None if bound_ms is None else bound_ms / 1e3


class Manifest(Struct, frozen=True, kw_only=True):
    """One release of a model, or of a pipeline with its models.

    settings: as in `model.toml`. profiles: names; none: every profile. pipeline: the text of `pipeline.toml`, "" for a
    model; models: those that its steps ask, and no others. bounds: None for none.
    """

    model: str
    version: Counter
    release_counter: Counter
    min_runtime: str
    profiles: tuple[str, ...] = ()
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    artifacts: Annotated[tuple[Artifact, ...], Meta(min_length=1)]
    golden: Golden
    peak_memory_bytes: Bytes
    delta: tuple[Delta, ...] = ()
    pipeline: str = ""
    models: tuple[StepModel, ...] = ()
    bounds: ReleaseBounds | None = None

    @property
    def min_agreement(self) -> float:
        """Return the bound of its golden rows; 0 for none."""
        return (self.bounds.min_agreement or 0.0) if self.bounds is not None else 0.0


class Assignment(Struct, frozen=True, omit_defaults=True):
    """A release for the devices of a group whose hash falls below `percent`.

    Where several entries of one model include a device, the one with the highest counter counts. going_back_from: the
    highest counter from which devices may go back to this release, which they committed before; 0: none goes back.
    """

    model: str
    manifest_path: str
    manifest_sha256: Sha256
    percent: Percent
    going_back_from: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0

    @property
    def release(self) -> ReleasePath:
        """Return the release that it names. Raises UpdateError: the path is none of a manifest."""
        return parse_release_file(self.manifest_path)[0]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's bytes, which a person can read too. They have no key that only pipelines or bounds need."""
    document = msgspec.to_builtins(manifest)
    if manifest.bounds is None:
        del document["bounds"]
    if not manifest.pipeline:
        del document["pipeline"], document["models"]
        for artifact in document["artifacts"]:
            del artifact["model"]
    return _encode(document)


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Decode the manifest whose TUF target is `path`.

    Raises UpdateError: it is too long or no manifest, is of another release than its path says, or names a file outside
    its own release's folder.
    """
    manifest: Manifest = _decode(data, Manifest, path, MAX_MANIFEST_BYTES)
    release, _ = parse_release_file(path)
    said = (manifest.model, manifest.release_counter)
    if path != release.manifest or said != (release.model, release.counter):
        raise UpdateError(f"{path}: says that it is release {said[1]} of {said[0][:64]!r}; wanted what its path says")
    paths = [*(artifact.path for artifact in manifest.artifacts), *(delta.target for delta in manifest.delta)]
    for named in (*paths, manifest.golden.path):
        if parse_release_file(named)[0] != release:
            raise UpdateError(f"{path}: names {named[:200]!r}, which is not below {release.folder}/")
    _check_models(manifest, path)
    return manifest


def encode_assignments(assignments: Sequence[Assignment]) -> bytes:
    """Return the file's bytes."""
    return _encode(assignments)


def decode_assignments(data: bytes, path: str) -> tuple[Assignment, ...]:
    """Decode a group's assignments. path: for the message. Raises UpdateError: too long, or not of that form."""
    found: tuple[Assignment, ...] = _decode(data, tuple[Assignment, ...], path, MAX_ASSIGNMENTS_BYTES)
    for each in found:
        release = each.release
        if each.manifest_path != release.manifest or each.model != release.model:
            raise UpdateError(f"{path}: names {each.manifest_path[:200]!r} as the manifest of {each.model[:64]!r}")
    return found


def _check_models(manifest: Manifest, path: str) -> None:
    """Raise UpdateError unless a pipeline's models have names and files of their own, and a model's files none."""
    names = [model.name for model in manifest.models]
    if len(set(names)) < len(names) or not all(map(is_model_name, names)) or bool(names) != bool(manifest.pipeline):
        raise UpdateError(f"{path}: has a pipeline with the models {names!r:.200}; wanted each once, and both or none")
    if {artifact.model for artifact in manifest.artifacts} != (set(names) or {""}):
        raise UpdateError(f"{path}: has the models {names!r:.200}, and files of others, or of not all of them")
    for artifact in manifest.artifacts:
        _ = artifact.place


def _encode(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _decode(data: bytes, kind: Any, path: str, limit: int) -> Any:
    if len(data) > limit:
        raise UpdateError(f"{path}: got {len(data)} bytes, wanted at most {limit}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpdateError(f"{path}: is not what it should be: {error}") from error


def read_release_settings(settings: Mapping[str, Any], source: str) -> ModelSettings:
    """Return the settings of a release, typed. source: for the message.

    The publisher checks them for mistakes, the device for a publisher whose key was stolen. Raises ConfigError: a key
    is unknown, has a wrong value, or is one that a release may not bring.
    """
    typed = build(ModelSettings, settings, source)
    for key, why in REFUSED_SETTINGS.items():
        if key in settings:
            raise ConfigError(f"{source}: {key} is not published: {why}; take it out")
    if typed.sequence is not None and any(state.initial is not None for state in typed.sequence.state):
        raise ConfigError(
            f"{source}: initial of [[sequence.state]] is not published: a release has no folder initial_state; have "
            "the graph begin with it, or leave it out for zeros"
        )
    return typed
