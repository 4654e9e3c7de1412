"""LiteRT, TensorFlow Lite's runtime."""
