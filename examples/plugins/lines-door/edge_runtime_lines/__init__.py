"""A door for lines of JSON over TCP: `echo '{"model": "mlp", "inputs": {...}}' | nc 127.0.0.1 7070`."""

from msgspec import Struct

from edge_runtime.doors.door import DoorDeclaration


class LinesSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[lines]` of config.toml."""

    endpoint: str = "127.0.0.1:7070"
    max_line_bytes: int = 1 << 20


DOOR = DoorDeclaration("lines", opens="edge_runtime_lines.door:LinesDoor", settings=LinesSettings)
