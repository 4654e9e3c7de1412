"""deploy/kserve: objects that KServe's API takes, and a daemon that serves as they say.

Here is no cluster, so the objects are held against KServe's API as kserve_crds.json has it, and never applied. A daemon
with the container's arguments serves each layout of /mnt/models; tests/converters/test_kserve_sources.py has those that
take the libraries of training.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from cross.build_image import FLAVOURS, SOCKETS, STATE, USER
from edge_runtime import __version__
from tests.models import ir_models, onnx_models, triton_repository
from tests.system.image_root import unpack
from tests.system.kserve_pod import (
    KSERVE,
    PORTS,
    Pod,
    container_of,
    image_of,
    image_pod,
    named,
    objects,
    pod,
    posted,
)
from tests.system.served_probes import LIMIT_S, status_of, wait_for

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "demo/models/digits/1/model.onnx"
LITE = ROOT / "tests/models/tensorflow/model.tflite"

CLIENT = ROOT / "build/kserve/venv/bin/python"
"""Of an environment with KServe's package, which `make test-kserve` makes."""

API = json.loads(Path(__file__).with_name("kserve_crds.json").read_text())
KINDS = {"array": list, "boolean": bool, "integer": int, "string": str}

SERVICES = named("inference-services.yaml")
RUNTIMES = named("cluster-serving-runtimes.yaml")
GRAPH = named("inference-graph.yaml")["chain"]


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


def against_api(item: Mapping[str, Any]) -> list[str]:
    wanted = API[item["kind"]]
    found = problems(wanted["spec"], item["spec"], "spec")
    if item["apiVersion"] != wanted["apiVersion"]:
        found.append(f"apiVersion is {item['apiVersion']}")
    if "namespace" in item["metadata"] and not wanted["namespaced"]:
        found.append("metadata.namespace: this kind has none")
    return found


# ---- the objects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(path.name for path in KSERVE.glob("*.yaml")))
def test_an_object_has_only_fields_that_kserve_knows_of_the_kinds_that_it_wants(file: str) -> None:
    assert {each["metadata"]["name"]: against_api(each) for each in objects(file) if against_api(each)} == {}


def test_the_check_against_the_api_sees_what_is_wrong() -> None:
    service = named("inference-services.yaml")["digits"]
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


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_asks_for_what_its_runtime_offers(name: str) -> None:
    model = SERVICES[name]["spec"]["predictor"]["model"]
    offered = RUNTIMES[model["runtime"]]["spec"]
    assert model["protocolVersion"] in offered["protocolVersions"]
    assert model["modelFormat"] in offered["supportedModelFormats"]
    assert {port["containerPort"] for port in model.get("ports", ())} <= {PORTS["--http"], PORTS["--grpc"]}


def test_each_format_of_each_runtime_has_a_sample() -> None:
    offered = {each["name"] for runtime in RUNTIMES.values() for each in runtime["spec"]["supportedModelFormats"]}
    assert {each["spec"]["predictor"]["model"]["modelFormat"]["name"] for each in SERVICES.values()} == offered
    assert offered == {"onnx", "openvino", "tflite", "sklearn", "xgboost", "lightgbm", "pytorch", "triton"}


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_container_is_an_image_of_this_version_that_writes_only_into_its_volumes(name: str) -> None:
    (container,) = RUNTIMES[name]["spec"]["containers"]
    assert container["name"] == "kserve-container"
    image, _, tag = container["image"].rpartition(":")
    assert image == "docker.io/library/edge-runtime"
    assert tag.removeprefix(f"{__version__}-") in {*FLAVOURS, "pytorch"}
    declared = {volume["name"] for volume in RUNTIMES[name]["spec"]["volumes"]}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounted) == {f"/{STATE}", f"/{SOCKETS}", "/tmp"}
    assert set(mounted.values()) == declared
    security = container["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["runAsNonRoot"]) == (True, True)
    assert security["capabilities"] == {"drop": ["ALL"]}
    annotations = RUNTIMES[name]["spec"]["annotations"]
    assert annotations == {
        "prometheus.kserve.io/port": str(PORTS["--metrics"]),
        "prometheus.kserve.io/path": "/metrics",
    }


def test_the_containerfile_lays_the_configuration_where_the_containers_name_it() -> None:
    words = {word for each in RUNTIMES.values() for word in each["spec"]["containers"][0]["args"]}
    (named_file,) = (word.partition("=")[2] for word in words if word.startswith("--config="))
    assert f"COPY deploy/kserve/config.toml {named_file}\n" in (ROOT / "deploy/containers/Containerfile").read_text()


def test_a_services_arguments_follow_those_of_its_runtime() -> None:
    service = named("inference-services.yaml")["repository"]
    service["spec"]["predictor"]["model"]["args"] = ["--python-models"]
    assert container_of(service)["args"][-2:] == ["--metrics=9464", "--python-models"]


# ---- what the storage initializer leaves in /mnt/models -------------------------------------------------------------


def onnx(models: Path) -> None:
    shutil.copyfile(DIGITS, models / "model.onnx")


def openvino(models: Path) -> None:
    ir_models.from_onnx(DIGITS, models)


def tflite(models: Path) -> None:
    shutil.copyfile(LITE, models / "model.tflite")


LAYOUTS: dict[str, Callable[[Path], None]] = {"digits": onnx, "digits-ir": openvino, "digits-lite": tflite}
"""By the sample's name. Each takes 64 pixels."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_models_files_are_served_under_the_services_name_over_http_and_grpc(name: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    LAYOUTS[name](tmp_path / "models")
    with pod(SERVICES[name], tmp_path / "models", tmp_path) as started:
        answers_as(name, started)


@pytest.mark.root
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_image_that_make_image_made_serves_a_models_files_from_a_read_only_root(name: str, tmp_path: Path) -> None:
    image = unpack(image_of(SERVICES[name]), DIGITS.parents[1], tmp_path / "image")
    (tmp_path / "files").mkdir()
    LAYOUTS[name](tmp_path / "files")
    with image_pod(SERVICES[name], tmp_path / "files", tmp_path, image) as started:
        answers_as(name, started)
        assert f"Uid:\t{USER}\t" in Path(f"/proc/{started.running.pid}/status").read_text()


def answers_as(name: str, started: Pod) -> None:
    """Ask a pod, once it is ready, over HTTP by both protocols, and over gRPC."""
    started.wait_until_ready()
    assert started.probe == f"/v2/models/{name}/ready"
    image = np.linspace(0, 16, 64, dtype=np.float32).reshape(1, 64)
    with triton.InferenceServerClient(f"127.0.0.1:{started.grpc}") as client:
        assert client.is_model_ready(name)
        (described,) = client.get_model_metadata(name).inputs
        asked = triton.InferInput(described.name, [1, 64], "FP32").set_data_from_numpy(image)
        answer = client.infer(name, [asked])
        outputs = [each.name for each in answer.get_response().outputs]
        by_grpc = {each: answer.as_numpy(each).tolist() for each in outputs}
    body = {"inputs": [{"name": described.name, "shape": [1, 64], "datatype": "FP32", "data": image.tolist()}]}
    status, fields = posted(started.http, f"/v2/models/{name}/infer", body)
    assert (status, fields["model_name"]) == (200, name)
    by_http = {each["name"]: np.reshape(each["data"], each["shape"]).tolist() for each in fields["outputs"]}
    assert by_http.keys() == by_grpc.keys()
    assert all(np.allclose(by_http[each], by_grpc[each]) for each in by_grpc)
    assert posted(started.http, f"/v1/models/{name}:predict", {"instances": image.tolist()})[0] == 200
    assert status_of(started.metrics, "/metrics") == 200
    assert posted(started.http, f"/v2/repository/models/{name}/unload", {})[0] == 403


@pytest.mark.parametrize(
    ("name", "file", "content", "reason"),
    [
        ("digits", "model.onnx", b"no model", "model.onnx"),
        ("digits-forest", "model.joblib", b"\x80\x04\x95", "skops.io.dump"),
        ("digits-forest", "model.pkl", b"\x80\x04\x95", "skops.io.dump"),
        ("digits-xgboost", "model.bst", b"binf\0\0", "booster.save_model"),
    ],
)
def test_a_pod_whose_model_cannot_be_served_lives_is_never_ready_and_says_why(
    name: str, file: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / file).write_bytes(content)
    with pod(SERVICES[name], tmp_path / "models", tmp_path) as started:
        wait_for(started.http, "/v2/health/live", started.running)
        wait_for_log(tmp_path, reason, started)
        assert status_of(started.http, started.probe) in {400, 404}
        assert status_of(started.http, "/v2/health/live") == 200


def wait_for_log(folder: Path, words: str, pod: Pod) -> None:
    end_s = time.monotonic() + LIMIT_S
    while words not in (told := (folder / "daemon.log").read_text()):
        assert pod.running.poll() is None
        assert time.monotonic() < end_s, told
        time.sleep(0.05)


# ---- a Triton repository, and KServe's router -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """The pod of the sample, with models of one and of two inputs."""
    folder = tmp_path_factory.mktemp("repository")
    models = folder / "models"
    triton_repository.simple(models)
    onnx_models.added(models / "detector" / "1", 1.0)
    onnx_models.added(models / "classifier" / "1", 10.0)
    with pod(SERVICES["repository"], models, folder) as started:
        started.wait_until_ready()
        yield started


def test_each_model_of_a_triton_repository_answers_by_its_own_name(repository: Pod) -> None:
    rows = np.arange(16, dtype=np.int32).reshape(1, 16)
    asked = [triton.InferInput(name, [1, 16], "INT32").set_data_from_numpy(rows) for name in ("INPUT0", "INPUT1")]
    with triton.InferenceServerClient(f"127.0.0.1:{repository.grpc}") as client:
        assert client.is_server_ready()
        assert client.infer("simple", asked).as_numpy("OUTPUT0").tolist() == (2 * rows).tolist()
    assert posted(repository.http, "/v2/models/detector/infer", two_numbers())[0] == 200


def test_a_pod_is_not_ready_while_a_model_of_its_repository_has_failed(tmp_path: Path) -> None:
    onnx_models.added(tmp_path / "models" / "good" / "1")
    (tmp_path / "models" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    with pod(SERVICES["repository"], tmp_path / "models", tmp_path) as started:
        wait_for(started.http, "/v2/models/good/ready", started.running)
        assert started.probe == "/v2/health/ready"
        assert status_of(started.http, started.probe) == 400


def test_a_model_of_triton_alone_is_served_by_the_runtime_of_one_model(tmp_path: Path) -> None:
    triton_repository.simple(tmp_path)
    service = json.loads(json.dumps(SERVICES["digits"]).replace("digits", "simple"))
    with pod(service, tmp_path / "simple", tmp_path) as started:
        started.wait_until_ready()


def two_numbers() -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


def routed(node: str, graph: Mapping[str, Any], body: dict[str, Any], pod: Pod) -> tuple[int, Any]:
    """What KServe's router makes of one request. Source: routeStep and callService in its cmd/router/main.go."""
    spec = graph["spec"]["nodes"][node]

    def step(each: Mapping[str, Any], request: dict[str, Any]) -> tuple[int, Any]:
        if "nodeName" in each:
            return routed(each["nodeName"], graph, request, pod)
        return posted(pod.http, "/" + each["serviceUrl"].split("/", 3)[3], request)

    if spec["routerType"] == "Ensemble":
        return 200, {each["name"]: step(each, body)[1] for each in spec["steps"]}
    if spec["routerType"] == "Switch":
        chosen = [each for each in spec["steps"] if each["condition"] in body]
        return step(chosen[0], body) if chosen else (404, None)
    if spec["routerType"] == "Splitter":
        return step(max(spec["steps"], key=lambda each: each["weight"]), body)
    status, answer = 200, dict[str, Any]()
    for at, each in enumerate(spec["steps"]):
        request = answer if each.get("data") == "$response" and at else body
        if each.get("mapPredictionsToInstances") and request.get("predictions"):
            request = {"instances": request["predictions"]}
        status, answer = step(each, request)
        if each.get("dependency") == "Hard" and status >= 300:
            break
    return status, answer


def graph_of(**nodes: dict[str, Any]) -> dict[str, Any]:
    graph = {**GRAPH, "spec": {"nodes": nodes}}
    assert against_api(graph) == []
    return graph


def url(model: str, path: str = "/v2/models/{}/infer") -> str:
    return f"http://{model}-predictor.models{path.format(model)}"


def test_a_graphs_sequence_feeds_the_predictions_of_one_model_to_the_next(repository: Pod) -> None:
    assert routed("root", GRAPH, {"instances": [[1, 2], [3, 4]]}, repository) == (
        200,
        {"predictions": [[12, 13], [14, 15]]},
    )


def test_a_graphs_sequence_ends_with_the_error_of_a_step_that_it_needs(repository: Pod) -> None:
    status, answer = routed("root", GRAPH, {"instances": [[1, 2, 3]]}, repository)
    assert status == 400
    assert isinstance(answer["error"], str)


def test_an_answer_of_the_second_protocol_is_no_request_and_the_router_hears_so(repository: Pod) -> None:
    steps = [{"serviceUrl": url("detector")}, {"serviceUrl": url("classifier"), "data": "$response"}]
    graph = graph_of(root={"routerType": "Sequence", "steps": steps})
    status, answer = routed("root", graph, two_numbers(), repository)
    assert status == 400
    assert "inputs" in answer["error"]


def test_a_graphs_ensemble_switch_and_splitter_get_answers_of_the_second_protocol(repository: Pod) -> None:
    steps = [{"name": name, "serviceUrl": url(name)} for name in ("detector", "classifier")]
    weighed = [{**each, "weight": weight} for each, weight in zip(steps, (30, 70), strict=True)]
    graph = graph_of(
        root={"routerType": "Switch", "steps": [{"nodeName": "both", "condition": "inputs"}]},
        both={"routerType": "Ensemble", "steps": steps},
        one={"routerType": "Splitter", "steps": weighed},
    )
    status, merged = routed("root", graph, two_numbers(), repository)
    assert status == 200
    assert {name: each["outputs"][0]["data"] for name, each in merged.items()} == {
        "detector": [2, 3],
        "classifier": [11, 12],
    }
    status, single = routed("one", graph, two_numbers(), repository)
    assert (status, single["model_name"]) == (200, "classifier")


def test_kserves_own_client_asks_a_pod_by_each_protocol(repository: Pod) -> None:
    """The package's, in an environment of its own: it wants a psutil below 6."""
    if not CLIENT.exists():
        pytest.skip(f"no {CLIENT}; make test-kserve")
    words = [str(repository.http), str(repository.grpc), "detector", "x"]
    asked = subprocess.run(
        [str(CLIENT), str(Path(__file__).with_name("kserve_client.py")), *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    answer = [[2.0, 3.0]]
    assert json.loads(asked.stdout.splitlines()[-1]) == {
        **dict.fromkeys(("v2 live", "v2 ready", "v2 model", "v1 live", "v1 model"), True),
        **dict.fromkeys(("grpc live", "grpc ready", "grpc model"), True),
        **dict.fromkeys(("v2 infer JSON", "v2 infer binary", "grpc infer"), answer),
        **{way: {"predictions": answer} for way in ("v1 infer", "graph")},
        "v2 absent": False,
    }
