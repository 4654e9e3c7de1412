"""A publisher with one team and one group, its releases of models as users publish them, and devices that take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge_runtime.config.settings import Config, LimitSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.publish.assignments import assign
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import PreparedRelease, ReleaseOptions, prepare_release
from edge_runtime.publish.roles import add_group, add_team
from tests.contract.updates.updated_device import UpdatedDevice, update_settings
from tests.fakes.publishing import Publisher

TEAM, GROUP = "makers", "line"


def founded(folder: Path) -> Publisher:
    """A repository in `folder`, with its team and its group."""
    made = Publisher(folder / "repository").found()
    made.carry_out(lambda repository: add_team(repository, TEAM, NewKeys(is_online=True)))
    made.carry_out(lambda repository: add_group(repository, GROUP, NewKeys(is_online=True)))
    return made


def publish(publisher: Publisher, path: Path, golden: Path | None = None) -> PreparedRelease:
    """Publish the newest version of a model's folder, and let the group run it."""
    with publisher.opened() as repository:
        prepared = prepare_release(repository, ReleaseOptions(team=TEAM, path=path, golden=golden))
        prepared.change.commit()
    publisher.carry_out(lambda repository: assign(repository, GROUP, path.name, prepared.manifest.version, 100.0))
    return prepared


def device_config(publisher: Publisher, home: Path, update: Mapping[str, Any] | None = None, **settings: Any) -> Config:
    """The configuration of a device that follows the publisher's folder. update: changes of `[update]`."""
    (home / "models").mkdir(parents=True, exist_ok=True)
    follows = {"folder": str(publisher.path), "group": GROUP, **(update or {})}
    return Config(
        models=str(home / "models"),
        state=str(home / "state"),
        watch=False,
        calibrate=False,
        limits=LimitSettings(cores=1),
        update=update_settings(home, publisher.root_1, **follows),
        **settings,
    )


@contextmanager
def device(
    publisher: Publisher, home: Path, update: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[UpdatedDevice]:
    """Such a device; its state outlives it."""
    with Runtime(core=assemble_core(device_config(publisher, home, update, **settings))) as runtime:
        yield UpdatedDevice(runtime)
