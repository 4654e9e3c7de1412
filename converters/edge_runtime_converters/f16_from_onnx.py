"""ONNX in fp16: weights and arithmetic of half the size, inputs and outputs unchanged.

By ONNX Runtime's own converter. CPUs without fp16 arithmetic cast to fp32 and back, which is slower than fp32; GPUs,
and ARM since 8.2, gain.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_source import read_onnx
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"


def convert(source: Path, target: Path) -> None:
    """Write an ONNX model in fp16. Raises ConversionFailed; `target` is then unchanged."""
    model = read_onnx(source, EXTRA)
    float16 = import_library("onnxruntime.transformers.float16", EXTRA)
    with failing_as(f"{source}: cannot be written in fp16"), whole(target) as output:
        made = float16.convert_float_to_float16(model, keep_io_types=True)
        output.write_bytes(made.SerializeToString())


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx", "fp16"))
