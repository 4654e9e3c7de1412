"""The daemon that a candidate is measured through: the real one, in a process that ends with the one that tunes.

Started by `served` as `python -m edge_runtime.tuning.served_child PARENT`, its configuration as JSON on standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from edge_runtime.config.settings import Config
from edge_runtime.daemon.run import serve
from edge_runtime.serving.confinement import confine


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop, for the process of that id."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    with confine(int(arguments[0])):
        return serve(config, lambda: config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
