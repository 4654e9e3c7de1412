"""Pictures as inputs, and what outputs mean: classes, boxes, masks."""
