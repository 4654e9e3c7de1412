"""`python -m edge_runtime` is `edge-runtime`."""

from __future__ import annotations

import sys

from edge_runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
