"""Sequences: models that keep state from one request to the next, in their hosts."""

from edge_runtime.kept_state import StateDeclaration

STATES = StateDeclaration(
    "sequences",
    instance="edge_runtime.sequences.states:stateful",
    form="edge_runtime.sequences.snapshots:state_form",
    table="edge_runtime.sequences.live:LiveSequences",
    key="edge_runtime.sequences.snapshots:key_of",
)
