"""HTTP: heads and bodies, connections, the messages of the Open Inference Protocol, its client's side."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.doors.http.settings import HttpSettings

DOOR = DoorDeclaration(
    "http",
    "edge_runtime.doors.http.door:open_door",
    HttpSettings,
    extra="http",
    schemes=("http", "https", "http+unix"),
    client="edge_runtime.doors.open_inference.command:connect",
    offers=("models load", "models unload"),
)
