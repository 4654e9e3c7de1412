"""What a model is that no backend loads, and how it becomes one that is served. Pure: looks at names only."""

from __future__ import annotations

import shlex

from edge_runtime.repository.names import suffix_of

_CONVERTED = {
    ".pt": ("a PyTorch model", "onnx"),
    ".pth": ("a PyTorch model", "onnx"),
    ".pt2": ("a PyTorch program", "onnx"),
    ".skops": ("a scikit-learn model", "onnx"),
    ".ubj": ("an XGBoost model", "onnx"),
    ".tflite": ("a TensorFlow Lite model", "openvino"),
}
"""By suffix: what it is, and what `edge-runtime convert` makes of it."""

_KERAS = (".keras", ".h5")
_PICKLED = (".pkl", ".pickle", ".joblib")
"""Reading one runs the code in it, which is why nothing here does."""

_SAVED_MODEL = "saved_model.pb"


def conversion_advice(path: str) -> str | None:
    """What the file is and what to do, "is a PyTorch model: edge-runtime convert ..."; None: no model that is known."""
    folder, _, name = path.rpartition("/")
    suffix = suffix_of(name).lower()
    if name == _SAVED_MODEL:
        return f"is a TensorFlow SavedModel: edge-runtime convert {shlex.quote(folder or '.')} --to openvino"
    if suffix in _CONVERTED:
        kind, target = _CONVERTED[suffix]
        return f"is {kind}: edge-runtime convert {shlex.quote(path)} --to {target}"
    if suffix in _KERAS:
        return (
            "is a Keras model: where it was made, model.export('FOLDER') writes a SavedModel; then "
            "edge-runtime convert FOLDER --to openvino"
        )
    if suffix in _PICKLED:
        return (
            "is a pickle (of scikit-learn?), which holds code: where it was made, skops.io.dump(model, 'model.skops'); "
            "then edge-runtime convert model.skops --to onnx"
        )
    return None
