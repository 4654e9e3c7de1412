"""The files for those who run Docker, Podman or Kubernetes: whole, of this version, and as strict as they say.

Here is neither a registry nor a cluster, so they are read as what they are for reads them, and not run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cross.build_image import HEALTH, SOCKETS, STATE, USER
from demo.broker import free_ports
from edge_runtime import __version__
from edge_runtime.config.loading import load_config
from tests.system.served_probes import daemon, wait_for

ROOT = Path(__file__).parents[2]
QUADLET = Path("/usr/libexec/podman/quadlet")
CONTAINERS = ROOT / "deploy/containers"
MADE_BY_HAND = "broker/certificates"
"""What make-certificates.sh makes, and a clone does not have."""

IMAGE = f"edge-runtime:{__version__}-onnxruntime"


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
    return found


@pytest.fixture
def quadlet() -> dict[str, list[str]]:
    """Podman's settings and systemd's, by name: some have several values."""
    found: dict[str, list[str]] = {}
    for line in (CONTAINERS / "edge-runtime.container").read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def kinds() -> dict[str, Any]:
    """Kubernetes' objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((CONTAINERS / "kubernetes.yaml").read_text())}


@pytest.fixture
def pod(kinds: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = kinds["DaemonSet"]["spec"]["template"]["spec"]
    return found


@pytest.fixture
def configured(kinds: dict[str, Any], tmp_path: Path) -> Path:
    """The daemon's configuration in Kubernetes."""
    file = tmp_path / "config.toml"
    file.write_text(kinds["ConfigMap"]["data"]["config.toml"])
    return file


def test_compose_mounts_only_what_a_clone_has_and_volumes_that_it_declares(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for line in service["volumes"]:
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", line).split(":")[0]
            if not source.startswith("."):
                assert source in compose["volumes"], line
            elif MADE_BY_HAND not in source:
                assert (CONTAINERS / source).exists(), f"{name}: {line}"


def test_compose_runs_the_daemon_of_this_version_with_a_read_only_root_and_no_rights(compose: dict[str, Any]) -> None:
    daemon = compose["services"]["edge-runtime"]
    assert daemon["image"].startswith(IMAGE)
    assert daemon["read_only"] is True
    assert daemon["cap_drop"] == ["ALL"]
    assert daemon["healthcheck"]["test"] == HEALTH
    targets = {line.split(":")[-2 if line.endswith(":ro") else -1] for line in daemon["volumes"]}
    assert {"/models", f"/{STATE}", f"/{SOCKETS}"} <= targets
    assert "ports" not in daemon


def test_compose_says_nothing_at_the_top_that_older_versions_refuse(compose: dict[str, Any]) -> None:
    assert set(compose) <= {"services", "volumes", "networks"}, "docker-compose 1.29 of Debian 12 takes these"


@pytest.mark.parametrize("name", ["mosquitto", "prometheus", "grafana"])
def test_compose_names_exact_versions_and_lets_none_gain_rights(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:") or name == "mosquitto", port


def test_the_broker_of_compose_finds_every_file_that_its_configuration_names(compose: dict[str, Any]) -> None:
    mounted = [line.split(":")[1] for line in compose["services"]["mosquitto"]["volumes"]]
    text = (ROOT / "deploy/broker/mosquitto.conf").read_text()
    named = re.findall(r"^(?:certfile|keyfile|cafile|acl_file|persistence_location) (/\S+)$", text, re.MULTILINE)
    assert named
    for path in named:
        assert any(path.rstrip("/") == place or path.startswith(f"{place}/") for place in mounted), path


def test_the_configuration_of_compose_is_one_that_the_daemon_takes(compose: dict[str, Any]) -> None:
    config = load_config(CONTAINERS / "config.toml", {})
    assert config.mqtt is not None
    assert str(config.mqtt.url).startswith("mqtts://mosquitto:8883/")
    (job,) = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"edge-runtime:{config.metrics.port}"]}]
    assert config.metrics.host == "0.0.0.0"


def test_the_quadlet_runs_the_daemon_as_compose_does_and_is_started_only_once_it_is_ready(
    quadlet: dict[str, list[str]], compose: dict[str, Any]
) -> None:
    (image,) = quadlet["Image"]
    assert image.count("/") == 1, "podman updates no short name"
    assert "@" not in image, "podman updates no digest"
    assert quadlet["AutoUpdate"] == ["registry"]
    assert quadlet["Notify"] == ["true"], "else podman takes any image that begins for one that serves"
    assert json.loads(quadlet["HealthCmd"][0]) == HEALTH[1:], "as one string it is the shell's, and the image has none"
    assert (quadlet["ReadOnly"], quadlet["DropCapability"], quadlet["NoNewPrivileges"]) == (["true"], ["all"], ["true"])
    targets = {line.split(":")[1] for line in quadlet["Volume"]}
    assert targets == {"/models", f"/{STATE}", f"/{SOCKETS}"}
    config = load_config(None, {}, ROOT / "none.toml")
    assert float(quadlet["TimeoutStartSec"][0]) > config.start_limit_s
    assert float(quadlet["TimeoutStopSec"][0]) > config.drain_s


@pytest.mark.skipif(not QUADLET.exists(), reason="no quadlet here; apt: podman (4.4 and later)")
def test_podman_makes_a_unit_of_the_quadlet(tmp_path: Path) -> None:
    shutil.copy(CONTAINERS / "edge-runtime.container", tmp_path)
    made = subprocess.run(
        [QUADLET, "-dryrun"],
        env={"QUADLET_UNIT_DIRS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Type=notify" in made.stdout
    assert "--sdnotify=container" in made.stdout
    assert "io.containers.autoupdate=registry" in made.stdout


def test_kubernetes_has_a_daemon_of_this_version_on_each_node_with_every_volume_declared(pod: dict[str, Any]) -> None:
    declared = {volume["name"] for volume in pod["volumes"]}
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["image"] == f"docker.io/library/{IMAGE}"
        assert {mount["name"] for mount in container["volumeMounts"]} <= declared
        assert container["resources"]["limits"]["memory"]
    assert pod["terminationGracePeriodSeconds"] > load_config(None, {}, ROOT / "none.toml").drain_s


def test_kubernetes_runs_the_daemon_as_its_own_user_without_rights(pod: dict[str, Any]) -> None:
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert pod["automountServiceAccountToken"] is False
    (daemon,) = pod["containers"]
    assert daemon["securityContext"] == {
        "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_the_selectors_of_kubernetes_are_the_label_of_its_pods_and_its_ports_those_that_are_configured(
    kinds: dict[str, Any], pod: dict[str, Any], configured: Path
) -> None:
    template = kinds["DaemonSet"]["spec"]["template"]
    label = template["metadata"]["labels"]
    spec = kinds["Service"]["spec"]
    assert kinds["DaemonSet"]["spec"]["selector"]["matchLabels"] == label
    assert spec["selector"] == label
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == label
    spaces = {each["metadata"].get("namespace", each["metadata"]["name"]) for each in kinds.values()}
    assert spaces == {"edge-runtime"}
    config = load_config(configured, {})
    ports = {
        "http": int(str(config.http.endpoint).rpartition(":")[2]),
        "grpc": int(str(config.grpc.endpoint).rpartition(":")[2]),
        "metrics": config.metrics.port,
    }
    assert {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]} == ports
    assert {port["targetPort"]: port["port"] for port in spec["ports"]} == {
        name: port for name, port in ports.items() if name != "metrics"
    }
    allowed = [port["port"] for rule in kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(ports)
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])


def test_the_doors_of_kubernetes_are_insecure_only_behind_a_policy_that_names_who_may_call(
    kinds: dict[str, Any], configured: Path
) -> None:
    config = load_config(configured, {})
    assert (config.http.insecure, config.grpc.insecure) == (True, True)
    assert (config.http.control, config.grpc.control) == (False, False)
    policy = kinds["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    for rule in policy["ingress"]:
        assert rule["from"]
        assert all({} != peer != {"namespaceSelector": {}} for peer in rule["from"])


def test_kustomize_adds_a_pod_monitor_that_finds_the_metrics_of_the_pods(
    kinds: dict[str, Any], pod: dict[str, Any]
) -> None:
    base = yaml.safe_load((CONTAINERS / "kustomization.yaml").read_text())
    assert base["resources"] == ["kubernetes.yaml", "pod-monitor.yaml"]
    (image,) = base["images"]
    assert f"{image['name']}:{image['newTag']}" == pod["containers"][0]["image"]
    monitor = yaml.safe_load((CONTAINERS / "pod-monitor.yaml").read_text())
    labels = kinds["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["containers"][0]["ports"]}
    # Alert rules and dashboard look for this job.
    (job,) = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yaml").read_text())["scrape_configs"]
    assert labels[monitor["spec"]["jobLabel"]] == job["job_name"]


def test_a_daemon_with_kubernetes_configuration_answers_each_probe(
    pod: dict[str, Any], configured: Path, tmp_path: Path
) -> None:
    declared = [str(port["containerPort"]) for port in pod["containers"][0]["ports"]]
    ports = dict(zip(declared, map(str, free_ports(len(declared))), strict=True))
    text = re.sub(r"\b(8000|8001|9464)\b", lambda found: ports[found[1]], configured.read_text())
    configured.write_text(text)
    container = pod["containers"][0]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["port"] for probe in probes} == {"http"}
    words = ["serve", "--config", str(configured), "--models", str(ROOT / "demo/models")]
    with daemon(words, tmp_path) as running:
        for probe in probes:
            wait_for(int(ports["8000"]), probe["path"], running)


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.jetson"])
def test_a_containerfile_copies_what_is_there_from_a_pinned_base_and_runs_as_an_ordinary_user(name: str) -> None:
    text = (CONTAINERS / name).read_text()
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.search(r":\D*\d+(\.\d+)+", base), base
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists() or source == "build/jetson/", source
    assert f"USER {USER}:{USER}" in text
    assert '"status", "--ready"' in text
    assert f"RUNTIME_DIRECTORY=/{SOCKETS}" in text
    assert f"STATE_DIRECTORY=/{STATE}" in text
