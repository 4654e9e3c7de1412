"""An input to try a model with, as a JSON request: the golden one of its release, or the sample of its warm-up.

Owns: where one is looked for, and its words in JSON. An input that cannot be read is none: what is wrong with a sample
was said at the load. Thread: any; it reads files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.daemon.core import Core
from edge_runtime.errors import LoadFailed
from edge_runtime.models.servable import Servable
from edge_runtime.models.warmup import declared_sample, read_sample
from edge_runtime.tensors import Array, datatype_name, element_count
from edge_runtime.wire import json_codec

MOST_ELEMENTS = 1 << 18
"""Of all inputs of an example, some 3 MB of JSON: a picture of 224 x 224 as floats has 150,528."""

GOLDEN, WARM_UP = "golden", "warm-up"


def example_of(core: Core, model: str) -> dict[str, Any]:
    """Return the result of `example`. Raises ModelNotFound, NotReady."""
    servable = core.table.resolve(model, None)
    for source, inputs in ((GOLDEN, _golden(core, servable)), (WARM_UP, _sample(core, servable))):
        if inputs is not None:
            return {"source": source, "body": _body(servable, inputs)}
    return {"source": None, "body": None}


# ---- private --------------------------------------------------------------------------------------------------------


def _golden(core: Core, servable: Servable) -> Mapping[str, Array] | None:
    if core.updates is None or core.state is None:
        return None
    from edge_runtime.updates.releases import golden_input  # imported by [update] already

    return golden_input(core.state / "update" / "releases", servable.model, servable.number)


def _sample(core: Core, servable: Servable) -> Mapping[str, Array] | None:
    """The sample that its warm-up ran on, read anew."""
    own, shared = core.config.model.get(servable.model), core.config.models_folder
    if own is None and shared is None:
        return None
    folder = Path(own) if own is not None else Path(shared or "") / servable.model
    within = tuple(os.path.realpath(each) for each in (shared, folder) if each is not None)
    name, config = servable.settings.warmup.inputs, servable.about.config
    try:
        if name is not None:
            return read_sample(name, servable.spec, (folder / str(servable.number), folder), within)
        if config is not None and config.sample is not None:
            return declared_sample(config.sample, servable.spec, folder, within)
    except LoadFailed:
        return None
    return None


def _body(servable: Servable, inputs: Mapping[str, Array]) -> dict[str, Any] | None:
    """The request; None where it is too long, or has bytes that are not a text, which JSON cannot carry."""
    if sum(element_count(array.shape) for array in inputs.values()) > MOST_ELEMENTS:
        return None
    kinds = {spec.name: spec.datatype for spec in servable.spec.inputs}
    found = []
    for name, array in inputs.items():
        kind = kinds.get(name) or datatype_name(array.dtype)
        if kind == "BYTES" and not all(_is_text(each) for each in array.reshape(-1).tolist()):
            return None
        data = json_codec.load_value(json_codec.dumps(json_codec.array_to_json(kind, array)))
        found.append({"name": name, "datatype": kind, "shape": list(array.shape), "data": data})
    return {"inputs": found}


def _is_text(element: str | bytes) -> bool:
    if isinstance(element, str):
        return True
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True
