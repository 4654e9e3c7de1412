"""PyTorch: TorchScript and exported programs."""
