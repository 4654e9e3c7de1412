"""Backends: the libraries that run artifacts, each in one file."""
