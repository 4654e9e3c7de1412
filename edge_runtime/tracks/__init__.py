"""Objects that keep their identity from frame to frame, and what they do: zones, lines, counts, alarms."""

from edge_runtime.site.stage import StageDeclaration

TRACK = StageDeclaration("track", "edge_runtime.tracks.stage:open_stage")
