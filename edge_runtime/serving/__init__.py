"""Versions that answer: the live table, how a request reaches one, how one is made ready and replaced."""
