"""Serve a folder of models over ZeroMQ, and over HTTP, gRPC or MQTT where asked to, until SIGTERM or Ctrl-C.

Each model is a folder <models>/<name>/<version>/ with its artifacts (model.onnx, model.xml + model.bin). The log
goes to stderr: text on a terminal, JSON otherwise and with --json.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from edge_runtime import plugins
from edge_runtime.cli.arguments import add_options
from edge_runtime.cli.main import EXIT_FAILED, EXIT_USAGE
from edge_runtime.cli.screen import Screen
from edge_runtime.config.endpoints import client_endpoint, daemon_endpoints, state_folder
from edge_runtime.config.loading import load_config
from edge_runtime.config.settings import Config
from edge_runtime.daemon.early_parent import begin_early_parent
from edge_runtime.daemon.parts import ReadSettings, keeps_settings, with_kept
from edge_runtime.daemon.state_lock import StateLock
from edge_runtime.doors.binding import EarlySocket, listen_early
from edge_runtime.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`; each overrides the configuration file."""
    parser.add_argument("--config", metavar="F", type=Path, help="default: $EDGE_RUNTIME_CONFIG, else"
                        " /etc/edge-runtime/config.toml when there")  # fmt: skip
    parser.add_argument("--models", metavar="DIR", help="folder of models (default: models)")
    parser.add_argument("--model", metavar="NAME=PATH", action="append", help="serve one folder or file as one model;"
                        " repeatable, alone or beside --models")  # fmt: skip
    parser.add_argument(
        "--model-control-mode",
        choices=("none", "poll", "explicit"),
        help="who has models loaded, as with Triton: the start alone, the folder alone, or callers alone"
        " (default: the folder, and callers that may control)",
    )
    parser.add_argument(
        "--load-model",
        metavar="NAME",
        action="append",
        help="with explicit: load this model at the start; repeatable, or * for all",
    )
    parser.add_argument("--python-models", action="store_true", help="allow model.py, which is code")
    parser.add_argument("--state", metavar="DIR", help="folder for what survives a restart (calibration)")
    parser.add_argument("--zmq", metavar="E", action="append", help="infer endpoint, ipc:///path or tcp://host:port;"
                        " repeatable, replaces the default")  # fmt: skip
    parser.add_argument(
        "--control",
        metavar="E",
        help="control endpoint (default: <path>.control beside the first ipc; without one,"
        " control.sock where infer.sock would be)",
    )
    add_options(parser, plugins.options("serve"))
    parser.add_argument("--profile", metavar="NAME", help="device profile (default: the one that fits this device)")
    parser.add_argument("--metrics", metavar="PORT", type=int, help="Prometheus on http://127.0.0.1:PORT/metrics")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Serve until a signal, and return the daemon's exit status. A wrong setting in the file is wrong usage too."""
    read_config = partial(_read_config, arguments, screen)
    try:
        settings, lock = _read_settings(_checked(read_config()))
    except ConfigError as error:
        screen.failure(error.message, error.code, error.retryable)
        return EXIT_FAILED if error.retryable else EXIT_USAGE
    early, parent = _listening_control(settings.config), begin_early_parent(settings.config)
    try:
        from edge_runtime.daemon.run import serve  # takes most of a second on a small device

        folder = settings.folder
        return serve(settings, lambda: with_kept(read_config(), folder, is_start=False), early, parent, lock)
    finally:
        if early is not None:
            early.release()
        if parent is not None:
            parent.drop()
        if lock is not None:
            lock.release()


def _read_settings(own: Config) -> tuple[ReadSettings, StateLock | None]:
    """Return the settings with what parts keep, and the lock of the state: taken before any of it is read.

    Else a start beside a running daemon would read, and count as a try, what that one is about to change. Raises
    ConfigError.
    """
    if not keeps_settings(own):
        return ReadSettings(own, own), None
    folder = state_folder(own.state)
    lock = StateLock(folder, may_share=False)
    lock.take()
    try:
        return with_kept(own, folder, is_start=True), lock
    except BaseException:
        lock.release()
        raise


def _listening_control(config: Config) -> EarlySocket | None:
    """Return the control endpoint, by which a verb learns that a daemon starts; None where it is not a file."""
    try:
        _, control = daemon_endpoints(config.zmq.endpoints, config.zmq.control)
    except ConfigError:
        return None  # said when it is bound
    is_file = control.startswith("ipc://") and not control.startswith("ipc://@")
    return listen_early(Path(control.removeprefix("ipc://"))) if is_file else None


def _checked(config: Config) -> Config:
    """Return the configuration. Raises ConfigError when it has nothing to serve."""
    folder = config.models_folder
    if folder is not None and Path(folder).is_file():
        path = Path(folder)
        raise ConfigError(
            f"models: {str(path)!r} is a file, wanted a folder of models; to serve this file alone: "
            f"--model {path.stem or 'NAME'}={path}"
        )
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"models: there is no folder {str(Path(folder).absolute())!r}; name one with --models DIR, "
            "where each model is DIR/<name>/<version>/model.onnx, or one model with --model NAME=PATH"
        )
    return config


def _named_models(words: list[str]) -> dict[str, str]:
    """The models of `--model NAME=PATH`, each name once. Raises ConfigError."""
    named: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path:
            raise ConfigError(f"--model: got {word!r}, wanted NAME=PATH, as in digits=/mnt/models")
        if name in named:
            raise ConfigError(f"--model: got {name!r} twice, for {named[name]} and {path}; give each its name")
        named[name] = path
    return named


def _doors_settings(arguments: argparse.Namespace) -> dict[str, str | bool]:
    """Return the settings that the doors' options ask for, by their keys."""
    found: dict[str, str | bool] = {}
    for each in plugins.options("serve"):
        value = getattr(arguments, each.attribute)
        if value not in (None, False):
            found = {**dict.fromkeys(each.keys, value), **found}
    return found


def _read_config(arguments: argparse.Namespace, screen: Screen) -> Config:
    """Read the configuration file, overridden by the command line; called again on SIGHUP."""
    return load_config(
        arguments.config,
        {
            "models": arguments.models,
            "model": _named_models(arguments.model or []) or None,
            "model_control": arguments.model_control_mode,
            "load_models": arguments.load_model,
            "python_models": True if arguments.python_models else None,
            "state": arguments.state,
            "profile": arguments.profile,
            "zmq.endpoints": [client_endpoint(each) for each in arguments.zmq] if arguments.zmq else None,
            "zmq.control": client_endpoint(arguments.control) if arguments.control else None,
            **_doors_settings(arguments),
            "metrics.port": arguments.metrics,
            "log.format": "json" if screen.wants_json else None,
        },
    )
