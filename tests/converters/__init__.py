"""Conversions, for real where their libraries are installed (`make test-converters`), else skipped with the reason."""
