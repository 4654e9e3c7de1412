"""Fields that several of Ollama's bodies have: the model's name, sampling, the form of an answer, pictures.

Owns: their checks, and what each means to a language model. Fields that are not read here are ignored, as with Ollama.
Pure. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import DecodeFailed
from edge_runtime.wire import json_codec
from edge_runtime.wire.codec import short, typed

LATEST = ":latest"
"""The tag of names that have none: clients add it by themselves."""

_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_WHOLE_NUMBERS = {"top_k": "top_k", "seed": "seed", "num_predict": "max_tokens"}
"""Ollama's options, and the parameters of a request that they are."""

_PICTURE_TYPES = {"iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}
"""How base64 of a picture begins; any other is taken for JPEG."""


def model_name(fields: Mapping[str, Any]) -> str:
    """Return the model that a body names, without the tag `latest`. Raises DecodeFailed."""
    name = fields.get("model") or fields.get("name")
    if not isinstance(name, str):
        raise DecodeFailed("model: is missing, wanted the name of a model; GET /api/tags lists them")
    return name.removesuffix(LATEST)


def text(fields: Mapping[str, Any], key: str) -> str:
    """Return a field that is text, "" where it is absent. Raises DecodeFailed."""
    found: str = typed(fields, key, str, "")
    return found


def parameters_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request that `options`, `logprobs` and `top_logprobs` mean. Raises DecodeFailed."""
    options: dict[str, Any] = typed(fields, "options", dict, {})
    found: dict[str, Any] = {}
    for named, wanted, kinds in ((_NUMBERS, "a number", (int, float)), (_WHOLE_NUMBERS, "a whole number", (int,))):
        for key, parameter in named.items():
            value = options.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                whole = int(value) if isinstance(value, float) and value.is_integer() else None
                if whole is None:
                    raise DecodeFailed(f"options.{key}: got {short(value)}, wanted {wanted}")
                value = whole
            found[parameter] = value
    if found.get("top_p", 1) <= 0:
        del found["top_p"]
        found["temperature"] = 0.0  # the likeliest token alone
    if found.get("max_tokens", 1) < 1:
        del found["max_tokens"]  # -1 and -2: as many as there is room for
    if found.get("top_k", 1) < 1:
        del found["top_k"]  # 0: of all tokens
    stop = options.get("stop")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise DecodeFailed("options.stop: wanted text, or a list of texts")
        if texts:
            found["stop"] = json_codec.dumps(texts).decode()
    if typed(fields, "logprobs", bool, False):
        found["logprobs"] = typed(fields, "top_logprobs", int, 0)
    return found


def response_format(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what `format` means in OpenAI's words; None: any text. Raises DecodeFailed."""
    form = fields.get("format")
    if form is None or form == "":
        return None
    if form == "json":
        return {"type": "json_object"}
    if not isinstance(form, dict):
        raise DecodeFailed(f"format: got {short(form)}, wanted json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}}


def template_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template that `think` sets. Raises DecodeFailed."""
    think = fields.get("think")
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if think not in ("low", "medium", "high"):
        raise DecodeFailed(f"think: got {short(think)}, wanted true, false, low, medium or high")
    return {"enable_thinking": True, "reasoning_effort": think}


def content_of(words: str, images: Any) -> str | list[dict[str, Any]]:
    """Return the content of a message in OpenAI's form: its text, with pictures a list of parts. Raises DecodeFailed.

    images: base64 of each; None or empty: none.
    """
    if not images:
        return words
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise DecodeFailed("images: wanted a list of pictures in base64")
    return [{"type": "text", "text": words}, *({"type": "image_url", "image_url": {"url": _url(e)}} for e in images)]


# ---- private --------------------------------------------------------------------------------------------------------


def _url(picture: str) -> str:
    kind = next((kind for begin, kind in _PICTURE_TYPES.items() if picture.startswith(begin)), "jpeg")
    return f"data:image/{kind};base64,{picture}"
