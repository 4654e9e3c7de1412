"""What a Keras file would run when it is read: looked for in its configuration, before Keras sees the file.

Owns: the rule for layers that a file may have: Keras's own, and none that holds Python code or reads other files.
`safe_mode` of Keras alone was passed by in CVE-2025-1550, CVE-2025-8747, CVE-2025-9905, CVE-2025-9906 and
CVE-2025-49655: each names something that is no layer, or a layer of the list below. Runs nothing.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.libraries import failing_as, import_library

EXTRA = "convert-keras"

MAX_CONFIG_BYTES = 64 << 20
"""Of the description of all layers; one of a thousand layers has 1 MB."""

_MODULES = frozenset(
    ("", "keras", "keras.layers", "keras.models", "keras.initializers", "keras.regularizers", "keras.constraints",
     "keras.dtype_policies", "keras.quantizers", "keras.src.models.functional", "keras.src.models.sequential")
)  # fmt: skip
"""Modules of Keras that have layers and what layers are made of; "" in the format of Keras 2, which names none."""

_CODE = frozenset(("Lambda", "__lambda__", "function", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"))
"""Python code, functions by name, or a program of another library."""

_READERS = frozenset(("StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "IndexLookup"))
"""Layers of text, which may take their words from a file anywhere; none becomes ONNX."""

_ADVICE = "Nothing of it was run. Where it was made, model.export('FOLDER') writes a SavedModel, which OpenVINO serves"


def is_zip(source: Path) -> bool:
    """Return whether a file is in Keras's own format (.keras), rather than HDF5 (.h5)."""
    with source.open("rb") as file:
        return file.read(2) == b"PK"


def check_keras(source: Path) -> None:
    """Raise ConversionFailed unless all that a file has are layers of Keras, none of which runs what is in the file.

    HDF5 is read by h5py, which comes with Keras: only in a confined process.
    """
    config = _config_of(source)
    if isinstance(config, dict):
        config.pop("compile_config", None)  # losses and metrics, which are never read
    for each in _classes(config):
        name, module = str(each.get("class_name")), str(each.get("module") or "")
        registered = str(each.get("registered_name") or name)
        if name in _CODE:
            raise ConversionFailed(
                f"{source}: {_called(each)} is a {name}, which holds or names Python code. {_ADVICE}"
            )
        if name in _READERS:
            raise ConversionFailed(f"{source}: {_called(each)} is a {name}, which is no arithmetic. {_ADVICE}")
        if not name.isidentifier() or module not in _MODULES or registered != name:
            shown = f"{module}.{name}" if module else name
            raise ConversionFailed(
                f"{source}: {_called(each)} is {shown[:100]!r} ({registered[:100]!r}), which is not of Keras "
                f"itself, so it is somebody's Python code. {_ADVICE}"
            )


# ---- private --------------------------------------------------------------------------------------------------------


def _config_of(source: Path) -> Any:
    """Return the description of a model's layers. Raises ConversionFailed: damaged, or weights alone."""
    text = _zip_config(source) if is_zip(source) else _hdf5_config(source)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConversionFailed(
            f"{source}: the description of its layers is damaged ({error}); copy it again"
        ) from error


def _zip_config(source: Path) -> bytes:
    try:
        with zipfile.ZipFile(source) as archive, archive.open("config.json") as member:
            text = member.read(MAX_CONFIG_BYTES + 1)
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise ConversionFailed(f"{source}: a damaged Keras file ({error}); copy it again") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConversionFailed(f"{source}: the description of its layers has more than {MAX_CONFIG_BYTES} bytes")
    return text


def _hdf5_config(source: Path) -> bytes:
    h5py = import_library("h5py", EXTRA)
    with failing_as(f"{source}: cannot be read as HDF5"), h5py.File(source, "r") as file:
        found = file.attrs.get("model_config")
    if not isinstance(found, (bytes, str)):
        raise ConversionFailed(
            f"{source}: holds weights alone, without a program; where it was made, model.save('model.keras')"
        )
    return found if isinstance(found, bytes) else found.encode()


def _classes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every object that names a class, however deep."""
    waiting = [config]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "class_name" in each:
                yield each
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _called(entry: dict[str, Any]) -> str:
    """Name a layer by what its maker called it."""
    config = entry.get("config")
    name = config.get("name") if isinstance(config, dict) else None
    return f"its layer {name[:100]!r}" if isinstance(name, str) else "a part of it"
