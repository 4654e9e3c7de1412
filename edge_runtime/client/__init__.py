"""Clients: arrays in, arrays out. core.py is what they share without a socket; links carry its calls."""
