"""Model folders, and the versions loaded of them: read, load, warm up, calibrate, place in memory, swap."""
