"""gRPC: HTTP/2 without I/O, its sockets, the messages of the Open Inference Protocol, its client's side."""

from edge_runtime.doors.door import TLS_OPTIONS, DoorDeclaration
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.open_inference import TOKEN_OPTION
from edge_runtime.plugins import Option

DOOR = DoorDeclaration(
    "grpc",
    "edge_runtime.doors.grpc.door:open_door",
    GrpcSettings,
    extra="grpc",
    options=(
        Option("--grpc", "A", "the same over gRPC", ("grpc.endpoint",)),
        Option("--grpc-control", "A", "the same over gRPC", ("grpc.control",)),
    ),
    schemes=("grpc", "grpcs", "grpc+unix"),
    form="grpc[s]://host[:port]",
    client="edge_runtime.doors.open_inference.command:connect",
    client_class="OipClient",
    client_options=(TOKEN_OPTION, *TLS_OPTIONS),
    offers=("models load", "models unload"),
)
