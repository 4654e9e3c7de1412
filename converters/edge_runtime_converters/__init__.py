"""Converters: a trained model of any supported library becomes an artifact that a device serves.

Each `<target>_from_<source>.py` is one step, to import or to run (`python -m edge_runtime_converters.onnx_from_sklearn
MODEL`); `conversion.py` joins steps in a child process and compares the result with the source. Each library is
imported inside the step that needs it. Converters import `edge_runtime`; it never imports them.
"""
