"""The table `[input.NAME]` of texts: how they become a model's tokens. Values only; text_input.py does it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from edge_runtime.model_spec import TensorSpec
from edge_runtime.steps import InputSteps

Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]
"""Most tokens of a row: no model reads a million."""

FileName = Annotated[str, Meta(min_length=1)]

WHOLE = "{}"
"""Stands for a label in a hypothesis."""


class TextSteps(InputSteps, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """Texts in place of the inputs that a tokenizer fills. NAME is new, and what callers call it: `[input.text]`."""

    element: ClassVar[str] = "text"

    source: Literal["text"] = "text"
    """BYTES in UTF-8: `[rows]`, a text each; `[rows, 2]`, pairs of texts, such as a question and a passage."""

    tokenizer: FileName = "tokenizer.json"
    """A file of Hugging Face's `tokenizers`, beside `model.toml` or in the version's folder."""

    length: Tokens | None = None
    """Most tokens of a row, special ones included; what is longer is cut off. When absent: as the model's own files
    say, else 512; at most what the model's tensors have room for."""

    windows: bool = False
    """Whether a long text is read whole, in windows of `length` tokens, whose answers are joined."""

    stride: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens that two windows share."""

    hypothesis: str | None = None
    """Zero-shot classification by a model of entailment: `"This example is {}."`. A row is then a text and the labels
    to choose from, `[rows, 1 + labels]`, and its answer has those labels."""

    entailment: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """With `hypothesis`: the model's class that means that it follows. When absent: as the model's own labels say, else
    its last."""

    pad: str | None = None
    """The token that fills rows up to the longest. When absent: as the model's files say, else `[PAD]` or `<pad>`."""

    ids: str = "input_ids"
    """The model's input of token ids."""

    mask: str = "attention_mask"
    """The model's input that is 1 where a token is, if it has one."""

    types: str = "token_type_ids"
    """The model's input that is 1 in the second text of a pair, if it has one."""

    def __post_init__(self) -> None:
        if self.stride and not self.windows:
            raise ValueError("stride is of windows; say windows = true")
        if self.length is not None and self.stride >= self.length:
            raise ValueError(f"stride is {self.stride}, and a window has {self.length} tokens; wanted less")
        if self.hypothesis is not None and self.hypothesis.count(WHOLE) != 1:
            raise ValueError(f'hypothesis: wanted one {{}} in it, in the place of a label; got "{self.hypothesis}"')
        if self.hypothesis is not None and self.windows:
            raise ValueError("got hypothesis and windows; say one of the two")
        if self.entailment is not None and self.hypothesis is None:
            raise ValueError("entailment is with hypothesis")

    def title(self) -> str:
        """Return the word for texts."""
        return "texts"

    def words(self, spec: TensorSpec | None) -> dict[str, str]:
        """How a text becomes the model's inputs, by what is said of it."""
        del spec
        cut = f"windows that share {self.stride}" if self.windows else "the rest cut off"
        return {
            "tokenizer": self.tokenizer,
            "length": f"{self.length} tokens, {cut}" if self.length is not None else cut,
            "hypothesis": self.hypothesis or "",
        }
