"""Readers of ONNX files, without a library."""
