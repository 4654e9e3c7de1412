"""The tour of README and docs, as a new user runs it: its commands and programs, against the daemon it starts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.broker import free_ports
from edge_runtime.config.loading import load_config
from edge_runtime.doors.access.rules import door_access
from edge_runtime.doors.open_inference import oip
from edge_runtime.errors import NotServed, QueueTimeExpired
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = README[README.index("\n## The tour") : README.index("\n**Through MQTT**")]
README_MQTT = README[README.index("\n**Through MQTT**") : README.index("\n## The handbook")]
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
MQTT = (ROOT / "docs" / "mqtt.md").read_text()
HTTP = (ROOT / "docs" / "http.md").read_text()
PICTURES = (ROOT / "docs" / "pictures.md").read_text()
UPDATE = (ROOT / "docs" / "updates.md").read_text()
START_LIMIT_S = 300.0
ANSWER_TO_A_PICTURE = "mosquitto_sub -V 5 -t reply/me"


def blocks(language: str, text: str = TOUR) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[str]:
    """Every line of the tour, and of the page of pictures that goes on from it, that asks a running daemon."""
    lines = "".join(blocks("sh") + blocks("sh", PICTURES)).splitlines()
    return [line for line in lines if line.startswith("edge-runtime ") and not line.startswith("edge-runtime serve")]


def programs() -> list[str]:
    return blocks("python") + blocks("python", CLIENTS)


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tour's folder, with its daemon running; `/tmp/tour` stands for it in the documents."""
    folder = tmp_path_factory.mktemp("tour")
    lay_out(folder / "models")
    (serve,) = re.findall(r"^edge-runtime serve .+$", TOUR, re.MULTILINE)
    with serving(words(serve, folder), folder):
        yield folder


def lay_out(models: Path) -> None:
    """The tour's models: digits, and the same with steps for pictures."""
    for name in ("digits", "photo"):
        shutil.copytree(ROOT / "demo" / "models" / "digits", models / name)
    shutil.copy(ROOT / "demo" / "photo.toml", models / "photo" / "model.toml")


@contextmanager
def serving(command: list[str], folder: Path) -> Iterator[None]:
    """A daemon that is ready, by the documents' own command."""
    with (folder / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log)
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not is_ready(folder) and daemon.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        assert is_ready(folder), (folder / "daemon.log").read_text()
        yield
    finally:
        daemon.terminate()
        status = daemon.wait(START_LIMIT_S)
    assert status == 0, (folder / "daemon.log").read_text()


def is_ready(folder: Path) -> bool:
    """Whether the daemon of a folder said so in its log; its doors listen long before."""
    return re.search(r'"message": "ready"|\bready\b.*\bmodels=', (folder / "daemon.log").read_text()) is not None


def words(line: str, folder: Path) -> list[str]:
    program, *rest = shlex.split(line.replace("/tmp/tour", str(folder)), comments=True)
    return [str(Path(sys.executable).with_name(program)), *rest]


def environment(folder: Path) -> dict[str, str]:
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", "".join(blocks("sh") + blocks("sh", UPDATE)), re.MULTILINE))
    return {**os.environ, **{name: value.replace("/tmp/tour", str(folder)) for name, value in exported.items()}}


def run(asked: list[str], folder: Path) -> str:
    done = subprocess.run(
        asked, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tour_has_commands_and_programs() -> None:
    assert len(commands()) >= 4
    assert len(programs()) == 4


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_tour_succeeds_and_says_something(command: str, tour: Path) -> None:
    assert run(words(command, tour), tour).strip()


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (0, r"^1 0\.\d+$"),
        (1, r"^7 0\.99\d*$"),
        (2, r"^\[\[.*\]\]$"),
        (3, r'^\{"id": ?null, ?"model_name": ?"digits"'),
    ],
    ids=["client", "picture", "in process", "json"],
)
def test_a_program_of_the_tour_prints_its_answer(block: int, says: str, tour: Path) -> None:
    # What the tour asks for in 20 ms is refused, rightly, on a machine that is busy with something else.
    program = re.sub(r'(timeout_ms"?[=:] ?)\d+', r"\g<1>20000", programs()[block].replace("/tmp/tour", str(tour)))
    printed = run([sys.executable, "-W", "error", "-c", program], tour)
    assert re.search(says, printed.replace("\n ", " "), re.MULTILINE), printed


# ---- over MQTT ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mqtt_tour(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> Iterator[Path]:
    """The tour's folder, with the daemon of docs/mqtt.md; a broker of our own stands for port 1883."""
    folder = tmp_path_factory.mktemp("mqtt")
    lay_out(folder / "models")
    (serve,) = re.findall(r"^edge-runtime serve .+$", MQTT, re.MULTILINE)
    with serving(words(serve.replace("127.0.0.1:1883", f"127.0.0.1:{broker.port}"), folder), folder):
        with Peer(broker.url) as peer:
            peer.subscribe("edge/dev1/status")
            while peer.next().payload != b"online":
                pass
        yield folder


def shell_commands() -> list[str]:
    lines = "".join(blocks("sh", MQTT)).splitlines()
    return [line for line in lines if line.startswith("mosquitto_") and not line.startswith(ANSWER_TO_A_PICTURE)]


@needs_mosquitto
@pytest.mark.skipif(shutil.which("mosquitto_rr") is None, reason="apt-get install mosquitto-clients")
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (0, r'"name":"digit","datatype":"INT64","shape":\[1\],"data":\[1\]'),
        (1, r'"name":"digits","version":1,"state":"ready"'),
        (2, r"edge/dev1/status online\nedge/dev1/state \{"),
    ],
)
def test_a_shell_command_over_mqtt_prints_its_answer(number: int, says: str, mqtt_tour: Path, broker: Broker) -> None:
    program, *rest = shlex.split(shell_commands()[number])
    assert len(shell_commands()) == 3
    printed = run([program, "-p", str(broker.port), "-W", "20", *rest], mqtt_tour)
    assert re.search(says, printed), printed


@needs_mosquitto
@pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="apt-get install mosquitto-clients")
def test_the_photograph_over_mqtt_is_answered_in_words(mqtt_tour: Path, broker: Broker) -> None:
    (line,) = [line for line in "".join(blocks("sh", MQTT)).splitlines() if line.startswith("(sleep 1; ")]
    program, *rest = shlex.split(line.removeprefix("(sleep 1; ").removesuffix(") &"))
    with Peer(broker.url) as peer:
        peer.subscribe("reply/me", 1)
        run([program, "-p", str(broker.port), *rest], mqtt_tour)
        answer = peer.next().payload
    assert re.search(rb'"model_name":"photo".*"classes":\[\{"label":"7","index":7,"score":0.99', answer), answer


def test_the_commands_over_mqtt_of_the_readme_are_those_of_its_page() -> None:
    lines = "".join(blocks("sh", README_MQTT)).splitlines()
    assert len(lines) == 3
    assert set(lines) <= set("".join(blocks("sh", MQTT)).splitlines())


@needs_mosquitto
def test_the_program_over_mqtt_prints_who_is_there_and_its_answer(mqtt_tour: Path, broker: Broker) -> None:
    (program,) = blocks("python", MQTT)
    program = program.replace("127.0.0.1:1883", f"127.0.0.1:{broker.port}")
    printed = run([sys.executable, "-W", "error", "-c", program], mqtt_tour)
    assert re.fullmatch(r"\['dev1'\]\n\[\d\]\n", printed), printed


def test_the_configuration_of_what_is_published_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("".join(blocks("toml", MQTT)))
    config = load_config(tmp_path / "config.toml", {})
    assert [rule.source for rule in config.publish] == ["zmq", "folder"]


# ---- over HTTP and gRPC ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HttpTour:
    """The tour's folder, with the daemon of docs/http.md, and ports of its own in place of the page's."""

    folder: Path
    ports: Mapping[str, str]

    def mend(self, text: str) -> str:
        """The page's text with this folder and these ports; what it wants in 20 ms waits for a busy machine."""
        text = text.replace("/tmp/tour", str(self.folder))
        return re.sub(r"(?<=:)(8000|8001|8010)\b", lambda found: self.ports[found[1]], text)


@pytest.fixture(scope="module")
def http_tour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpTour]:
    folder = tmp_path_factory.mktemp("http")
    lay_out(folder / "models")
    tour = HttpTour(folder, dict(zip(("8000", "8001", "8010"), map(str, free_ports(3)), strict=True)))
    serve, _ = re.findall(r"^edge-runtime serve .+$", HTTP, re.MULTILINE)  # the other is KServe's: test_kserve.py
    with serving(words(tour.mend(f"{serve} --http-control 127.0.0.1:8010 --client-shared-memory"), folder), folder):
        yield tour


def http_lines() -> list[str]:
    """The page's lines for a shell, but for the daemon's own."""
    return [line for line in "".join(blocks("sh", HTTP)).splitlines() if not line.startswith("edge-runtime serve")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl")
def test_the_shell_lines_over_http_print_their_answers_in_order(http_tour: HttpTour) -> None:
    lines = http_lines()
    path = f"PATH={Path(sys.executable).parent}:$PATH; "
    printed = [run(["bash", "-c", path + http_tour.mend(line)], http_tour.folder).strip() for line in lines]
    said = dict(zip(lines, printed, strict=True))
    wanted = {
        "/v2/health/ready": r'\{"ready":true\}',
        "/v2/models/digits": r'\{"name":"digits","versions":\["1"\],.*',
        "/v2/repository/index": r'\[\{"name":"digits","version":"1","state":"READY","reason":""\},\{"name":"photo".*',
        "/v2/models/digits/infer": r'.*\{"name":"digit","datatype":"INT64","shape":\[1\],"data":\[7\]\}\]\}',
        "/v2/repository/models/digits/unload": r"\{\}",
        "/v2/repository/models/digits/load": r"\{\}",
    }
    for path, form in wanted.items():
        (line,) = (each for each in lines if re.search(rf":\d+{path}( |$)", each))
        assert re.fullmatch(form, said[line]), f"{line}: {said[line]}"
    pictures = [printed for line, printed in said.items() if "/photo/infer" in line]
    assert len(pictures) == 3
    for each in pictures:
        assert re.search(r'"picture":\{"width":640,"height":480,.*"classes":\[\{"label":"7"', each), each
    (token,) = (printed for line, printed in said.items() if line.startswith("edge-runtime token add"))
    assert token.startswith("ert_")


def test_the_programs_of_tritonclient_print_metadata_and_an_answer(http_tour: HttpTour) -> None:
    program = next(each for each in blocks("python", HTTP) if "tritonclient" in each)
    over_grpc = program.replace("tritonclient.http", "tritonclient.grpc").replace(":8000", ":8001")
    for each in (program, over_grpc):
        # tritonclient's own gevent warns of itself, so warnings are not errors here.
        printed = run([sys.executable, "-c", http_tour.mend(each)], http_tour.folder)
        assert "digits" in printed
        assert re.search(r"^\[\d\]$", printed, re.MULTILINE), printed


def test_the_program_with_shared_memory_prints_an_answer(http_tour: HttpTour) -> None:
    program = next(each for each in blocks("python", HTTP) if "shared_memory" in each)
    program = http_tour.mend(program).replace("/camera", f"/{http_tour.folder.parent.name}-camera")
    printed = run([sys.executable, "-c", program], http_tour.folder)
    assert re.fullmatch(r"\[\d\]\n", printed), printed


def test_the_configuration_of_doors_off_the_machine_is_one(tmp_path: Path) -> None:
    (text,) = blocks("toml", HTTP)
    for name in ("door.crt", "door.key"):
        (tmp_path / name).touch()
    run([*words("edge-runtime token add line-1 --file", tmp_path), str(tmp_path / "tokens.toml")], tmp_path)
    text = text.replace("/etc/edge-runtime", str(tmp_path)).replace("/tmp/tour", str(tmp_path))
    (tmp_path / "config.toml").write_text(text)
    config = load_config(tmp_path / "config.toml", {})
    for key, settings in (("http", config.http), ("grpc", config.grpc)):
        access = door_access(settings, key)
        assert access is not None
        assert access.has_tokens


def test_the_table_of_statuses_over_http_and_grpc_is_the_protocols() -> None:
    told = re.findall(r"^\| (`.*) \| (\d{3}) \| ([A-Z_]+) \|$", HTTP, re.MULTILINE)
    assert {code for codes, _, _ in told for code in re.findall(r"`(\w+)`", codes)} == set(oip.STATUSES)
    for codes, status, name in told:
        for code in re.findall(r"`(\w+)`", codes):
            kinds = {"not_ready` of": NotServed, "by a queue policy": QueueTimeExpired}
            kind = next((kind for words, kind in kinds.items() if words in codes and kind.code == code), None)
            wanted = oip.STATUSES[code] if kind is None else oip.KIND_STATUSES[kind]
            assert wanted == (int(status), name), code


# ---- updates --------------------------------------------------------------------------------------------------------


def update_commands(verb: str) -> list[str]:
    """The page's lines of one verb."""
    return re.findall(rf"^edge-runtime {verb} .+$", "".join(blocks("sh", UPDATE)), re.MULTILINE)


@contextmanager
def repository_server(command: list[str], folder: Path) -> Iterator[str]:
    """The address of a repository that the page's own command shows, on a port of its own."""
    asked = [*command, "--port", "0", "--json"]
    with subprocess.Popen(asked, env=environment(folder), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            while not (found := re.search(r"http://[^\s\"]+", server.stdout.readline())):
                assert server.poll() is None
            yield found[0].rstrip("/")
        finally:
            server.terminate()


READER = """
[[step]]
name = "read"
model = "digits"
inputs = {image = "input.image"}

[output]
digit = "read.digit"
"""


@pytest.mark.long
def test_the_device_of_the_update_page_serves_the_release_that_the_page_publishes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "demo" / "models" / "digits", tmp_path / "models" / "digits")
    (tmp_path / "models" / "reader").mkdir()
    (tmp_path / "models" / "reader" / "pipeline.toml").write_text(READER)
    lines = update_commands("repo")
    show = next(line for line in lines if line.endswith("repo serve"))
    publishing = [line for line in lines if line != show]
    assert len(publishing) == 7
    for line in publishing:
        assert run(words(line, tmp_path), tmp_path).strip()
    (text,) = blocks("toml", UPDATE)
    (serve,) = update_commands("serve")
    with repository_server(words(show, tmp_path), tmp_path) as address:
        told = text.replace("/tmp/tour", str(tmp_path)).replace("http://127.0.0.1:8080", address)
        (tmp_path / "update.toml").write_text(told)
        with serving(words(serve, tmp_path), tmp_path):
            asking = update_commands("update") + update_commands("infer")
            said = {line.split()[2]: run(words(line, tmp_path), tmp_path) for line in asking}
    assert "available" in said["check"]
    assert "installed" in said["apply"]
    assert "serves" in said["status"]
    assert "committed" in said["history"]
    assert "[7]  100.00%" in said["digits"]
    assert "reader" in said["status"]
