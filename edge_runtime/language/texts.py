"""Texts of a body as requests to a model that reads texts, and the vectors that it makes of them.

Owns: which input takes text, and how many texts one request has. Pure. Thread: the door's; vectors are read on any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import TOKEN_COUNTS, kind_of
from edge_runtime.errors import RunFailed, TensorMismatch
from edge_runtime.language.asking import BadField, writes_text
from edge_runtime.messages import RAW, RequestHeader, TensorHeader
from edge_runtime.model_spec import DYNAMIC
from edge_runtime.models.servable import Servable
from edge_runtime.request.request import Request
from edge_runtime.tensors import Array

MOST_TEXTS = 2048
"""Of one body, as OpenAI has it."""

TEXT = "text"
"""What one row is of an input that a tokenizer reads."""


UNCOUNTED: Mapping[str, Any] = {"prompt_tokens": 0, "total_tokens": 0, "counted": False}
"""Tokens of texts that a model reads by itself, which nothing counts: clients want numbers, `counted` denies them."""


Vectors = npt.NDArray[np.float32]
"""FP32 [texts, length]."""


class TextInput(NamedTuple):
    """The input of a model that takes texts. inner: its shape but rows; form: the form of the model that has it."""

    name: str
    inner: tuple[int, ...]
    form: Servable


def text_input(servable: Servable, inner: Sequence[tuple[int, ...]]) -> TextInput | None:
    """Return the only input of a model, or of a form that answers, where it takes text in one of these shapes.

    inner: the shapes of one row, of which an open one takes the first that fits. None: no input of the model does.
    """
    steps = servable.steps
    declared = {} if steps is None else steps.inputs
    for form in (*(each for form, each in servable.forms.items() if form.answers), servable):
        if len(form.spec.inputs) != 1:
            continue
        (spec,) = form.spec.inputs
        is_text = spec.name not in declared or declared[spec.name].element == TEXT
        if spec.datatype != "BYTES" or not spec.shape or not is_text:
            continue
        rows = 1 if spec.shape[0] == DYNAMIC else spec.shape[0]
        found = next((each for each in inner if spec.fits((rows, *each))), None)
        if found is not None:
            return TextInput(spec.name, found, form)
    return None


def text_requests(
    model: str,
    takes: TextInput,
    texts: Sequence[bytes],
    *,
    timeout_ms: float | None,
    output: str,
) -> list[tuple[RequestHeader, Sequence[Any]]]:
    """Cut texts into requests of as many rows as the model takes at once, for one output and the tokens behind it.

    texts: all rows, one after another.
    """
    width = int(np.prod(takes.inner)) if takes.inner else 1
    rows = len(texts) // width
    step = takes.form.max_rows if takes.form.batches else 1
    array: Array = np.empty(len(texts), object)
    array[:] = texts
    array = array.reshape(rows, *takes.inner)
    outputs = (output, *(each.name for each in takes.form.spec.outputs if each.name == TOKEN_COUNTS))
    found: list[tuple[RequestHeader, Sequence[Any]]] = []
    for start in range(0, rows, step):
        part = array[start : start + step]
        header = RequestHeader(
            model=model,
            inputs=(TensorHeader(takes.name, "BYTES", part.shape),),
            outputs=outputs,
            timeout_ms=timeout_ms,
            parameters={RAW: False},
        )
        found.append((header, (part,)))
    return found


def embedding_of(servable: Servable) -> str | None:
    """Return the output that answers with an embedding; None: there is none."""
    outputs = {} if servable.steps is None else servable.steps.outputs
    return next((name for name, each in outputs.items() if kind_of(each) == "embedding"), None)


def vector_requests(
    servable: Servable, texts: Sequence[bytes], length: int | None, *, timeout_ms: float | None
) -> list[tuple[RequestHeader, Sequence[Any]]]:
    """Return the requests for the vectors of texts. length: of each, as asked for. Raises TensorMismatch, BadField."""
    name = servable.model
    output = embedding_of(servable)
    if output is None and writes_text(servable):
        raise TensorMismatch(
            f"model {name} is a language model, which writes text and gives no embeddings; name a model for embeddings"
        )
    if output is None:
        first = servable.spec.outputs[0].name
        raise TensorMismatch(
            f"model {name} answers with no embedding; where it gives one, say so in its model.toml: "
            f'[output.{first}] answer = "embedding"'
        )
    takes = text_input(servable, ((), (1,)))
    if takes is None:
        raise no_text_model(servable, "one input of texts, BYTES [rows] or [rows,1]")
    spec = next(each for each in takes.form.spec.outputs if each.name == output)
    if length is not None and DYNAMIC != spec.shape[-1] < length:
        raise BadField("dimensions", f"model {name} has {spec.shape[-1]}, wanted at most that")
    return text_requests(name, takes, texts, timeout_ms=timeout_ms, output=output)


def vectors_of(model: str, requests: Sequence[Request], length: int | None) -> Vectors:
    """Return the vectors of all requests of `vector_requests`, which are answered, in their order.

    length: of each, cut and made one again; None: the model's own. Raises RunFailed: they are not finite numbers.
    """
    arrays = (each.plan.select(each.outputs)[0] for each in requests)
    vectors: Vectors = np.concatenate([np.asarray(each, np.float32).reshape(len(each), -1) for each in arrays])
    if length is not None:
        vectors = vectors[:, :length]
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = np.ascontiguousarray(vectors / np.maximum(lengths, 1e-12), np.float32)
    if not np.isfinite(vectors).all():
        raise RunFailed(f"model {model} gave numbers that are not finite")
    return vectors


def usage(requests: Sequence[Request]) -> Mapping[str, Any]:
    """Return the tokens of all requests of `text_requests`, which are answered: those that the model ran."""
    counts = [each.plan.select(each.outputs)[1:] for each in requests]
    if not all(counts):
        return UNCOUNTED
    tokens = sum(int(count.sum()) for (count,) in counts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def encoded(param: str, text: str) -> bytes:
    """Return a text's bytes. Raises BadField: it has half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadField(param, "got half a surrogate pair, which no text has") from None


def whole(fields: Mapping[str, Any], key: str) -> int | None:
    """Return a field that is a whole number of 1 or more; None where it is absent. Raises BadField."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadField(key, "wanted a whole number of 1 or more")
    return value


def no_text_model(servable: Servable, wanted: str) -> TensorMismatch:
    """Return the error for a model that takes no texts of the wanted kind."""
    own = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in servable.spec.inputs)
    return TensorMismatch(f"model {servable.model} takes {own}; wanted {wanted}")
