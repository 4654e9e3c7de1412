"""Typed settings and how they are read from TOML."""
