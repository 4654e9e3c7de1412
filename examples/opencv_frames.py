"""Ask a model with the frames of a camera that OpenCV reads, through memory that the daemon shares: no frame is sent.

    pip install opencv-python-headless
    python examples/opencv_frames.py MODEL [0 | /dev/video0 | rtsp://… | FILE] [ENDPOINT]

The model declares `from = "frames"` and `color = "bgr"` for its picture (docs/pictures.md): frames go as they come.
"""

from __future__ import annotations

import sys

import cv2
import numpy as np

from edge_runtime import Client


def main(model: str, source: str = "0", endpoint: str | None = None) -> None:
    """Print what each frame shows, until there are no more."""
    camera = cv2.VideoCapture(int(source) if source.isdigit() else source)
    is_there, first = camera.read()
    if not is_there:
        raise SystemExit(f"{source}: OpenCV reads no picture")
    with Client(endpoint) as client:
        frame = client.allocate(first.shape, np.uint8)  # a numpy array in shared memory
        frame[:] = first
        while is_there:
            result = client.infer(model, picture=frame)
            print(result.answers[0])
            is_there, _ = camera.read(frame)  # OpenCV writes where the model reads


if __name__ == "__main__":
    main(*sys.argv[1:])
