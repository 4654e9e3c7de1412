"""HTTP: heads and bodies, connections, the messages of the Open Inference Protocol, its client's side."""

from edge_runtime.doors.door import TLS_OPTIONS, DoorDeclaration
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference import TOKEN_OPTION
from edge_runtime.plugins import Option

DOOR = DoorDeclaration(
    "http",
    "edge_runtime.doors.http.door:open_door",
    HttpSettings,
    extra="http",
    options=(
        Option(
            "--http",
            "A",
            "also serve the Open Inference Protocol over HTTP, at host:port or unix:/path",
            ("http.endpoint",),
        ),
        Option("--http-control", "A", "HTTP address on which models are loaded and unloaded, too", ("http.control",)),
        Option(
            "--allow-control",
            "",
            "allow that on the endpoints of HTTP and gRPC themselves, on this machine or with tokens",
            ("http.control", "grpc.control"),
        ),
        Option(
            "--client-shared-memory",
            "",
            "let clients of HTTP and gRPC name POSIX shared memory of their own, as Triton's do",
            ("shared_memory.client_named",),
        ),
        Option(
            "--torchserve",
            "",
            "let HTTP answer TorchServe's paths too: /predictions, /ping, /models",
            ("http.torchserve",),
        ),
    ),
    schemes=("http", "https", "http+unix"),
    form="http[s]://host[:port]",
    client="edge_runtime.doors.open_inference.command:connect",
    client_class="OipClient",
    client_options=(TOKEN_OPTION, *TLS_OPTIONS),
    offers=("models load", "models unload"),
)
