"""The folder of models: which versions and artifacts are there, which are wanted, and what changed. Loads nothing."""
