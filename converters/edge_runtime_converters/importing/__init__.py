"""Other servers' repositories and packages, taken into a models folder: recognised, planned, written, reported."""
