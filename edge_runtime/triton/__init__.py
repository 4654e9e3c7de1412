"""What NVIDIA Triton's users bring: config.pbtxt, models of its python backend, its words for a model."""
