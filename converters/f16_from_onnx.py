"""ONNX in fp16: weights and arithmetic of half the size, inputs and outputs as they were.

By ONNX Runtime's own converter. CPUs without fp16 arithmetic cast there and back, which is slower than fp32; GPUs, and
ARM since 8.2, gain.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.libraries import import_library, reason_of
from edge_runtime_converters.onnx_source import read_onnx
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"


def convert(source: Path, target: Path) -> None:
    """Write an ONNX model in fp16. Raises ConversionFailed; `target` is as it was then."""
    model = read_onnx(source, EXTRA)
    float16 = import_library("onnxruntime.transformers.float16", EXTRA)
    try:
        with whole(target) as output:
            made = float16.convert_float_to_float16(model, keep_io_types=True)
            output.write_bytes(made.SerializeToString())
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"{source}: cannot be written in fp16: {reason_of(error)}") from error


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx", "fp16"))
