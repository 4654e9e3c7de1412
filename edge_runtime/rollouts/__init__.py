"""A rollout that stops itself: it raises a release's signed percentage step by step, by what a fleet's devices tell.

Runs in the process of an operator or an agent, beside the broker and the repository, never in a server: it holds the
key of the group. `edge-runtime repo rollout` is its verb.
"""
