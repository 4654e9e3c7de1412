"""The tune of a model whose backend chooses a table of its settings by itself: each choice is served by a real daemon.

Called by the command line. Thread: the caller's.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from edge_runtime import plugins
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.table_choice import TableChoice, TableTrial, Value
from edge_runtime.tuning.applying import with_choice
from edge_runtime.tuning.daemons import running_daemon
from edge_runtime.tuning.folders import ModelCopy, tune_folder
from edge_runtime.tuning.options import TunedDevice, TuneOptions
from edge_runtime.tuning.tune import Show, settings_text, trial_config
from edge_runtime.typed_toml import parse_toml

Tuner = Callable[[TableTrial], TableChoice]


def tuner_of(version: VersionFolder) -> tuple[Tuner, str] | None:
    """The tuner of the backend that reads a version's files, and the table that it chooses; None where none has one."""
    names = {path.name for path in version.files.values()}
    for name in plugins.names("backends"):
        declaration = plugins.declared("backends", name)
        if declaration.tuner and names.intersection(declaration.artifacts):
            return plugins.named(declaration.tuner), declaration.tuned_table
    return None


def tune_table(
    model: ModelFolder,
    version: VersionFolder,
    device: TunedDevice,
    options: TuneOptions,
    *,
    tuner: tuple[Tuner, str],
    show: Show,
) -> TableChoice:
    """Have a tuner choose. Raises EdgeRuntimeError: the model cannot be served; ConfigError: another tune runs."""
    choose, table = tuner
    text, began_s, numbers = settings_text(model), time.monotonic(), itertools.count()
    with tune_folder(device.state) as root:
        copy = ModelCopy(root / "model", version, model.path)
        shutil.copytree(version.path, copy.folder)

        @contextmanager
        def serve(values: Mapping[str, Value]) -> Iterator[str]:
            copy.write_settings(with_choice(text, values, (), "model.toml", table))
            place = root / f"daemon-{next(numbers)}"
            place.mkdir()
            with running_daemon(
                trial_config(device, copy.models, place / "state"), model.name, place / "log"
            ) as daemon:
                daemon.wait_ready()
                yield daemon.endpoint

        def shown(step: str, detail: str) -> None:
            show(step, detail, min((time.monotonic() - began_s) / options.time_s, 1.0))

        objective = options.objective
        trial = TableTrial(
            model.name,
            parse_toml(text, "model.toml").get(table, {}),
            objective.quantile,
            objective.limit_s,
            began_s + options.time_s,
            serve,
            shown,
        )
        return choose(trial)
