"""Bytes in, bytes out. Transports know no model."""
