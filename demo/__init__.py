"""The demonstration: two models, real scanned digits, and the programs that made and show them."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # for what imports ONNX Runtime itself, as edge_runtime does
