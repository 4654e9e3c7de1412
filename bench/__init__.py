"""Measures the daemon against bare yardsticks in one run: `python -m bench`, or `make bench`.

Every bar is a ratio to something measured in the same run, in interleaved rounds (scenarios.py); absolute figures move
by up to 2x between hours on a shared machine. The load comes from a process of its own (load.c), whose own maximum is
measured beside the rest.
"""
