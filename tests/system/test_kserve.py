"""deploy/kserve: objects that KServe's API takes, and a daemon that serves as they say.

Here is no cluster, so the objects are held against KServe's API as kserve_crds.json has it, and never applied.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
import yaml

from cross.build_image import FLAVOURS, SOCKETS, STATE
from demo.broker import free_ports
from edge_runtime import __version__
from tests.system.served_probes import daemon, status_of, wait_for

ROOT = Path(__file__).parents[2]
KSERVE = ROOT / "deploy/kserve"
MODELS = "/mnt/models"
"""Where KServe's storage initializer puts a model."""

API = json.loads(Path(__file__).with_name("kserve_crds.json").read_text())
PORTS = {"--http": 8080, "--grpc": 9000, "--metrics": 9464}
KINDS = {"array": list, "boolean": bool, "integer": int, "string": str}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KSERVE / name).read_text())
    return found


@pytest.fixture
def runtime() -> dict[str, Any]:
    return read("cluster-serving-runtime.yaml")


@pytest.fixture
def service() -> dict[str, Any]:
    return read("inference-service.yaml")


@pytest.fixture
def container(runtime: dict[str, Any]) -> dict[str, Any]:
    (found,) = runtime["spec"]["containers"]
    assert found["name"] == "kserve-container"
    return dict(found)


def problems(kind: dict[str, Any], value: Any, path: str) -> list[str]:
    """What a schema of kserve_crds.json says against a value."""
    if "ref" in kind:
        base = API["definitions"][kind["ref"]]
        kind = {**base, **kind, "properties": {**base.get("properties", {}), **kind.get("properties", {})}}
    if kind["type"] == "object":
        if not isinstance(value, dict):
            return [f"{path} is not an object"]
        found = [f"{path}.{name} is missing" for name in kind.get("required", ()) if name not in value]
        for name, inner in value.items():
            below = kind.get("values") or kind["properties"].get(name)
            found += problems(below, inner, f"{path}.{name}") if below else [f"{path}.{name} is unknown"]
        return found
    wanted = (int, str) if kind["type"] == "integer or string" else KINDS[kind["type"]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return [f"{path} is {value!r}, and no {kind['type']}"]
    if isinstance(value, list):
        return [each for at, inner in enumerate(value) for each in problems(kind["items"], inner, f"{path}[{at}]")]
    if value not in kind.get("enum", [value]) or ("longest" in kind and len(str(value)) > kind["longest"]):
        return [f"{path} is {value!r}"]
    return []


def against_api(item: dict[str, Any]) -> list[str]:
    wanted = API[item["kind"]]
    found = problems(wanted["spec"], item["spec"], "spec")
    if item["apiVersion"] != wanted["apiVersion"]:
        found.append(f"apiVersion is {item['apiVersion']}")
    if "namespace" in item["metadata"] and not wanted["namespaced"]:
        found.append("metadata.namespace: this kind has none")
    return found


@pytest.mark.parametrize("name", ["cluster-serving-runtime.yaml", "inference-service.yaml"])
def test_an_object_has_only_fields_that_kserve_knows_of_the_kinds_that_it_wants(name: str) -> None:
    assert against_api(read(name)) == []


def test_the_check_against_the_api_sees_what_is_wrong(service: dict[str, Any]) -> None:
    model = service["spec"]["predictor"]["model"]
    model["protocolVersion"] = "v3"
    model["modelFormats"] = model.pop("modelFormat")
    model["ports"][0]["containerPort"] = "8080"
    assert against_api(service) == [
        "spec.predictor.model.modelFormat is missing",
        "spec.predictor.model.protocolVersion is 'v3'",
        "spec.predictor.model.ports[0].containerPort is '8080', and no integer",
        "spec.predictor.model.modelFormats is unknown",
    ]


def test_the_service_asks_for_what_the_runtime_offers(runtime: dict[str, Any], service: dict[str, Any]) -> None:
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    formats = {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert formats == {"onnx", "openvino"}
    assert model["modelFormat"]["name"] in formats
    assert {port["containerPort"] for port in model["ports"]} == {PORTS["--http"], PORTS["--grpc"]}
    assert model["readinessProbe"]["httpGet"]["port"] == PORTS["--http"]


def test_the_container_is_an_image_of_this_version_that_writes_only_into_its_volumes(
    runtime: dict[str, Any], container: dict[str, Any]
) -> None:
    name, _, tag = container["image"].rpartition(":")
    assert (name, tag.removeprefix(f"{__version__}-")) == ("docker.io/library/edge-runtime", "openvino")
    assert "openvino" in FLAVOURS
    declared = {volume["name"] for volume in runtime["spec"]["volumes"]}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounted) == {f"/{STATE}", f"/{SOCKETS}", "/tmp"}
    assert set(mounted.values()) == declared
    security = container["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["runAsNonRoot"]) == (True, True)
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_containerfile_lays_the_configuration_where_the_container_names_it(container: dict[str, Any]) -> None:
    (named,) = (word.partition("=")[2] for word in container["args"] if word.startswith("--config="))
    assert f"COPY deploy/kserve/config.toml {named}\n" in (ROOT / "deploy/containers/Containerfile").read_text()


def test_the_container_s_arguments_serve_what_is_in_mnt_models_and_answer_the_probes(
    container: dict[str, Any], service: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "demo/models/digits", tmp_path / "models")
    name = service["metadata"]["name"]
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    words = [word.replace("{{.Name}}", name).replace(MODELS, str(tmp_path / "models")) for word in container["args"]]
    for at, word in enumerate(words):
        option, _, value = word.partition("=")
        if option == "--config":
            words[at] = f"--config={KSERVE / 'config.toml'}"
        elif option in PORTS:
            assert value.rpartition(":")[2] == str(PORTS[option])
            words[at] = word.replace(str(PORTS[option]), str(ports[option]))
    with daemon(words, tmp_path) as running:
        for path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{name}/ready"):
            wait_for(ports["--http"], path, running)
        assert service["spec"]["predictor"]["model"]["readinessProbe"]["httpGet"]["path"] == path
        assert status_of(ports["--metrics"], "/metrics") == 200
        with triton.InferenceServerClient(f"127.0.0.1:{ports['--grpc']}") as client:
            assert client.is_model_ready(name)
