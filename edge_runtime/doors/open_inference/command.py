"""The client of a verb of the command line, over HTTP or gRPC: `--connect http://host:port`."""

from __future__ import annotations

import argparse

from edge_runtime.cli.connection import refuse_options
from edge_runtime.doors.open_inference.client import OipClient

OPTIONS = ("token_file", "ca_file", "cert_file", "key_file")
"""Of `OipClient` and of the command line alike."""


def connect(arguments: argparse.Namespace, url: str) -> OipClient:
    """Connect to a server. Raises ConfigError for options of other doors."""
    refuse_options(arguments, url, ("control", "curve_keys", "password_file"), "not for HTTP and gRPC")
    return OipClient(url, **{option: getattr(arguments, option) for option in OPTIONS})
