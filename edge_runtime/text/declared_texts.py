"""The steps of a text model, whole: its tables, the model's own files beside it, and what a preset adds.

A table `[input.NAME]` says no more than it has to: length, padding, labels and the meaning of outputs come from the
files that Hugging Face's exporters leave beside a model, as far as they are there. Thread: the loader's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge_runtime.answers import kind_of
from edge_runtime.config.settings import ModelSettings
from edge_runtime.durable import open_within
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.labels import read_labels
from edge_runtime.pictures.model_metadata import read_interface
from edge_runtime.steps import ModelSteps, OutputSteps, Preset, says_steps
from edge_runtime.text.hugging_face import TASKS, TextFolder, read_folder
from edge_runtime.text.joined_parts import MOST_LABELS
from edge_runtime.text.text_steps import TextSteps

DEFAULT_INPUT = "text"
"""The name that callers send texts under, where a preset alone declares them."""

DEFAULT_HYPOTHESIS = "This example is {}."
"""That of `transformers`' zero-shot pipeline."""

SENTENCES = ("sentence_embedding", "text_embeds", "pooled")
"""Outputs that exporters give a sentence's own vector under."""

TOKENS = ("token_embeddings", "last_hidden_state")
"""Outputs that they give the vectors of a sentence's tokens under."""

ENTAILS = "entail"
"""The beginning of the label of entailment, in any case; so `transformers` finds it."""


def declared_texts(
    settings: ModelSettings, folder: ModelFolder, version: VersionFolder, artifact: Path
) -> ModelSteps | None:
    """Return the steps of a version, whole; None of one that only its own files declare, where they do not fit it.

    Raises LoadFailed: a file is missing or broken, or a table or preset does not fit.
    """
    tables = {name: each for name, each in settings.input.items() if isinstance(each, TextSteps)}
    places = (version.path, folder.path)
    is_own = settings.preset is not None or any(isinstance(each, TextSteps) for each in folder.settings.input.values())
    if is_own:
        return _declared(settings, tables, places, version, read_interface(artifact))
    spec = read_interface(artifact)
    takes = [each.name for each in spec.inputs] if spec is not None else []
    known = [getattr(table, key) for table in tables.values() for key in ("ids", "mask", "types")]
    if settings.isolation == "never" or not takes or not set(takes) <= set(known):
        return None
    try:
        return _declared(settings, tables, places, version, spec)
    except LoadFailed:
        return None


def _declared(
    settings: ModelSettings,
    tables: Mapping[str, TextSteps],
    places: Sequence[Path],
    version: VersionFolder,
    spec: ModelSpec | None,
) -> ModelSteps:
    """The steps of these tables. places: where files lie. spec: of the model's file, where it can be read."""
    if len(tables) > 1:
        raise LoadFailed(f"texts are declared for {', '.join(tables)}; wanted one table for all that a tokenizer fills")
    found = read_folder(places, version.within)
    name, table = next(iter(tables.items()), (DEFAULT_INPUT, TextSteps()))
    preset = settings.preset or _preset_of(found)
    table = _whole(name, table, preset, found)
    taken = {each: steps for each, steps in settings.output.items() if says_steps(steps)}
    outputs = _outputs(taken, preset, found, spec)
    labels: dict[str, tuple[str, ...]] = {}
    for output, steps in list(outputs.items()):
        if isinstance(steps.labels, tuple):
            labels[output] = steps.labels
            outputs[output] = replace(steps, labels=None)
        elif steps.labels is not None:
            labels[output] = read_labels(steps.labels, places, version.within)
        elif found.labels and kind_of(steps) in ("classes", "tags") and table.hypothesis is None:
            labels[output] = found.labels
    file = _file(table.tokenizer, places, version.within)
    return ModelSteps({name: table}, outputs, labels, preset, files={table.tokenizer: file})


def _preset_of(found: TextFolder) -> Preset | None:
    if found.pool is not None:
        return "sentence-embedding"
    if found.task == "SequenceClassification" and len(found.labels) == 1 and found.problem_type != "regression":
        return "reranking"
    return TASKS.get(found.task)


def _whole(name: str, table: TextSteps, preset: Preset | None, found: TextFolder) -> TextSteps:
    """The table of the input with what files and a preset add. Raises LoadFailed: keys contradict."""
    values: dict[str, Any] = {}
    if table.length is None and found.length is not None:
        values["length"] = found.length
    if table.pad is None and found.pads_with:
        values["pad"] = found.pads_with
    hypothesis = table.hypothesis
    if preset == "zero-shot" and hypothesis is None:
        values["hypothesis"] = hypothesis = DEFAULT_HYPOTHESIS
    if hypothesis is not None and table.entailment is None:
        follows = (number for number, each in enumerate(found.labels) if each.lower().startswith(ENTAILS))
        values["entailment"] = next(follows, None)
    try:
        return replace(table, **values)
    except ValueError as error:
        raise LoadFailed(f"[input.{name}]: {error}") from None


def _outputs(
    taken: Mapping[str, OutputSteps], preset: Preset | None, found: TextFolder, spec: ModelSpec | None
) -> dict[str, OutputSteps]:
    """The tables of outputs: those that are said, or the one that a preset means, with what is known of it."""
    if taken or preset is None:
        return {name: _filled(steps, found) for name, steps in taken.items()}
    tensors = spec.outputs if spec is not None else ()
    if preset == "sentence-embedding":
        return _embedding(found, tensors)
    name = _named(("logits", "scores", "output"), tensors, preset)
    match preset:
        case "token-classification":
            output = OutputSteps("tags", softmax=True)
        case "reranking":
            output = OutputSteps("number", sigmoid=True)
        case "zero-shot":
            output = OutputSteps("classes", softmax=False, top_k=MOST_LABELS)
        case _:
            output = OutputSteps("classes")
    return {name: _filled(output, found)}


def _filled(steps: OutputSteps, found: TextFolder) -> OutputSteps:
    """A table of classes, numbers or tags that says how its scores are made: models of `transformers` give logits."""
    kind = kind_of(steps)
    if steps.softmax is not None or steps.sigmoid is not None:
        return steps
    if kind == "classes" and found.problem_type == "regression":
        return replace(steps, answer="number") if len(found.labels) <= 1 else replace(steps, softmax=False)
    if kind == "classes" and (found.problem_type == "multi_label_classification" or len(found.labels) == 1):
        return replace(steps, sigmoid=True)
    return replace(steps, softmax=True) if kind in ("classes", "tags") else steps


def _embedding(found: TextFolder, tensors: Sequence[TensorSpec]) -> dict[str, OutputSteps]:
    """A sentence's vector: the model's own where it gives one, else of its tokens' vectors."""
    whole = [each.name for each in tensors if len(each.shape) == 2 and each.name in SENTENCES]
    if whole:
        return {whole[0]: OutputSteps("embedding")}
    name = _named(TOKENS, tensors, "sentence-embedding")
    shape = next((each.shape for each in tensors if each.name == name), (DYNAMIC,) * 3)
    return {name: OutputSteps("embedding", pool=(found.pool or "mean") if len(shape) != 2 else None)}


def _named(names: Sequence[str], tensors: Sequence[TensorSpec], preset: Preset) -> str:
    """The output that a preset means: by its name, else the only one. Raises LoadFailed."""
    there = [each.name for each in tensors]
    known = [each for each in names if each in there]
    if known or len(there) == 1:
        return (known or there)[0]
    if not there:
        return names[0]  # the file does not say; the load does
    raise LoadFailed(
        f'preset = "{preset}": say which output is meant by a table [output.NAME]; it has {", ".join(there)}'
    )


def _file(name: str, places: Sequence[Path], within: Sequence[str]) -> str:
    """The path of the tokenizer's file. Raises LoadFailed: it is not there, or leads out of the models folder."""
    if Path(name).name != name:
        raise LoadFailed(
            f"tokenizer = {name!r}: wanted the name of a file beside model.toml or in the version's folder"
        )
    for place in (folder / name for folder in places):
        try:
            with open_within(place, within):
                return str(place.absolute())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LoadFailed(f"{place}: {error.strerror}") from error
    raise LoadFailed(f"tokenizer = {name!r}: no such file in {' nor in '.join(map(str, places))}")
