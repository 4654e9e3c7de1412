"""ZeroMQ: ZMTP without I/O, its sockets, its messages, its clients, and the socket that hands memory to clients."""
