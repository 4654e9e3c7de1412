"""Texts as rows of a model's tokens, in the host: encoded, cut, padded and laid out as `[input.NAME]` declares.

Owns: the tokenizer, whose library runs here and never in the daemon; which texts are read; and how a row that is of
several parts, such as the windows of a long text, is put together again. Thread: any runner of the host; the tokenizer
does not change after the constructor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.answers import SENT_LABELS, TOKEN_COUNTS
from edge_runtime.errors import LoadFailed, RunFailed, UnreadableText
from edge_runtime.extras import install_advice
from edge_runtime.messages import is_picture
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import InputKind, ModelSteps
from edge_runtime.tensors import DATATYPES, Array
from edge_runtime.text.joined_parts import MOST_LABELS, JoinedParts, SentText
from edge_runtime.text.text_steps import WHOLE, TextSteps

MAX_TOKENIZER_BYTES = 64 << 20
"""Of a file: multilingual vocabularies of 256 000 words are 35 MB."""

MAX_TEXT_BYTES = 1 << 20
"""Of one text: a book. It takes a second to encode."""

MOST_WINDOWS = 256
"""Of one text: some 100 000 tokens of a model of 512, and seconds of a run."""

LOOK_CHARACTERS = 16
"""For each token that is kept, so many characters of a text are encoded first: few words are longer."""

DEFAULT_LENGTH = 512
"""Of BERT, whose positions end there, and so of most that came after it."""

PAD_TOKENS = ("[PAD]", "<pad>", "<|endoftext|>")
"""Tokens that fill rows where no file says which: of BERT's kind, of RoBERTa's and T5's, of GPT-2's."""

TEXT, PAIR, LABELLED = "text", "pair", "labelled"
"""The forms of what is sent: a text; a pair of texts; a text and the labels to choose from."""


class TokenisedInput:
    """Takes texts in place of the inputs that a tokenizer fills. Its attributes are those of an `InputReader`."""

    sides = None

    def __init__(self, name: str, steps: TextSteps, model: ModelSpec, data: bytes, joins: JoinedParts) -> None:
        """data: of the tokenizer's file. Raises LoadFailed: it is not a tokenizer, or the model has no such inputs."""
        self.name = name
        self.joins = joins
        self.keeps = None
        self._steps = steps
        self._inputs = _filled_inputs(name, steps, model)
        self.fills = tuple(self._inputs)
        is_zero_shot = steps.hypothesis is not None
        self.kinds: tuple[InputKind, ...] = (LABELLED,) if is_zero_shot else (TEXT, PAIR)
        labels = TensorSpec(SENT_LABELS, "BYTES", (DYNAMIC, DYNAMIC))
        counts = TensorSpec(TOKEN_COUNTS, "INT64", (DYNAMIC,), is_optional=True)
        self.source_specs = (labels, counts) if is_zero_shot else (counts,)
        tokenizer = _tokenizer(steps.tokenizer, data)
        self._pad = _Padding(tokenizer, steps)
        ids = self._inputs[steps.ids]
        self._rows = ids.shape[0]
        self._fixed = None if ids.shape[1] == DYNAMIC else ids.shape[1]
        # The quick way tells no places, and gives windows of pairs types of another text (tokenizers 0.23).
        self._is_quick = not joins.finds_places and not steps.windows
        self._finds_places = joins.finds_places
        self._length = _length_of(tokenizer, steps, self._fixed)
        strategy = "only_first" if steps.hypothesis is not None else "longest_first"
        self._encoders = dict.fromkeys(self.kinds, _encoder(name, tokenizer, steps, self._length, strategy))
        if steps.windows:  # of a passage, each with the whole question
            self._encoders[PAIR] = _encoder(name, _tokenizer(steps.tokenizer, data), steps, self._length, "only_second")

    def sent_spec(self, kind: InputKind) -> TensorSpec:
        """BYTES [rows]; of pairs [rows, 2]; with labels [rows, 1 + labels]."""
        inner: tuple[int, ...] = {TEXT: (), PAIR: (2,)}.get(kind, (DYNAMIC,))
        return TensorSpec(self.name, "BYTES", (self._rows, *inner))

    def tensors(self, kind: InputKind, sent_array: Array) -> tuple[dict[str, Array], list[SentText]]:
        """Return the tokens of all rows, as the model's inputs, and how each row was read.

        Raises UnreadableText: one of them is not UTF-8, too long, or has no token; RunFailed: the tokenizer failed.
        """
        texts = [list(_texts(row, number)) for number, row in enumerate(sent_array.reshape(len(sent_array), -1))]
        asked = [list(self._asked(kind, row)) for row in texts]
        encoded = iter(self._encoded(kind, [each for row in asked for each in row]))
        parts = [[part for _ in row for part in self._windows(next(encoded))] for row in asked]
        for number, own in enumerate(parts):
            if not all(len(each) for each in own):
                raise UnreadableText(f"text {number} has no token; wanted a text that the model's tokenizer reads")
            if len(own) > MOST_WINDOWS:
                raise UnreadableText(f"text {number} has {len(own)} windows; at most {MOST_WINDOWS} are read")
        width = self._fixed or self._pad.rounded(max(len(each) for own in parts for each in own))
        rows = [
            SentText(
                row[0],
                self._offsets(own, width) if self._finds_places else (),
                tuple(len(each) for each in own),
                is_pair=kind == PAIR,
                labels=row[1:] if kind == LABELLED else (),
            )
            for row, own in zip(texts, parts, strict=True)
        ]
        return self._laid_out([each for own in parts for each in own], width), rows

    def source_rows(self, places: Sequence[SentText]) -> list[Array]:
        """The labels that came with each text, BYTES [rows, labels], if any did; and its tokens, INT64 [rows]."""
        counts: Array = np.array([sum(each.lengths) for each in places], np.int64)
        if LABELLED not in self.kinds:
            return [counts]
        found: Array = np.empty((len(places), len(places[0].labels)), object)
        for row, place in enumerate(places):
            found[row] = [each.encode() for each in place.labels]
        return [found, counts]

    # ---- private ----------------------------------------------------------------------------------------------------

    def _asked(self, kind: InputKind, row: list[str]) -> Iterator[str | tuple[str, str]]:
        """Yield the parts of a row to be encoded: its text, its pair, or its text with the hypothesis of each label."""
        if kind == TEXT:
            yield row[0]
        elif kind == PAIR:
            yield row[0], row[1]
        else:
            if not 1 <= len(row) - 1 <= MOST_LABELS:
                raise UnreadableText(
                    f"a row has {len(row) - 1} labels; wanted 1 to {MOST_LABELS} behind the text: [text, label, …]"
                )
            for label in row[1:]:
                yield row[0], str(self._steps.hypothesis).replace(WHOLE, label)

    def _encoded(self, kind: InputKind, asked: Sequence[str | tuple[str, str]]) -> Sequence[Any]:
        """Encode, of a long text that is cut no more than it takes: a megabyte takes a second."""
        if self._steps.windows:
            return self._encode(kind, asked)
        most = LOOK_CHARACTERS * self._length
        while True:
            begun = [_begun(each, most) for each in asked]
            found = self._encode(kind, begun)
            # What is left over shows that what is kept is whole.
            if all(each == whole or own.overflowing for each, whole, own in zip(begun, asked, found, strict=True)):
                return found
            most *= 4

    def _encode(self, kind: InputKind, asked: Sequence[str | tuple[str, str]]) -> Sequence[Any]:
        encoder = self._encoders[kind]
        encode = encoder.encode_batch_fast if self._is_quick else encoder.encode_batch
        try:
            found: Sequence[Any] = encode(asked)
        except BaseException as error:  # a panic in the library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            if "Truncation error" in str(error):
                raise UnreadableText(
                    f"a row's first text, or its label, leaves no room for the other in {self._length} tokens"
                ) from None
            raise RunFailed(f"the tokenizer failed: {type(error).__name__}: {error}") from None
        return found

    def _windows(self, encoded: Any) -> list[Any]:
        return [encoded, *encoded.overflowing] if self._steps.windows else [encoded]

    def _offsets(self, parts: Sequence[Any], width: int) -> list[tuple[int, int]]:
        """The places of all parts' tokens in the first text; of tokens that two windows share, those in the middle.

        width: of a row of the model.
        """
        found: list[tuple[int, int]] = []
        for number, part in enumerate(parts):
            tokens = [index for index, sequence in enumerate(part.sequence_ids) if sequence == 0]
            first = (self._steps.stride + 1) // 2 if number else 0
            last = len(tokens) - (self._steps.stride // 2 if number < len(parts) - 1 else 0)
            counted = set(tokens[first:last])
            own = [place if index in counted else (0, 0) for index, place in enumerate(part.offsets)]
            padding = [(0, 0)] * (width - len(own))
            found += [*padding, *own] if self._pad.is_left else [*own, *padding]
        return found

    def _laid_out(self, parts: Sequence[Any], width: int) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, spec in self._inputs.items():
            fill = self._pad.fill(name, self._steps)
            table: Array = np.full((len(parts), width), fill, DATATYPES[spec.datatype].dtype)
            for row, part in enumerate(parts):
                numbers = _numbers_of(part, name, self._steps)
                if self._pad.is_left:
                    table[row, width - len(numbers) :] = numbers
                else:
                    table[row, : len(numbers)] = numbers
            found[name] = table
        return found


class _Padding:
    """The numbers that fill rows up to the longest: by the tokenizer's file, else its padding token."""

    def __init__(self, tokenizer: Any, steps: TextSteps) -> None:
        said: Mapping[str, Any] = tokenizer.padding or {}
        self.is_left = said.get("direction") == "left"
        self._multiple = int(said.get("pad_to_multiple_of") or 1)
        self._type = int(said.get("pad_type_id") or 0)
        named = [steps.pad] if steps.pad else [str(said.get("pad_token", "")), *PAD_TOKENS]
        known = (tokenizer.token_to_id(each) for each in named if each)
        self._id = next((each for each in known if each is not None), int(said.get("pad_id") or 0))

    def rounded(self, length: int) -> int:
        """The length of rows whose longest has this many tokens."""
        return -(-length // self._multiple) * self._multiple

    def fill(self, name: str, steps: TextSteps) -> int:
        """The number that an input has where no token is."""
        return {steps.ids: self._id, steps.types: self._type}.get(name, 0)


def text_input(spec: ModelSpec, steps: ModelSteps, threads: int, runs: int) -> TokenisedInput | None:
    """The reader of texts; None: no steps declare it. Raises LoadFailed: they do not fit, or a file cannot be read."""
    del threads, runs
    if not steps.inputs:
        return None
    if len(steps.inputs) > 1:
        raise LoadFailed(f"texts are declared for {', '.join(steps.inputs)}; wanted one table for all that it fills")
    ((name, declared),) = steps.inputs.items()
    assert isinstance(declared, TextSteps)
    data = _read(Path(steps.files[declared.tokenizer]))
    return TokenisedInput(name, declared, spec, data, JoinedParts(declared, steps, spec))


def _read(path: Path) -> bytes:
    """The tokenizer's file. Raises LoadFailed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise LoadFailed(f"{path.name}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_TOKENIZER_BYTES:
        raise LoadFailed(f"{path.name}: has over {MAX_TOKENIZER_BYTES} bytes; no tokenizer is so large")
    return data


def _tokenizer(name: str, data: bytes) -> Any:
    """A tokenizer. Raises LoadFailed: it is none, or its library is not installed."""
    # Each runner encodes its own rows, and a model's runs have the device's cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LoadFailed(f"texts need tokenizers ({error}); {install_advice('text')}") from error
    try:
        return Tokenizer.from_buffer(data)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise LoadFailed(
            f"{name}: is not a tokenizer: {error}; wanted a file as Hugging Face's tokenizers saves it"
        ) from None


def _filled_inputs(name: str, steps: TextSteps, model: ModelSpec) -> dict[str, TensorSpec]:
    """The model's inputs that the tokenizer fills. Raises LoadFailed."""
    found = {each.name: each for each in model.inputs if each.name in (steps.ids, steps.mask, steps.types)}
    there = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in model.inputs)
    if steps.ids not in found:
        raise LoadFailed(f'[input.{name}]: the model has no input {steps.ids}; say ids = "…": it has {there}')
    for each in found.values():
        if each.datatype not in ("INT64", "INT32") or len(each.shape) != 2:
            raise LoadFailed(
                f"[input.{name}]: {each.name} is {each.datatype} {list(each.shape)}; wanted INT64 or INT32 "
                "[rows, tokens]"
            )
    if any(each.name == name and each.name not in found for each in model.inputs):
        raise LoadFailed(f"[input.{name}]: the model has an input of this name that no tokenizer fills; name it text")
    others = [each.name for each in model.inputs if each.name not in found]
    if others and (steps.windows or steps.hypothesis is not None):
        raise LoadFailed(
            f"[input.{name}]: a text is of several rows with windows or hypothesis, and the model has further inputs: "
            f"{', '.join(others)}"
        )
    return found


def _length_of(tokenizer: Any, steps: TextSteps, fixed: int | None) -> int:
    """Most tokens of a row. fixed: of the model's rows."""
    said: Mapping[str, Any] = tokenizer.truncation or {}
    return min(steps.length or int(said.get("max_length") or DEFAULT_LENGTH), fixed or 1 << 30)


def _encoder(name: str, tokenizer: Any, steps: TextSteps, length: int, strategy: str) -> Any:
    """The tokenizer, told how it cuts. Raises LoadFailed: no token would be left."""
    said: Mapping[str, Any] = tokenizer.truncation or {}
    tokenizer.no_padding()
    try:
        tokenizer.enable_truncation(
            max_length=length,
            stride=steps.stride,
            strategy=strategy,
            direction=str(said.get("direction", "right")).lower(),
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise LoadFailed(f"[input.{name}]: {length} tokens with a stride of {steps.stride}: {error}") from None
    return tokenizer


def _begun(asked: str | tuple[str, str], most: int) -> str | tuple[str, str]:
    """So many characters of what is asked, and no part of a word."""
    if isinstance(asked, tuple):
        return tuple(_begun(each, most) for each in asked)  # type: ignore[return-value]
    if len(asked) <= most:
        return asked
    return asked[:most].rpartition(" ")[0] or asked


def _texts(row: Array, number: int) -> Iterator[str]:
    """The texts of a row. Raises UnreadableText."""
    for element in row.tolist():
        data = element.encode() if isinstance(element, str) else bytes(element)
        if len(data) > MAX_TEXT_BYTES:
            raise UnreadableText(
                f"text {number} has {len(data):,} bytes; at most {MAX_TEXT_BYTES:,} are read, send it in parts"
            )
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            what = "it is a picture, and the model takes texts" if is_picture(data) else "wanted text in UTF-8"
            raise UnreadableText(f"text {number} is not UTF-8 at byte {error.start}: {what}") from None


def _numbers_of(part: Any, name: str, steps: TextSteps) -> list[int]:
    if name == steps.ids:
        found: list[int] = part.ids
    elif name == steps.mask:
        found = part.attention_mask
    else:
        found = part.type_ids
    return found
