"""What NVIDIA Triton's users bring: config.pbtxt, models of its python backend, its words for a model."""

CONFIG_FILE = "config.pbtxt"
"""Settings of a model, beside its version folders."""

CONFIG_OPTION = "triton.config"
"""The option of a load in which a `model.py` gets them, as JSON."""
