"""Signed releases: fetched, verified, tried, swapped in, observed, committed or rolled back."""
