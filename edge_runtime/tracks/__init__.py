"""Objects that keep their identity from frame to frame, and what they do: zones, lines, counts, alarms."""
