"""Folders of Hugging Face's: the task, labels, length and pooling of a text model. Thread: the loader's.

Reads `config.json`, `tokenizer_config.json`, and of sentence-transformers `sentence_bert_config.json` and
`1_Pooling/config.json`, each within a bound. A file that is not there says nothing, a broken one fails the load. From
huggingface.co/docs/transformers (configuration), sbert.net (models.Pooling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from edge_runtime.durable import open_within
from edge_runtime.errors import LoadFailed
from edge_runtime.steps import Pool, Preset

CONFIG_FILE, TOKENIZER_FILE, POOLING_FILE = "config.json", "tokenizer.json", "1_Pooling/config.json"
MAX_CONFIG_BYTES = 8 << 20
"""Of a file that is parsed: labels of 21 000 classes are half a megabyte."""

MAX_LENGTH = 1 << 20
"""tokenizer_config.json says 1e30 where a tokenizer knows no length."""

MAX_LABELS = 100_000
"""Of `id2label`, whose numbers may leave gaps: one label of a huge number would make a list of that length."""

OFFSET_TYPES = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "longformer", "data2vec-text")
"""Models whose positions begin behind their padding token: two of `max_position_embeddings` hold none."""

POOLS: dict[str, Pool] = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
"""The keys of 1_Pooling/config.json that have a counterpart."""

TASKS: Mapping[str, Preset] = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}
"""By the end of an architecture's name."""

T = TypeVar("T")


class TransformersConfig(Struct, frozen=True):
    """The part of config.json that is read."""

    model_type: str = ""
    architectures: tuple[str, ...] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None
    max_position_embeddings: Any = None

    @property
    def task(self) -> str:
        """The end of the architecture's name: "SequenceClassification"; "" of a bare model, or without one."""
        return (self.architectures or ("",))[0].rpartition("For")[2] if self._is_for_a_task else ""

    @property
    def _is_for_a_task(self) -> bool:
        return bool(self.architectures) and "For" in (self.architectures or ("",))[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels by number; a number without one is its own label."""
        said = self.id2label or {}
        numbers = {
            int(key): " ".join(label.split()) for key, label in said.items() if key.isascii() and key.isdecimal()
        }
        if not numbers or max(numbers) >= MAX_LABELS:
            return ()
        return tuple(" ".join(numbers.get(each, str(each)).split()) for each in range(max(numbers) + 1))


class TextFolder(Struct, frozen=True):
    """The facts that files beside a text model tell. length: most tokens; None: they do not say. pads_with: the token.

    pool: how sentence-transformers makes a sentence's vector of its tokens'; None: it is not of that kind.
    """

    task: str = ""
    labels: tuple[str, ...] = ()
    problem_type: str = ""
    length: int | None = None
    pads_with: str = ""
    pool: Pool | None = None


class _TokenizerConfig(Struct, frozen=True):
    model_max_length: Any = None
    pad_token: Any = None


class _SentenceConfig(Struct, frozen=True):
    max_seq_length: int | None = None


def read_folder(places: Sequence[Path], within: Sequence[str] = ()) -> TextFolder:
    """Read the files beside a model. places: the version's folder, and that of `model.toml`. within: as of a version.

    Raises LoadFailed: a file is not JSON, or not of this kind.
    """
    config = _read(CONFIG_FILE, places, within, TransformersConfig) or TransformersConfig()
    tokenizer = _read("tokenizer_config.json", places, within, _TokenizerConfig) or _TokenizerConfig()
    sentences = _read("sentence_bert_config.json", places, within, _SentenceConfig) or _SentenceConfig()
    pooled = _read(POOLING_FILE, places, within, dict[str, Any])
    token = tokenizer.pad_token
    said = (_length(tokenizer.model_max_length), _positions(config))
    length = _length(sentences.max_seq_length) or min((each for each in said if each is not None), default=None)
    return TextFolder(
        config.task,
        config.labels,
        config.problem_type or "",
        length,
        str(token.get("content", "") if isinstance(token, dict) else token or ""),
        None if pooled is None else _pool(pooled),
    )


def text_inputs(path: Path) -> Mapping[str, Any]:
    """Return the table of texts that a `config.json` stands for: of a model that tells in its files what it is.

    Nothing where texts cannot be read here: the model is served with its own tensors, as ever. Raises OSError.
    """
    if not (path.parent / TOKENIZER_FILE).is_file() or find_spec("tokenizers") is None:
        return {}
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    try:
        config = msgspec.json.decode(data, type=TransformersConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    is_known = config.task in TASKS or (path.parent / POOLING_FILE).is_file()
    return {"text": {"tokenizer": TOKENIZER_FILE}} if config.model_type and is_known else {}


def _pool(said: dict[str, Any]) -> Pool | None:
    """The one way that is on; None where several are joined, or another."""
    modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    return POOLS.get(modes[0]) if len(modes) == 1 else None


def _length(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 1 <= value <= MAX_LENGTH else None


def _positions(config: TransformersConfig) -> int | None:
    found = _length(config.max_position_embeddings)
    return found - 2 if found is not None and found > 2 and config.model_type in OFFSET_TYPES else found


def _read(name: str, places: Sequence[Path], within: Sequence[str], kind: type[T]) -> T | None:
    for place in (folder / name for folder in places):
        try:
            with open_within(place, within) as file:
                data = file.read(MAX_CONFIG_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise LoadFailed(f"{place}: {error.strerror}") from error
        if len(data) > MAX_CONFIG_BYTES:
            raise LoadFailed(f"{place}: has over {MAX_CONFIG_BYTES} bytes")
        try:
            return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LoadFailed(f"{place}: is not what it is called: {error}") from error
    return None
