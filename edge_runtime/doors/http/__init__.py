"""HTTP: heads and bodies, connections, the messages of the Open Inference Protocol, its client's side."""
