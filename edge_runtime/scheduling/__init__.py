"""Decides when each request runs: pure rules, the queues they read, and the threads that run jobs. Knows no model."""
