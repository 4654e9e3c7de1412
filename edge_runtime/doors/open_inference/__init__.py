"""Parts that HTTP and gRPC share: the Open Inference Protocol, and its client."""
