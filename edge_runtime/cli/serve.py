"""Serve a folder of models over ZeroMQ, and MQTT where a broker is named, until SIGTERM or Ctrl-C.

Each model is a folder <models>/<name>/<version>/ with its artifacts (model.onnx, model.xml + model.bin). Loading and
everything after is logged on stderr: text on a terminal, JSON otherwise and with --json.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from edge_runtime.cli.main import EXIT_USAGE
from edge_runtime.cli.screen import Screen
from edge_runtime.config.endpoints import client_endpoint
from edge_runtime.config.loading import load_config
from edge_runtime.config.settings import Config
from edge_runtime.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`; each lies over the configuration file's."""
    parser.add_argument("--config", metavar="F", type=Path, help="default: /etc/edge-runtime/config.toml when there")
    parser.add_argument("--models", metavar="DIR", help="folder of models (default: models)")
    parser.add_argument("--state", metavar="DIR", help="folder for what survives a restart (calibration)")
    parser.add_argument("--zmq", metavar="E", action="append", help="infer endpoint, ipc:///path or tcp://host:port;"
                        " repeatable, replaces the default")  # fmt: skip
    parser.add_argument(
        "--control", metavar="E", help="control endpoint (default: <path>.control beside the first ipc)"
    )
    parser.add_argument("--mqtt", metavar="URL", help="also serve through a broker, mqtt[s]://[user@]host[:port][/DEVICE];"
                        " the device's id is else the host's name")  # fmt: skip
    parser.add_argument("--profile", metavar="NAME", help="device profile (default: the one that fits this device)")
    parser.add_argument("--metrics", metavar="PORT", type=int, help="Prometheus on http://127.0.0.1:PORT/metrics")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Serve until told to stop; the daemon's exit status. A wrong setting in the file is wrong usage too."""
    read_config = partial(_read_config, arguments, screen)
    try:
        config = _checked(read_config())
    except ConfigError as error:
        screen.failure(error.message, error.code, error.retryable)
        return EXIT_USAGE
    from edge_runtime.daemon.run import serve

    return serve(config, read_config)


def _checked(config: Config) -> Config:
    """The configuration itself. Raises ConfigError: there is nothing that it could serve."""
    if config.serves_folder and not Path(config.models).is_dir():
        raise ConfigError(
            f"models: there is no folder {str(Path(config.models).absolute())!r}; name one with --models DIR, "
            "where each model is DIR/<name>/<version>/model.onnx"
        )
    return config


def _read_config(arguments: argparse.Namespace, screen: Screen) -> Config:
    """The configuration file as it is now, with the command line laid over it; read again on SIGHUP."""
    return load_config(
        arguments.config,
        {
            "models": arguments.models,
            "state": arguments.state,
            "profile": arguments.profile,
            "zmq.endpoints": [client_endpoint(each) for each in arguments.zmq] if arguments.zmq else None,
            "zmq.control": client_endpoint(arguments.control) if arguments.control else None,
            "mqtt.url": arguments.mqtt,
            "metrics.port": arguments.metrics,
            "log.format": "json" if screen.wants_json else None,
        },
    )
