"""Models that are Python code."""
