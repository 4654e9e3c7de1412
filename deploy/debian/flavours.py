"""The packages beside edge-runtime: libraries that its own leaves out, and the client for the distribution's Python.

Owns: which extras each has, and its words. Builds nothing: build_deb.py does.
"""

from __future__ import annotations

from dataclasses import dataclass

DAEMON = "edge-runtime"
CLIENT = "python3-edge-runtime"

EXTRAS = ("onnxruntime", "litert", "http", "grpc", "mqtt", "pictures", "text", "audio", "update", "prometheus")
"""Of the daemon's package."""


@dataclass(frozen=True)
class AddedPackage:
    """A package that adds libraries to the daemon's environment, all of one version with it.

    extra: whose libraries it has. on: the added package whose libraries it needs, "" for the daemon's alone. summary,
    text: its description; lines of text have 78 characters at most. drop_in: of deploy/systemd/drop-ins, for what the
    service must be allowed; it holds while the package is installed. licences: what its copyright file adds.
    """

    extra: str
    summary: str
    text: str
    on: str = ""
    drop_in: str = ""
    licences: str = ""


ADDED = {
    "edge-runtime-openvino": AddedPackage(
        extra="openvino",
        summary="OpenVINO for edge-runtime",
        text="""\
 Models run by OpenVINO on CPUs, and Intel's GPUs and NPUs: ONNX files, its own
 IR, SavedModels and PaddlePaddle's. The service may make code at run time
 while this is installed, as OpenVINO does.
""",
        drop_in="openvino.conf",
    ),
    "edge-runtime-llm": AddedPackage(
        extra="llm",
        on="edge-runtime-openvino",
        summary="language models for edge-runtime",
        text="""\
 Language models answer many requests at once, by OpenVINO GenAI, over the
 protocols of OpenAI and Ollama and over all others.
""",
    ),
    "edge-runtime-camera": AddedPackage(
        extra="camera",
        summary="cameras and microphones for edge-runtime",
        text="""\
 Cameras over RTSP, HTTP and V4L2, files of video, and microphones, by PyAV,
 which is FFmpeg with its decoders.
""",
        licences="""\
 PyAV's wheel holds FFmpeg with x264 and x265, which are under the GPL, version 2 or later. On Debian systems, its
 complete text is in /usr/share/common-licenses/GPL-2.
""",
    ),
    "edge-runtime-enrolment": AddedPackage(
        extra="enrolment",
        summary="enrolment for edge-runtime",
        text="""\
 A device of a fleet gets its certificate, its configuration and its root of
 trust by one command, and renews the certificate before its end. Has the
 authority that gives them, too.
""",
        licences="""\
 The wheel of cryptography holds OpenSSL, which is under the Apache License 2.0.
""",
    ),
}

PACKAGES = (DAEMON, *ADDED, CLIENT)

FLAVOURS = "flavours"
"""A file in the daemon's environment: an extra and the package that adds it, one a line, for edge_runtime/extras.py."""

CLIENT_HOME = "usr/lib/python3-edge-runtime"
CLIENT_EXTRAS = ("mqtt",)
"""With what MqttClient takes. OipClient's gRPC takes 19 MB more; over HTTP it needs nothing."""

CLIENT_PATH = "usr/lib/python3/dist-packages/python3-edge-runtime.pth"
"""Puts CLIENT_HOME last on the path of the distribution's Python: it hides nothing of that."""

OF_DISTRIBUTION = {
    "numpy": "python3-numpy",
    "pyzmq": "python3-zmq",
    "msgpack": "python3-msgpack",
    "psutil": "python3-psutil",
}
"""What the client takes from the distribution: a wheel, and the package in its place."""


def chain(package: str) -> list[str]:
    """Return an added package and those that it needs, itself last."""
    found = [package]
    while on := ADDED[found[0]].on:
        found.insert(0, on)
    return found


def flavour_lines() -> str:
    """The file FLAVOURS."""
    return "".join(f"{added.extra} {package}\n" for package, added in ADDED.items())
