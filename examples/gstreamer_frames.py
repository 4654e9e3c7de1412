"""Ask a model with the frames of a GStreamer pipeline, whose appsink fills memory that the daemon shares.

    apt install python3-gi gir1.2-gst-plugins-base-1.0 gstreamer1.0-plugins-base
    python examples/gstreamer_frames.py MODEL ["videotestsrc num-buffers=100"] [ENDPOINT]

The model declares `from = "frames"` for its picture (docs/pictures.md). appsink keeps one frame and drops older ones,
so that the newest is run however slow the model is.
"""

from __future__ import annotations

import sys

import gi
import numpy as np

from edge_runtime import Client

gi.require_version("Gst", "1.0")
gi.require_version("GstApp", "1.0")
from gi.repository import Gst, GstApp  # noqa: E402, F401 (after their versions; GstApp gives appsink its methods)

SIZE = (640, 480)
PULL_NS = 10 * 10**9


def main(model: str, source: str = "videotestsrc num-buffers=100", endpoint: str | None = None) -> None:
    """Print what each frame shows, until the pipeline ends."""
    Gst.init(None)
    wide, high = SIZE
    caps = f"video/x-raw,format=RGB,width={wide},height={high}"
    sink = "appsink name=frames max-buffers=1 drop=true sync=false"
    pipeline = Gst.parse_launch(f"{source} ! videoconvert ! videoscale ! {caps} ! {sink}")
    pipeline.set_state(Gst.State.PLAYING)
    frames = pipeline.get_by_name("frames")
    with Client(endpoint) as client:
        frame = client.allocate((high, wide, 3), np.uint8)  # a numpy array in shared memory
        while (sample := frames.try_pull_sample(PULL_NS)) is not None:
            buffer = sample.get_buffer()
            is_mapped, there = buffer.map(Gst.MapFlags.READ)
            if not is_mapped:
                continue
            # A row is padded to four bytes; 640 pixels need none.
            frame[:] = np.frombuffer(there.data, np.uint8, frame.nbytes).reshape(high, wide, 3)
            buffer.unmap(there)
            print(client.infer(model, picture=frame).answers[0])
    pipeline.set_state(Gst.State.NULL)


if __name__ == "__main__":
    main(*sys.argv[1:])
