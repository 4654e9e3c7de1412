"""Model folders, and what is loaded of them: read, load, warm up, calibrate, place in memory, swap."""
