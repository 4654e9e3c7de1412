"""The type of a verb of the command line, and the verbs that ask or serve the core.

A verb is declared where its capability lies, in a module that is quick to import: `edge-runtime --help` reads all
declarations and runs no verb. shipped.py finds them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from msgspec import Struct


class Verb(Struct, frozen=True):
    """A verb of the command line. summary: for the overview, without a capital or a full stop.

    module: the dotted name of a module with `add_arguments(parser)` and `run(arguments, screen) -> int`, the exit
    status. It is imported when the verb is used; its docstring is the verb's description. status_fields:
    "module:function" of what the capability adds to `edge-runtime status`: a daemon's stats -> name -> text; an empty
    text is left out.
    """

    name: str
    summary: str
    module: str
    status_fields: str = ""

    @property
    def callables(self) -> tuple[str, ...]:
        """The functions that it names."""
        return (f"{self.module}:add_arguments", f"{self.module}:run")

    def load(self) -> Any:
        """Import the module."""
        return import_module(self.module)


SERVE = Verb("serve", "serve a folder of models until told to stop", "edge_runtime.cli.serve")
INFER = Verb("infer", "run a model once and show the answer", "edge_runtime.cli.infer")
MODELS = Verb("models", "list models, show what one takes and gives, load and unload", "edge_runtime.cli.models")
STATUS = Verb("status", "show the daemon's rates, latencies, queues, refusals and memory", "edge_runtime.cli.status")
BENCHMARK = Verb("bench", "measure requests per second and latencies of a running daemon", "edge_runtime.cli.bench")
PROFILE = Verb("profile", "show this device, the profile chosen for it, and its backends", "edge_runtime.cli.profile")
PLUGINS = Verb("plugins", "list plug-ins, and say why one is not used", "edge_runtime.cli.plugins")
COMPLETION = Verb("completion", "print the completion script for bash, zsh or fish", "edge_runtime.cli.completion")
