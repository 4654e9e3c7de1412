"""PyTorch: runs TorchScript and exported programs."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="pytorch",
    factory="edge_runtime.backends.pytorch.backend:PyTorchBackend",
    artifacts=("model.pt", "model.pt2"),
    libraries=("torch",),
    # No extra brings it: each device needs another build, and PyPI's brings gigabytes of CUDA. Source:
    # https://pytorch.org/get-started/locally.
    advice="install it with: pip install torch --index-url https://download.pytorch.org/whl/cpu",
    load_cost=5,
    prepare="edge_runtime.backends.pytorch.backend:prepare_pytorch",
)
