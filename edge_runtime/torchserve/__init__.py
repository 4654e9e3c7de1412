"""What TorchServe's users bring: archives, handlers, its requests."""
