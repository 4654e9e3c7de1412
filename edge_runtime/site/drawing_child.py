"""A child of the sandbox that draws pictures, one after the other: its libraries are imported once.

drawn_pictures.py starts it, and is the other end of its channel: a line with a DrawTask (pictures/drawing.py) there, a
line with why it could not be drawn back.
"""

from __future__ import annotations

import socket

import msgspec
from msgspec import Struct

from edge_runtime.pictures.drawing import DrawTask, draw_in_child, import_pillow
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import bound_data

DATA_BYTES = 1 << 30
"""The largest picture that a host decodes takes 200 MB as pixels, its drawn copy as much again."""


class DrawerTask(Struct, frozen=True):
    """The task of the child. channel: the descriptor of its socket."""

    channel: int


def draw_pictures(task: DrawerTask, progress: ShowProgress) -> None:
    """Draw what is asked for until the channel is closed; a line that is "" tells of each that it is drawn."""
    import_pillow()  # now, and not with the first picture
    bound_data(DATA_BYTES)
    with socket.socket(fileno=task.channel) as channel, channel.makefile("rb") as lines:
        for line in lines:
            reason = ""
            try:
                draw_in_child(msgspec.json.decode(line, type=DrawTask), progress)
            except Exception as error:  # noqa: BLE001 (whatever a picture makes Pillow raise; the next may be good)
                reason = f"{type(error).__name__}: {error}"
            channel.sendall(msgspec.json.encode(reason[:1000]) + b"\n")
