"""TorchServe for its users: archives, handlers, its requests."""
