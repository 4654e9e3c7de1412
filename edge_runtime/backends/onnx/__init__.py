"""What stands in an ONNX file, read without a library."""
