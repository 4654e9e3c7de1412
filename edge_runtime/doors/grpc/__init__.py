"""gRPC: HTTP/2 without I/O, its sockets, the messages of the Open Inference Protocol, its client's side."""
