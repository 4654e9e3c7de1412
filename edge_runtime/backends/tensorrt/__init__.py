"""TensorRT: engines, their builds, CUDA."""
