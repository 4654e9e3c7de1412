"""Converts between wire v1 bytes and values. No sockets."""
