"""Putting the parts together: the daemon with its sockets, and the same runtime in process."""
