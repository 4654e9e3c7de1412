"""One device among many, on a broker: its id, its status, and the results that it publishes."""
