"""The samples that set many devices up: each is what its reader takes, and each command is one of ours."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.apt.repository import KEYRING, SOURCES_FILE
from deploy.debian.flavours import DAEMON, PACKAGES
from edge_runtime.cli.main import parser_of
from edge_runtime.enrolment.messages import is_device_name
from tests.system.test_readme_tour import ROOT

SAMPLES = ROOT / "deploy" / "provisioning"
ROLE = SAMPLES / "ansible" / "roles" / "edge_runtime"


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def steps() -> Iterator[list[str]]:
    """Each command that cloud-init runs; a text is one or more of the shell's, each after the last one's success."""
    for step in read(SAMPLES / "cloud-init.yaml")["runcmd"]:
        if isinstance(step, list):
            yield step
        else:
            yield from (shlex.split(re.sub(r"\$\(.*?\)", "x", each)) for each in step.split(" && "))


def commands() -> Iterator[list[str]]:
    """Each command of the samples that begins with our program, words of templates included."""
    for words in steps():
        if words[0] == "edge-runtime":
            yield words
    for task in read(ROLE / "tasks" / "main.yml"):
        said = task.get("ansible.builtin.command")
        words = shlex.split(re.sub(r"{{.*?}}", "x", said)) if isinstance(said, str) else (said or {}).get("argv", [""])
        if words[0] == "edge-runtime":
            yield [re.sub(r"{{.*?}}", "x", word) for word in words]


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words[:3]))
def test_a_command_of_a_sample_is_one_that_the_command_line_takes(words: list[str]) -> None:
    parser_of(words[1]).parse_args(words[2:])


def test_samples_name_both_verbs() -> None:
    assert {words[1] for words in commands()} == {"enroll", "authority"}


def test_the_cloud_init_sample_is_one_and_keeps_its_token_from_others() -> None:
    file = SAMPLES / "cloud-init.yaml"
    assert file.read_text(encoding="utf-8").startswith("#cloud-config\n")
    (token,) = [each for each in read(file)["write_files"] if each["path"].endswith("-token")]
    assert token["permissions"] == "0600"
    (enrols,) = [step for step in read(file)["runcmd"] if isinstance(step, str)]
    assert f"--token-file {token['path']} " in enrols
    assert f"&& rm {token['path']}" in enrols, "and not where it failed"


def test_the_samples_install_packages_that_there_are_and_nothing_by_pip() -> None:
    (install,) = [
        task["ansible.builtin.apt"]["name"]
        for task in read(ROLE / "tasks" / "main.yml")
        if "name" in task.get("ansible.builtin.apt", {})
    ]
    asked = {*install, *read(SAMPLES / "cloud-init.yaml")["packages"]}
    assert asked == {KEYRING, DAEMON, "edge-runtime-enrolment"}
    assert asked - {KEYRING} <= set(PACKAGES)
    assert not [file for file in SAMPLES.rglob("*.y*ml") if re.search(r"\bpip\b", file.read_text(encoding="utf-8"))]


def test_the_samples_own_source_gives_way_to_that_of_the_package_of_keys() -> None:
    sample = read(SAMPLES / "cloud-init.yaml")
    ((name, source),) = sample["apt"]["sources"].items()
    key = sample["write_files"][0]["path"]
    assert f"[signed-by={key}]" in source["source"], (
        "as a key of the source's own it would need gpg, which images leave out"
    )
    assert ["rm", "-f", f"/etc/apt/sources.list.d/{name}", key] in list(steps()), "apt wants one key for one place"
    assert name.partition(".")[0] != Path(SOURCES_FILE).stem


def test_a_device_is_named_by_its_own_machine() -> None:
    (enrols,) = [step for step in read(SAMPLES / "cloud-init.yaml")["runcmd"] if isinstance(step, str)]
    (made,) = re.findall(r'--device-id "(.*?)" ', enrols)
    said = subprocess.run(["sh", "-c", f'printf %s "{made}"'], capture_output=True, text=True, check=True).stdout
    assert is_device_name(said)
    assert "hostname" not in read(SAMPLES / "cloud-init.yaml"), "all devices of the image would have one name"


def test_the_role_hides_tokens_and_notifies_only_handlers_that_are_there() -> None:
    tasks, handlers = read(ROLE / "tasks" / "main.yml"), {each["name"] for each in read(ROLE / "handlers" / "main.yml")}
    assert {task["notify"] for task in tasks if "notify" in task} <= handlers
    assert all(task.get("no_log") for task in tasks if "token" in str(task))
    used = set(re.findall(r"{{ (edge_runtime_\w+)", (ROLE / "tasks" / "main.yml").read_text()))
    known = {*read(ROLE / "defaults" / "main.yml"), *(task["register"] for task in tasks if "register" in task)}
    assert used <= known


@pytest.mark.skipif(shutil.which("ansible-playbook") is None, reason="needs Debian's ansible-core")
def test_the_playbook_is_one_for_ansible() -> None:
    words = ["ansible-playbook", "--syntax-check", "-i", "inventory.ini", "site.yml"]
    subprocess.run(words, cwd=SAMPLES / "ansible", check=True, capture_output=True)
