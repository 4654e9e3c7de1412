"""gRPC: HTTP/2 without I/O, its sockets, the messages of the Open Inference Protocol, its client's side."""

from edge_runtime.doors.door import DoorDeclaration
from edge_runtime.doors.grpc.settings import GrpcSettings

DOOR = DoorDeclaration(
    "grpc",
    "edge_runtime.doors.grpc.door:open_door",
    GrpcSettings,
    extra="grpc",
    schemes=("grpc", "grpcs", "grpc+unix"),
    client="edge_runtime.doors.open_inference.command:connect",
    offers=("models load", "models unload"),
)
