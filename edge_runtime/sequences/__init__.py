"""Sequences: models that keep state from one request to the next, in their hosts."""

from edge_runtime.kept_state import StateDeclaration

STATES = StateDeclaration(
    "sequences",
    instance="edge_runtime.sequences.states:stateful",
    table="edge_runtime.sequences.live:LiveSequences",
)
