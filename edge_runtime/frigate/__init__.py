"""The detector socket of Frigate's cameras."""
