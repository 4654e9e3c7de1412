"""Parts that HTTP and gRPC share: the Open Inference Protocol, and its client."""

from edge_runtime.plugins import Option

TOKEN_OPTION = Option(
    "--token-file", "FILE", "file with the token for http[s]:// and grpc[s]:// (default: $EDGE_RUNTIME_TOKEN)"
)
"""Of the client over HTTP or gRPC, in verbs that ask a daemon."""
