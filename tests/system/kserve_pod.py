"""An InferenceService's container, started on this machine as KServe would start it. Called by tests of each format.

What KServe does between its objects and a pod is written down from pkg/controller/v1beta1/inferenceservice/utils of its
commit aaac4e294: a service's arguments follow those of its runtime, and {{.Name}} is filled in all over the container.
"""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.broker import free_ports
from tests.system.image_root import NATIVE, ImageRoot, make_volumes, missing
from tests.system.served_probes import LIMIT_S, daemon, wait_for

KSERVE = Path(__file__).parents[2] / "deploy/kserve"
IMAGES = KSERVE.parents[1] / "build/images"
MODELS = "/mnt/models"
"""Where KServe's storage initializer puts a model."""

PORTS = {"--http": 8080, "--grpc": 9000, "--metrics": 9464}


def objects(name: str) -> list[dict[str, Any]]:
    """The objects of one file of deploy/kserve."""
    return list(yaml.safe_load_all((KSERVE / name).read_text()))


def named(file: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects(file)}


def container_of(service: Mapping[str, Any]) -> dict[str, Any]:
    """The container that KServe makes of a service and the runtime that it names."""
    name, model = service["metadata"]["name"], service["spec"]["predictor"]["model"]
    (container,) = named("cluster-serving-runtimes.yaml")[model["runtime"]]["spec"]["containers"]
    merged = {**container, "args": [*container["args"], *model.get("args", ())]}
    found: dict[str, Any] = json.loads(json.dumps(merged).replace("{{.Name}}", name))
    return found


@dataclass(frozen=True)
class Pod:
    """A container that runs here: its ports, and what its readiness probe asks."""

    http: int
    grpc: int
    metrics: int
    probe: str
    running: subprocess.Popen[bytes]

    def wait_until_ready(self) -> None:
        wait_for(self.http, self.probe, self.running)


def words_of(container: Mapping[str, Any], ports: Mapping[str, int], places: Mapping[str, str]) -> list[str]:
    """Its arguments, on other ports and with paths of this machine in the place of the container's."""
    words = []
    for word in container["args"]:
        option, _, value = word.partition("=")
        for inside, here in places.items():
            value = value.replace(inside, here)
        if option in PORTS:
            assert value.rpartition(":")[2] == str(PORTS[option])
            value = value.replace(str(PORTS[option]), str(ports[option]))
        words.append(f"{option}={value}" if value else option)
    return words


def image_of(service: Mapping[str, Any]) -> Path:
    """The archive of a service's image, where `make image` made one; skips where it did not."""
    _, _, tag = container_of(service)["image"].rpartition(":")
    found = IMAGES / f"edge-runtime-{tag}-{NATIVE}.oci.tar"
    if not found.exists():
        pytest.skip(f"no {found.name}; make image FLAVOUR={tag.rpartition('-')[2]}")
    if reason := missing(NATIVE):
        pytest.skip(reason)
    return found


@contextmanager
def image_pod(service: Mapping[str, Any], models: Path, folder: Path, image: ImageRoot) -> Iterator[Pod]:
    """Start the container itself: the image's user, a read-only root, the mounts of its volumes, and /mnt/models."""
    image = replace(image, volumes=folder / "volumes")
    make_volumes(image)
    shutil.copytree(models, image.volumes / "mnt")
    container = container_of(service)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    with (folder / "daemon.log").open("wb") as log:
        running = image.start(*image.config["Entrypoint"], *words_of(container, ports, {}), stdout=log, stderr=log)
    try:
        probe = container["readinessProbe"]["httpGet"]["path"]
        yield Pod(ports["--http"], ports["--grpc"], ports["--metrics"], probe, running)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{(folder / 'daemon.log').read_text()}") from error
    finally:
        running.terminate()
        status = running.wait(LIMIT_S)
    assert status == 0, (folder / "daemon.log").read_text()


@contextmanager
def pod(service: Mapping[str, Any], models: Path, folder: Path) -> Iterator[Pod]:
    """Start the installed daemon as a service's container. models: the files of its storageUri. folder: its volumes."""
    container = container_of(service)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    places = {MODELS: str(models), "/etc/edge-runtime/kserve.toml": str(KSERVE / "config.toml")}
    probe = container["readinessProbe"]["httpGet"]
    assert probe["port"] == PORTS["--http"]
    with daemon(words_of(container, ports, places), folder) as running:
        yield Pod(ports["--http"], ports["--grpc"], ports["--metrics"], probe["path"], running)


def posted(port: int, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the status and the JSON of a POST with the headers that KServe's router and Go's client send."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    headers = {"User-Agent": "Go-http-client/1.1", "Content-Type": "application/json", "Accept-Encoding": "gzip"}
    try:
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.getheader("Content-Encoding") == "gzip":
        content = gzip.decompress(content)
    return answer.status, json.loads(content)
