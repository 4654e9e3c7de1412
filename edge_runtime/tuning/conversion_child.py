"""The child process in which an int8 model is made.

Started by `conversion` as `python -m edge_runtime.tuning.conversion_child PARENT`, a request as JSON on standard input;
answers with one finding as JSON. The converters' libraries take hundreds of MB and seconds, and neither stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.serving.confinement import confine
from edge_runtime.tuning.arrays_file import read_arrays


class Request(Struct, frozen=True):
    """An ONNX model, the .onnx or .xml to be made of it, and the file of inputs to calibrate with."""

    source: str
    target: str
    calibration: str


class Finding(Struct, frozen=True):
    """fault: why nothing was made, "" where it was."""

    fault: str = ""


def main(arguments: Sequence[str]) -> int:
    """Convert what standard input names, for the process of that id. Exit status 0 when there is a finding."""
    with confine(int(arguments[0])) as answer:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        try:
            _convert(request)
            finding = Finding()
        except ConversionFailed as error:
            finding = Finding(error.message)
        except MemoryError:
            finding = Finding("there is not enough memory for it")
        except Exception as error:  # noqa: BLE001  what a library raises unexpectedly is a failed conversion too
            finding = Finding(f"{type(error).__name__}: {error}"[:600])
        answer.write(msgspec.json.encode(finding))
    return 0


def _convert(request: Request) -> None:
    source, target = Path(request.source), Path(request.target)
    calibration = read_arrays(Path(request.calibration))
    if target.suffix == ".xml":
        from edge_runtime_converters.openvino_from_onnx import convert

        convert(source, target, precision="int8", calibration=calibration)
    else:
        from edge_runtime_converters.int8_from_onnx import quantise

        quantise(source, target, calibration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
