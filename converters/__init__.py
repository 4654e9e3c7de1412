"""Converters: a trained model, of whatever library, becomes an artifact that a device serves.

Installed as `edge_runtime_converters`. Each `<target>_from_<source>.py` is one step and can be imported or run
(`python -m edge_runtime_converters.onnx_from_sklearn MODEL`); `conversion.py` joins steps, in a process of its own, and
compares what came out with the source. Each library is imported inside the step that needs it. May import
`edge_runtime`; only its `cli` and `tuning` may import this.
"""
