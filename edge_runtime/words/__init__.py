"""Answers that need no picture: classes, numbers, text, embeddings, and tags of tokens."""
