"""When which request runs: pure rules, the queues they read, and the threads that carry them out. Knows no model."""
