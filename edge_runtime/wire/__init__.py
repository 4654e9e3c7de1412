"""Wire v1: bytes to values and back. No sockets."""
