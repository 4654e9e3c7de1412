"""Metrics, logs, host readings, and notices to systemd."""
