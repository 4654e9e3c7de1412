"""The publisher's tool: a repository of signed models in a folder that any HTTP server can serve (DESIGN 8).

Runs on a laptop or in CI, never in the daemon. Metadata is TUF 1.0.34, written with tuf's own API. Needs the `publish`
extra. `repository.open_repository` is the way in; each verb is a function that gives a `Change` back, which says what
it will sign and then commits.
"""
