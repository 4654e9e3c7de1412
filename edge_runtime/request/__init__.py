"""The way of a request behind its door: plan, admission, queue, batch, run, reply. Knows no library and no socket."""
