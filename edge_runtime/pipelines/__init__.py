"""Served models put together as one."""
