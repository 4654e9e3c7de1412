"""Alerts and the dashboard name only what a daemon tells, and the alerts fire for what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from edge_runtime.config.settings import MetricsSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.enrolment.authority import Authority, AuthorityFolder
from edge_runtime.enrolment.certificates import key_pem, new_key, signing_request
from edge_runtime.enrolment.device import Identity
from edge_runtime.enrolment.messages import Enrol
from edge_runtime.enrolment.settings import EnrolmentSettings
from edge_runtime.site.settings import PublishRule
from tests.contract.running_daemon import RawClient, floats, header, put_model, running_daemon
from tests.contract.updates.updated_device import update_settings
from tests.fakes.update_site import UpdateSite
from tests.models import onnx_models

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
DASHBOARD = MONITORING / "grafana/dashboard.json"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=ROOT / "build/unpacked/usr/bin")
LABELS_OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a daemon with updates and published results tells Prometheus after answers and refusals."""
    folder = tmp_path_factory.mktemp("metrics")
    put_model(folder / "models", "mlp", onnx_models.mlp, toml='mode = "workers"\n')
    site = UpdateSite()
    update = update_settings(folder, site.root, folder=str(site.write(folder / "mirror")), require_signed=False)
    settings = {
        "metrics": MetricsSettings(port=0),
        "update": update,
        "mqtt": MqttSettings(url="mqtt://127.0.0.1:1/dev1"),
        "publish": (PublishRule("mlp"),),
        "enrolment": enrolled(folder / "authority", folder / "identity"),
    }
    with running_daemon(folder / "models", folder / "run", **settings) as daemon:
        with RawClient(daemon.endpoints[1]) as client:
            client.ask(header("mlp"), b"", floats(1, 16).tobytes())
            client.ask(header("nobody"), b"", floats(1, 16).tobytes())
        assert daemon.metrics_url is not None
        with urllib.request.urlopen(daemon.metrics_url) as answer:
            text: str = answer.read().decode()
    return text


def enrolled(authority_folder: Path, folder: Path) -> EnrolmentSettings:
    """The settings of a device that an authority gave a certificate for 90 days."""
    files, now_utc = AuthorityFolder(authority_folder), datetime.now(timezone.utc)
    files.make(names=["localhost"], root=b"{}", configuration="", issuer=None, trusted=None, now_utc=now_utc)
    authority, key = Authority(files), new_key()
    try:
        token = authority.add_token("", group="line-1", uses=1, days=1)
        given = authority.enrol(Enrol(token.secret, "dev1", signing_request("dev1", key).decode()))
    finally:
        authority.close()
    Identity(folder).write(given.certificate, key_pem(key), given.trusted)
    return EnrolmentSettings("https://localhost:1", str(folder))


def test_the_time_left_to_a_devices_certificate_is_told_once(exposition: str) -> None:
    (left_s,) = re.findall(r"^edge_runtime_certificate_left_seconds (\S+)$", exposition, re.MULTILINE)
    assert 89 * 86_400 < float(left_s) <= 90 * 86_400


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every alert and every panel."""
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        yield variable["name"], variable["query"]["query"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_that_is_named_is_one_that_a_daemon_reports(where: str, expression: str, exposition: str) -> None:
    families = dict(re.findall(r"^# TYPE (\w+) (\w+)$", exposition, re.MULTILINE))
    named = set(re.findall(r"\bedge_runtime_\w+", expression))
    assert named or "up{" in expression, where
    for name in named:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert families.get(name) or families.get(family) == "histogram", name


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_label_that_is_asked_for_is_one_that_metrics_have(where: str, expression: str, exposition: str) -> None:
    told = set(re.findall(r'[{,](\w+)="', exposition)) | LABELS_OF_PROMETHEUS | {"sensor"}
    for selector in re.findall(r"\{([^}]*)\}", expression):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert asked <= told, f"{where}: {asked - told}"


def test_every_code_that_an_alert_looks_for_is_one_of_the_wire() -> None:
    from edge_runtime import errors

    known = {getattr(each, "code", "") for each in vars(errors).values()}
    text = (MONITORING / "alerts.yaml").read_text()
    asked = {code for codes in re.findall(r'code=~?"([^"]+)"', text) for code in codes.split("|")}
    assert asked
    assert asked <= known


def test_every_alert_says_how_bad_it_is_and_what_to_look_at() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_the_dashboard_is_one_that_grafana_can_provision() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    (source,) = yaml.safe_load((MONITORING / "grafana/datasource.yaml").read_text())["datasources"]
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == source["uid"]
            assert panel["targets"]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; do: make unpacked")
@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yaml"),
              ("test", "rules", "alerts_test.yaml")], ids=" ".join
)  # fmt: skip
def test_prometheus_itself_takes_the_rules_and_they_fire_when_they_should(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *words], cwd=MONITORING, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; do: make unpacked")
@pytest.mark.parametrize("bad", [1, 20])
def test_one_device_of_a_hundred_fires_no_alert_and_twenty_fire_them_by_group_and_release(tmp_path, bad: int) -> None:
    series = {}
    for number in range(100):
        of, word = f'instance="cam-{number}"', number >= bad
        series |= {
            f'edge_runtime_device_info{{{of}, group="line-1", profile="orin"}}': "1x60",
            f'edge_runtime_model_info{{{of}, model="digits", version="3", release="7"}}': "1x60",
            f"edge_runtime_models_failed{{{of}}}": "0x60" if word else "1x60",
            f'edge_runtime_temperature_celsius{{{of}, sensor="cpu"}}': "50x60" if word else "95x60",
            f'edge_runtime_requests_total{{{of}, model="digits"}}': "0+600x60",
            f'edge_runtime_refusals_total{{{of}, model="digits", code="run_failed"}}': "0+0x60" if word else "0+60x60",
            f'up{{job="edge-runtime", {of}}}': "1x60" if word else "0x60",
        }
    fired = {
        "EdgeRuntimeDown": "",
        "EdgeRuntimeModelFailed": ', group="line-1"',
        "EdgeRuntimeHot": ', group="line-1"',
        "EdgeRuntimeReleaseFails": ', model="digits"',
    }
    named = "|".join(fired)
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'sum by (alertname, group, model) (ALERTS{{alertname=~"{named}", alertstate="firing"}})',
                "eval_time": "30m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"{labels}}}', "value": 1} for name, labels in fired.items()
                ]
                if bad > 1
                else [],
            }
        ],
    }
    rules = {"rule_files": [str(MONITORING / "alerts.yaml")], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "rules_test.yaml").write_text(yaml.safe_dump(rules))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "rules_test.yaml"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
