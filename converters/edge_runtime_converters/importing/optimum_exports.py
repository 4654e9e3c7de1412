"""A folder that Hugging Face Optimum or sentence-transformers exported: a graph, with the model's own JSON files.

Owns: the names of exports and of their variants; `id2label` as labels; `preprocessor_config.json` as declared steps; a
tokenizer, with the files that say what the model does with texts. A declaration that would not be exact is left out,
and reported. Source: huggingface.co/docs/optimum, sbert.net, and the image processors of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.plan import (
    ImportPlan,
    Piece,
    PlannedModel,
    labels_text,
    model_name,
    settings_piece,
)
from edge_runtime_converters.importing.source_folder import MAX_TEXT_BYTES, SourceFolder

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
LABELS_FILE = "labels.txt"
SYSTEM = "an export of Hugging Face Optimum"

VARIANTS = {
    "model_quantized": "model.int8.onnx", "model_int8": "model.int8.onnx", "model_fp16": "model.f16.onnx",
    "model_float16": "model.f16.onnx", "model_bf16": "model.bf16.onnx",
}  # fmt: skip
"""Other precisions of model.onnx, and what a version folder calls them."""

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "special_tokens_map.json",
    "sentencepiece.bpe.model", "spiece.model",
)  # fmt: skip

TEXT_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json", "1_Pooling/config.json",
)  # fmt: skip
"""What is read of a text model when it is loaded (edge_runtime/text)."""

FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, as `resample` has them."""

BOXES = {
    **dict.fromkeys(("detr", "yolos", "table-transformer"), "detr"),
    **dict.fromkeys(("rt_detr", "rt_detr_v2", "d_fine", "deformable_detr", "conditional_detr"), "dfine"),
}
"""The meaning of boxes, by `model_type`: with a class for "no object", and without one."""

_CONVNEXT_SMALL = 384
"""Below it ConvNeXT's processor scales by `crop_pct` and cuts the middle out."""


class _ExportedConfig(Struct, frozen=True):
    """The part of config.json that is read."""

    model_type: str = ""
    architectures: list[str] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    image_size: Any = None

    @property
    def task(self) -> str:
        """The end of the architecture's name: "ImageClassification"; "" without one."""
        return (self.architectures or [""])[0].rpartition("For")[2] if self.architectures else ""


class _TokenizerFile(Struct, frozen=True):
    """The part of tokenizer.json that says whether it is one."""

    model: Any = None


def read(source: SourceFolder) -> ImportPlan | None:
    """Return the models of an export; None: it is none."""
    if source.file is not None and source.file.name != CONFIG_FILE:
        return None
    models = planned(source, source.root, source.root.name)
    return ImportPlan(SYSTEM, models) if models else None


def planned(source: SourceFolder, folder: Path, name: str) -> tuple[PlannedModel, ...]:
    """Return the models of a folder; empty where it is not an export. Raises ConversionFailed: a file is broken."""
    if not (folder / CONFIG_FILE).is_file():
        return ()
    graphs = _graphs(source, folder)
    if not graphs:
        return ()
    config = source.json_as(folder / CONFIG_FILE, _ExportedConfig)
    whole = [graph for graph in graphs if graph.stem in ("model", "openvino_model", *VARIANTS)]
    others = [graph for graph in graphs if graph not in whole and graph.stem.startswith(("model_", "openvino_model_"))]
    models = [_whole(source, folder, model_name(name), config, whole, others if whole else [])] if whole else []
    parts = [graph for graph in graphs if graph not in whole and not (whole and graph in others)]
    models += [_part(source, model_name(f"{name}-{graph.stem}"), graph) for graph in parts]
    return tuple(models)


# ---- private: which files -------------------------------------------------------------------------------------------


def _graphs(source: SourceFolder, folder: Path) -> list[Path]:
    found = [*source.files(folder), *source.files(folder / "onnx"), *source.files(folder / "openvino")]
    graphs = [
        path for path in found if path.suffix == ".onnx" or (path.suffix == ".xml" and "tokenizer" not in path.stem)
    ]
    return [path for path in graphs if path.suffix == ".onnx" or path.with_suffix(".bin").is_file()]


def _whole(  # noqa: PLR0917 (what an export is made of)
    source: SourceFolder,
    folder: Path,
    name: str,
    config: _ExportedConfig,
    graphs: list[Path],
    others: list[Path],
) -> PlannedModel:
    """The model of an export that is one graph, in one precision or several. others: what was made of it besides."""
    pieces: list[Piece] = []
    notes: list[str] = []
    for graph in graphs:
        place = VARIANTS.get(graph.stem, "")
        if place and any(other.stem == "model" for other in graphs):
            taken = artifact_pieces(source, graph)
            pieces += [msgspec.structs.replace(taken[0], place=f"1/{place}"), *taken[1:]]
            notes.append(f'{graph.name} is 1/{place}; precision = "{place.split(".")[1]}" in model.toml chooses it')
        else:
            pieces += artifact_pieces(source, graph)
    if others:
        notes.append(f"other ways to run the same model are left out: {', '.join(graph.name for graph in others)}")
    was = f"Optimum, {config.model_type or 'no model_type'}"
    preset = _text_preset(source, folder, config)
    if preset:
        there = [each for each in TEXT_FILES if (folder / each).is_file()]
        pieces += settings_piece({"preset": preset, "input": {"text": {"tokenizer": "tokenizer.json"}}}, SYSTEM)
        pieces += [Piece(place=f"1/{each}", source=str(source.inside(each, folder))) for each in there]
        if any(label.lower().startswith("entail") for label in _labels(config)):
            notes.append('labels that each request names: preset = "zero-shot" in model.toml')
        return PlannedModel(name=name, was=was, pieces=tuple(pieces), notes=tuple(notes))
    settings, labels, said = _declared(source, folder, config)
    pieces += settings_piece(settings, SYSTEM)
    if labels:
        pieces.append(Piece(place=LABELS_FILE, text=labels_text(labels)))
    tokenizer = [path for path in source.files(folder) if path.name in TOKENIZER_FILES]
    pieces += [Piece(place=path.name, source=str(path)) for path in tokenizer]
    if tokenizer or any("tokenizer" in path.stem for path in source.files(folder) if path.suffix == ".xml"):
        notes.append(
            "its tokenizer is not run here: callers send token ids (input_ids, attention_mask), or a model.py or a "
            f"pipeline's Python step makes them, of {', '.join(path.name for path in tokenizer) or 'its own files'}; "
            "texts want a tokenizer.json, as AutoTokenizer's save_pretrained writes it, and a task of docs/text.md"
        )
    return PlannedModel(name=name, was=was, pieces=tuple(pieces), notes=(*notes, *said))


def _part(source: SourceFolder, name: str, graph: Path) -> PlannedModel:
    """A model of an export in several graphs, such as an encoder."""
    note = "is one part of the export; what calls the parts in turn (generate) stays with the caller"
    return PlannedModel(name=name, was=f"Optimum, {graph.stem}", pieces=artifact_pieces(source, graph), notes=(note,))


# ---- private: what is declared --------------------------------------------------------------------------------------


def _declared(
    source: SourceFolder, folder: Path, config: _ExportedConfig
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the settings for model.toml, the labels, and what could not be said."""
    output = _output(config)
    labels = _labels(config) if output else []
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if (folder / PREPROCESSOR_FILE).is_file():
        found = _picture(source.json_as(folder / PREPROCESSOR_FILE, dict[str, Any]))
        if isinstance(found, str):
            notes.append(f"{PREPROCESSOR_FILE} is not declared: {found}; send pixel_values (docs/pictures.md)")
        else:
            settings["input"] = {"pixel_values": found}
    if output:
        ((name, table),) = output.items()
        settings["output"] = {name: {**table, **({"labels": LABELS_FILE} if labels else {})}}
    return settings, labels, notes


def _text_preset(source: SourceFolder, folder: Path, config: _ExportedConfig) -> str:
    """The preset of a text model; "" of any other, or one whose tokenizer is not whole, or whose task is unknown."""
    file = folder / "tokenizer.json"
    if not file.is_file() or (folder / PREPROCESSOR_FILE).is_file():
        return ""
    if file.stat().st_size <= MAX_TEXT_BYTES and not source.json_as(file, _TokenizerFile).model:
        return ""
    if (folder / "1_Pooling" / "config.json").is_file():
        return "sentence-embedding"
    if config.task == "SequenceClassification":
        is_score = len(_labels(config)) == 1 and config.problem_type != "regression"
        return "reranking" if is_score else "text-classification"
    return {"TokenClassification": "token-classification"}.get(config.task, "")


def _output(config: _ExportedConfig) -> dict[str, dict[str, Any]]:
    """The output that becomes an answer, by task; none where its meaning is not known here."""
    if config.task in ("ImageClassification", "SequenceClassification"):
        if config.problem_type in ("multi_label_classification", "regression"):
            return {}
        return {"logits": {"answer": "classes", "softmax": True}}
    if config.task == "SemanticSegmentation":
        return {"logits": {"answer": "mask"}}
    if config.task == "ObjectDetection" and config.model_type in BOXES:
        return {"pred_boxes": {"layout": BOXES[config.model_type], "scores": "logits"}}
    return {}


def _labels(config: _ExportedConfig) -> list[str]:
    """Labels by number; a number without one is its own label."""
    numbers = {int(key): label for key, label in (config.id2label or {}).items() if key.isascii() and key.isdecimal()}
    if not numbers or max(numbers) >= 100_000:
        return []
    return [numbers.get(number, str(number)) for number in range(max(numbers) + 1)]


def _picture(said: Mapping[str, Any]) -> dict[str, Any] | str:
    """The keys of `[input.pixel_values]`; a text where they cannot say it exactly: why."""
    table = _size(said)
    if isinstance(table, str):
        return table
    if said.get("resample") is not None:
        if said["resample"] not in FILTERS:
            return f"resample {said['resample']!r} has no counterpart"
        table["filter"] = FILTERS[said["resample"]]
    factor = _number(said.get("rescale_factor"), 1 / 255) if said.get("do_rescale", True) else 1.0
    if factor <= 0:
        return f"rescale_factor {factor} is none"
    if not said.get("do_normalize", True):
        return {**table, "mean": [0.0], "scale": [factor]}
    centres, deviations = (said.get(key) for key in ("image_mean", "image_std"))
    centres, deviations = (_numbers(centres, 0.5), _numbers(deviations, 0.5))
    if not centres or not deviations or 0 in deviations:
        return "image_mean and image_std are not numbers"
    table["mean"] = [round(mean / factor, 6) for mean in centres]
    table["scale"] = [round(factor / deviation, 9) for deviation in deviations]
    return table


def _size(said: Mapping[str, Any]) -> dict[str, Any] | str:  # noqa: PLR0911 (one line a rule)
    """The keys of a picture's size."""
    size, crop = _sides(said.get("size")), _sides(said.get("crop_size"))
    shorter = _shorter(said.get("size"))
    if not said.get("do_resize", True):
        return "it resizes nothing (do_resize is false)"
    if "ConvNext" in str(said.get("image_processor_type") or said.get("feature_extractor_type")) and shorter:
        if shorter >= _CONVNEXT_SMALL:
            return {"size": [shorter, shorter], "fit": "stretch"}
        scaled = int(shorter / _number(said.get("crop_pct"), 224 / 256))
        return {"size": [shorter, shorter], "fit": "crop", "shorter_side": scaled}
    if said.get("do_center_crop") and crop:
        if shorter:
            return {"size": crop, "fit": "crop", "shorter_side": shorter}
        return {"size": crop, "fit": "stretch"} if size == crop else f"it stretches to {size}, then cuts out {crop}"
    if size:
        return {"size": size, "fit": "stretch"}
    return f"size {said.get('size')!r} keeps each picture's own shape, and a declared step makes one size"


def _sides(size: Any) -> list[int] | None:
    """Height and width; None where it says only one side, or nothing."""
    if isinstance(size, int) and size > 0:
        return [size, size]
    if isinstance(size, Mapping) and all(isinstance(size.get(key), int) for key in ("height", "width")):
        return [size["height"], size["width"]]
    return None


def _shorter(size: Any) -> int | None:
    """The shorter side; None where there is a longest one too, or none."""
    if isinstance(size, Mapping) and "longest_edge" not in size and isinstance(size.get("shortest_edge"), int):
        return int(size["shortest_edge"])
    return None


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _numbers(value: Any, otherwise: float) -> list[float]:
    values = [otherwise] if value is None else value if isinstance(value, list) else [value]
    return [float(each) for each in values] if all(isinstance(each, int | float) for each in values) else []
