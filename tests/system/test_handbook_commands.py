"""The commands of all pages: each is a command line of ours; those that no other test runs are run here."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from demo.broker import free_ports
from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.main import main, parser_of, verb_names
from tests.contract.converters.test_import_sources import mlflow
from tests.contract.torchserve.test_torchserve_import import MODULE
from tests.models.language_models import tiny_model, tiny_vision_model
from tests.models.sent_pictures import RED, png
from tests.models.torchserve_archives import put_archive
from tests.system.test_readme_tour import ROOT, serving

DIGITS = ROOT / "demo" / "models" / "digits"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "deploy", "cross", "demo", "device_profiles", "bench")
    for path in (ROOT / folder).glob("*.md" if folder in (".", "docs") else "**/*.md")
)

RUN_BY = {
    "README.md": "tests/system/test_readme_tour.py",
    "docs/clients.md": "tests/system/test_readme_tour.py",
    "docs/http.md": "tests/system/test_readme_tour.py",
    "docs/mqtt.md": "tests/system/test_readme_tour.py",
    "docs/pictures.md": "tests/system/test_readme_tour.py",
    "docs/updates.md": "tests/system/test_readme_tour.py",
    "docs/cameras.md": "tests/contract/site/test_cameras.py",
    "docs/tune.md": "tests/contract/tuning/test_tuning.py",
    "docs/pipelines.md": "tests/contract/pipelines/test_pipelines_page.py",
    "docs/from-torchserve.md": "tests/system/test_handbook_commands.py",
    "docs/from-triton.md": "tests/system/test_handbook_commands.py",
    "docs/import.md": "tests/system/test_handbook_commands.py",
    "docs/language.md": "tests/system/test_handbook_commands.py",
    "docs/models.md": "tests/system/test_handbook_commands.py",
    "deploy/runbook.md": "tests/system/runbook_site.py",
}
"""Pages whose commands a test reads and runs, all that follow but those of NOT_HERE."""

NOT_RUN = {
    "CONTRIBUTING.md": "they are what .ci/run does",
    "cross/README.md": "tests/system/test_image.py builds such an image; skopeo fetches NVIDIA's",
    "deploy/apt/README.md": "root's, and a key of the reader's; tests/device boots devices on such a repository",
    "deploy/broker/README.md": "root's; tests/attacks/test_broker_configuration.py runs mosquitto on these files",
    "deploy/containers/README.md": "needs Docker; tests/system/test_containers.py reads the files",
    "deploy/kserve/README.md": "needs a cluster; tests/system/test_kserve.py starts what it would start",
    "deploy/monitoring/README.md": "tests/system/test_monitoring.py runs promtool on these files",
    "deploy/repository/README.md": "prompts for passphrases; the runbook's test, the update page's and "
    "tests/contract/publish/test_repo_push.py run these verbs",
    "deploy/engines/README.md": "root's; tests/contract/updates/test_mender_module.py runs them, but those not tried",
    "docs/convert.md": "needs 2 GB of libraries; tests/converters runs each conversion",
    "docs/fleet.md": "needs a fleet; tests/contract/fleet and tests/contract/rollouts run these verbs on a broker",
    "docs/provisioning.md": "needs a device; tests/contract/enrolment and tests/contract/publish run these verbs",
    "deploy/provisioning/README.md": "needs devices; tests/system/test_provisioning.py reads the samples",
    "docs/text.md": "fetches a model of Hugging Face's; tests/contract/text/test_text_commands.py runs these verbs",
    "docs/plugins.md": "its plug-ins are made up; tests/contract/daemon/test_example_plugins.py installs and runs them",
    "docs/install.md": "root's; tests/device boots the package, tests/system/test_deb.py and test_image.py build it",
}
"""Pages whose commands no test can run as they stand: why, and what is tested in their place."""

NOT_HERE = re.compile(r"(sudo|pip|docker|make|deactivate|\. )\b|# on each device")
"""Beginnings of lines that change the machine or build for minutes."""


def shell_lines(page: str) -> list[str]:
    """The lines of a page's shell blocks, continued ones joined."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    return "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()


def own_lines(page: str) -> list[str]:
    """Every line of a page's blocks, of a shell or bare, that begins with our program."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = "".join(re.findall(r"^```(?:sh|)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    return [line for line in found if line.startswith("edge-runtime ")]


def words_of(line: str) -> list[str]:
    """A line as a shell cuts it, without its comment and what follows a pipe."""
    return shlex.split(line.partition(" | ")[0], comments=True)


def inline_commands(page: str) -> list[str]:
    """Every `edge-runtime verb …` within a page's sentences."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`edge-runtime ([^`]+)`", text)


# ---- each is a command line of ours ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in own_lines(page)])
def test_a_command_of_a_page_is_one_that_the_command_line_takes(page: str, line: str) -> None:
    _, verb, *rest = words_of(line)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parser_of(verb).parse_args(rest)
        except (UsageError, SystemExit) as error:
            pytest.fail(f"{page}: {line}: {error} {said.getvalue()}")


@pytest.mark.parametrize(
    ("page", "command"), sorted({(page, each) for page in PAGES for each in inline_commands(page)})
)
def test_a_command_within_a_sentence_names_a_verb_and_options_that_are_there(page: str, command: str) -> None:
    verb, *rest = command.replace("\n", " ").split()
    if verb == "VERB" or verb.startswith("--"):
        return
    assert verb in verb_names()
    told = parser_of(verb).format_help()
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        words = [word for word in rest if re.fullmatch(r"[a-z][a-z-]*", word)]
        actions = [told, _help_of(verb, *words), *(_help_of(verb, word) for word in words)]
        assert any(option in text for text in actions), f"{page}: {command}"


def _help_of(verb: str, *action: str) -> str:
    """What `edge-runtime VERB ACTION --help` prints; "" where the verb has no such action."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(UsageError, SystemExit):
        parser_of(verb).parse_args([*action, "--help"])
    return said.getvalue()


def test_each_page_with_commands_is_run_by_a_test_or_says_why_not() -> None:
    with_commands = {page for page in PAGES if shell_lines(page)}
    assert with_commands == {*RUN_BY, *NOT_RUN} - {"docs/clients.md"}
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not read {page}"
    for reason in NOT_RUN.values():
        for test in re.findall(r"tests/[\w/]+(?:\.py)?", reason):
            assert (ROOT / test).exists(), test


# ---- those of four pages, run ---------------------------------------------------------------------------------------


Here = Callable[[str], str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Run a page's line in the test's folder, ours in this process; its standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_RUNTIME_ENDPOINT", f"ipc://{tmp_path}/infer.sock")

    def run(line: str) -> str:
        capfd.readouterr()
        program, *rest = words_of(line)
        if program == "edge-runtime":
            status = main(rest)
        else:
            status = subprocess.run(["bash", "-c", line], timeout=120, check=False).returncode
        out, err = capfd.readouterr()
        assert status == 0, f"{line}\n{out}\n{err}"
        return out

    return run


@contextlib.contextmanager
def served(line: str, folder: Path) -> Iterator[None]:
    """The daemon of a page's line, with a socket and a state of its own."""
    program, *rest = words_of(line)
    own_places = ["--zmq", f"ipc://{folder}/infer.sock", "--state", f"{folder}/state"]
    with serving([str(Path(sys.executable).with_name(program)), *rest, *own_places], folder):
        yield


def lines_to_run(page: str, said: Mapping[str, str] | None = None) -> list[str]:
    """A page's lines that run on any machine. said: what stands for a name or a port of the page's."""
    lines = [line for line in shell_lines(page) if line and not NOT_HERE.match(line)]
    return [functools.reduce(lambda text, pair: text.replace(*pair), (said or {}).items(), line) for line in lines]


def test_the_commands_of_the_import_page_take_models_of_triton_and_mlflow(here: Here, tmp_path: Path) -> None:
    shutil.copytree(DIGITS, tmp_path / "triton_repository" / "digits")
    (tmp_path / "triton_repository" / "digits" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    (tmp_path / "mlflow_model").mkdir()
    mlflow(tmp_path / "mlflow_model")
    dry, taken, churn = lines_to_run("docs/import.md")
    assert "digits" in here(dry)
    assert not (tmp_path / "models").exists()
    assert "taken" in here(taken)
    assert "churn" in here(churn)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["churn", "digits"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl")
def test_the_commands_of_the_torchserve_page_import_a_store_and_ask_it(here: Here, tmp_path: Path) -> None:
    (tmp_path / "model_store").mkdir()
    put_archive(tmp_path / "model_store", "resnet", {"entry.py": MODULE}, handler="entry.py:handle")
    shutil.copy(ROOT / "demo" / "seven.jpg", tmp_path / "kitten.jpg")
    said = {":8080": f":{free_ports(1)[0]}", "models/": f"{tmp_path}/models/"}
    dry, taken, serve, ping, predict = lines_to_run("docs/from-torchserve.md", said)
    assert "resnet" in here(dry)
    assert "taken" in here(taken)
    with served(serve, tmp_path):
        assert '"status":' in here(ping)
        assert here(predict) == "1:1:['body']"


@pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl")
def test_the_commands_of_the_triton_page_serve_a_repository_as_it_stands(here: Here, tmp_path: Path) -> None:
    shutil.copytree(DIGITS, tmp_path / "repository" / "digits")
    (tmp_path / "repository" / "digits" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    http, grpc = free_ports(2)
    said = {"REPO": f"{tmp_path}/repository", "NAME": "digits", ":8000": f":{http}", ":8001": f":{grpc}"}
    serve, listed, shown, config = lines_to_run("docs/from-triton.md", said)
    with served(serve, tmp_path):
        assert "digits" in here(listed)
        assert "scores" in here(shown)
        assert re.search(r'"name": ?"digits"', here(config))


@pytest.mark.skipif(shutil.which("curl") is None, reason="apt-get install curl")
@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="the extra llm is not installed")
def test_the_commands_of_the_language_page_serve_a_model_and_ask_it(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"127.0.0.1:8000": f"127.0.0.1:{free_ports(1)[0]}"}
    export, serve, chat, *asks, seeing_export, see, see_in_chat = lines_to_run("docs/language.md", said)
    assert export.endswith("models/qwen/1")
    assert seeing_export.endswith("models/seer/1")
    tiny_model(tmp_path / "models" / "qwen" / "1")  # what the export would fetch
    tiny_vision_model(tmp_path / "models" / "seer" / "1")
    (tmp_path / "door.jpg").write_bytes(png(RED))
    settings = (ROOT / "docs/language.md").read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    (tmp_path / "config.toml").write_text(settings.replace(*next(iter(said.items()))))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with served(serve, tmp_path):
        here(f"set -o pipefail; {chat} </dev/null")
        text, said_back, events, lines = (here(f"set -o pipefail; {line}") for line in asks)
        assert text
        assert said_back
        assert events.endswith("data: [DONE]\n\n")
        assert '"done":true' in lines.splitlines()[-1]
        assert here(see)
        assert here(f"set -o pipefail; {see_in_chat}")


def test_the_commands_of_the_models_page_lay_models_out(here: Here, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "saved_model_folder").mkdir()
    for name in ("churn.json", "detector.tflite", "net.onnx", "saved_model_folder/saved_model.pb"):
        (tmp_path / name).write_bytes(b"a model")
    for line in lines_to_run("docs/models.md"):
        here(line)
    found = sorted(path.relative_to(tmp_path / "models").as_posix() for path in (tmp_path / "models").rglob("*.*"))
    assert found == ["churn.json", "detector.tflite", "flowers/saved_model.pb", "net.onnx"]
