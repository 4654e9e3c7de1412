"""The publisher's tool: a repository of signed models in a folder that any HTTP server can serve.

Runs on a laptop or in CI, never in the daemon. Metadata is TUF 1.0.34, written with tuf's own API. Needs the `publish`
extra. `repository.open_repository` opens a repository; each verb is a function that returns a `Change`, which says what
it will sign and then commits.
"""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

VERB = Verb(
    "repo", "publish signed models: keys, releases, and what groups of devices run", "edge_runtime.publish.command"
)
