"""Runs a handler of TorchServe's as a Python model: requests to its `data`, what it returns to answers.

Owns: the tensors that such a model takes and gives, the settings beside it, and how its entry is found. The `model.py`
that `edge-runtime import` writes names these functions, so the python backend runs it like any other. The archive's
files lie in `archive/` beside it. Thread: the main thread of a host, one run at a time.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.model_spec import ModelSpec
from edge_runtime.torchserve import HANDLER

HANDLER_INPUTS, HANDLER_OUTPUTS = ("body", "request"), ("answer", "response")
"""BYTES with one element a row: the body's parts, one after another; in JSON, their names, types and lengths, and the
request's headers; what the handler returned, as bytes; in JSON, its status and headers."""

INPUTS = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in HANDLER_INPUTS]
OUTPUTS = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in HANDLER_OUTPUTS]

ARCHIVE_FOLDER, SETTINGS_FILE, MANIFEST_FILE = "archive", HANDLER.name, "MAR-INF/MANIFEST.json"

MODEL_TEXT = '''"""Runs a handler of TorchServe's, archive/{handler}.py, as edge-runtime took it from {source}."""

from edge_runtime.torchserve.model import INPUTS, OUTPUTS, infer, load

__all__ = ["INPUTS", "OUTPUTS", "infer", "load"]
'''
"""The `model.py` beside an archive."""

JSON_KIND = "application/json"


def is_handler(spec: ModelSpec) -> bool:
    """Whether a model takes and gives what a handler of TorchServe's does."""
    return (
        tuple(each.name for each in spec.inputs) == HANDLER_INPUTS
        and tuple(each.name for each in spec.outputs) == HANDLER_OUTPUTS
        and {each.datatype for each in (*spec.inputs, *spec.outputs)} == {"BYTES"}
    )


class Service:
    """A handler that was initialised. entry: what answers a batch, `handle(data, context)`."""

    def __init__(self, entry: Callable[[Any, Any], Any], context: Any) -> None:
        self._entry = entry
        self._context = context

    def predict(
        self, bodies: list[bytes], requests: list[bytes], call: Callable[..., Any]
    ) -> list[tuple[bytes, bytes]]:
        """Answer a batch: for each request what the handler returned, and its status and headers in JSON.

        In a pipeline, an error of the handler before is passed on. call: asks another served model. Raises what the
        handler raises, and ValueError: its answer is not a list of as many items.
        """
        from edge_runtime.torchserve.handlers import PredictionException, RequestProcessor

        failed = [_is_error(each) for each in requests]
        if any(failed):
            left = [at for at, is_over in enumerate(failed) if not is_over]
            own = self.predict([bodies[at] for at in left], [requests[at] for at in left], call) if left else []
            answers = {**dict(enumerate(zip(bodies, requests, strict=True))), **dict(zip(left, own, strict=True))}
            return list(answers.values())
        context = self._context
        read = [_request(body, request) for body, request in zip(bodies, requests, strict=True)]
        data = [row for row, _ in read]
        context.request_ids = {index: str(index) for index in range(len(data))}
        context.request_processor = [RequestProcessor(headers) for _, headers in read]
        if context.network is not None:
            context.network.call = call
        try:
            found = self._entry(data, context)
        except PredictionException as error:
            said = json.dumps({"status": int(error.error_code), "is_error": True}).encode()
            return [(error.message.encode(), said)] * len(data)
        finally:
            if context.network is not None:
                context.network.call = None
        if hasattr(found, "tolist"):
            found = found.tolist()
        if not isinstance(found, list):
            raise ValueError(f"handle gave {type(found).__name__}; wanted a list with an item for each request")
        if len(found) != len(data):
            raise ValueError(f"handle gave {len(found)} answers to {len(data)} requests")
        return [_answer(item, each) for item, each in zip(found, context.request_processor, strict=True)]


def load(folder: Path) -> Service:
    """Import the handler of a version's folder, and initialise it. Raises what it raises, and LookupError: no entry."""
    from edge_runtime.torchserve import handlers

    settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    archive = folder / ARCHIVE_FOLDER
    manifest = json.loads((archive / MANIFEST_FILE).read_text(encoding="utf-8"))
    handlers.offer_modules()
    sys.path.insert(0, str(archive))
    sys.modules.pop("model", None)  # an archive's own model.py goes by that name
    os.chdir(archive)  # TorchServe's workers stand in the archive
    network = settings.get("network")
    context = handlers.HandlerContext(
        settings["model_name"],
        manifest,
        {
            "model_dir": str(archive),
            "gpu_id": None,
            "batch_size": settings.get("batch_size", 1),
            "server_name": "edge-runtime",
            "server_version": "0.12.0",
            "limit_max_image_pixels": True,
        },
        settings.get("model_yaml_config", {}),
        handlers.ServedNetwork(network["model"], network["version"], network["inputs"]) if network else None,
    )
    entry, initialize = _entry(manifest["model"]["handler"], archive)
    initialize(context)
    return Service(entry, context)


def infer(service: Service, inputs: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Answer a batch of requests."""
    columns = [inputs[name].reshape(-1).tolist() for name in HANDLER_INPUTS]
    answers = service.predict(columns[0], columns[1], context.infer)
    return {
        name: np.array([*(each[at] for each in answers), None], dtype=object)[:-1].reshape(-1, 1)
        for at, name in enumerate(HANDLER_OUTPUTS)
    }


# ---- private --------------------------------------------------------------------------------------------------------


def _entry(handler: str, archive: Path) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]:
    """Return the functions that answer a batch and initialise. Raises LookupError: the handler has neither."""
    from edge_runtime.torchserve.handlers import BUILT_IN, BaseHandler, list_classes_from_module

    name, _, function = handler.partition(":")
    stem = Path(name).name.removesuffix(".py")
    if not (archive / f"{stem}.py").is_file():
        kind = BUILT_IN.get(stem)
        if kind is None:
            raise LookupError(f"the archive has no {stem}.py; TorchServe's own handlers are {', '.join(BUILT_IN)}")
        built_in = kind()
        return built_in.handle, built_in.initialize
    module = importlib.import_module(stem)
    named = getattr(module, function or "handle", None)
    if callable(named) and not isinstance(named, type):
        return named, lambda context: named(None, context)
    found = [each for each in list_classes_from_module(module) if hasattr(each, "handle")]
    if len(found) > 1:
        found = [each for each in found if issubclass(each, BaseHandler)] or found
        # The last of a line of subclasses is the handler.
        found = [each for each in found if not any(other is not each and issubclass(other, each) for other in found)]
    if len(found) != 1:
        classes = ", ".join(each.__name__ for each in found) or "none"
        raise LookupError(f"{stem}.py: wanted a function handle(data, context) or one class with handle, got {classes}")
    service = found[0]()
    return service.handle, service.initialize


def _is_error(request: bytes) -> bool:
    """Whether a request is the answer of a handler that failed, which a pipeline gave to the next one."""
    return b'"is_error"' in request and json.loads(request).get("is_error") is True


def _request(body: bytes, request: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request as handlers get it: values by the names of its parts, and its headers."""
    said = json.loads(request) if request else {}
    parts = said.get("parts") or [["body", "", len(body)]]
    row: dict[str, Any] = {}
    headers: dict[str, Any] = dict(said.get("headers", {}))
    at = 0
    for name, kind, nbytes in parts:
        row[name] = _value(body[at : at + nbytes], kind)
        if kind:
            headers[name] = {"content-type": kind}
        at += nbytes
    return row, headers


def _value(data: bytes, kind: str) -> Any:
    if kind == JSON_KIND:
        return json.loads(data)
    if kind.startswith("text/"):
        return data.decode()
    return bytearray(data)


def _answer(item: Any, processor: Any) -> tuple[bytes, bytes]:
    headers = dict(processor.response_headers)
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, bytes | bytearray):
        headers.setdefault("content-type", "application/octet-stream")
        data = bytes(item)
    elif isinstance(item, str):
        headers.setdefault("content-type", "text/plain; charset=utf-8")
        data = item.encode()
    else:
        headers.setdefault("content-type", JSON_KIND)
        data = json.dumps(item, ensure_ascii=False, default=_as_list).encode()
    return data, json.dumps({"status": processor.status, "headers": headers}).encode()


def _as_list(value: Any) -> Any:
    """Arrays and tensors within an answer."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON has; return text, numbers, lists or dicts")
