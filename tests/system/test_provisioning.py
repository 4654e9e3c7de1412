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

from edge_runtime.cli.main import parser_of
from tests.system.test_readme_tour import ROOT

SAMPLES = ROOT / "deploy" / "provisioning"
ROLE = SAMPLES / "ansible" / "roles" / "edge_runtime"


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def commands() -> Iterator[list[str]]:
    """Each command of the samples that begins with our program, words of templates included."""
    for step in read(SAMPLES / "cloud-init.yaml")["runcmd"]:
        if step[0] == "edge-runtime":
            yield step
    for task in read(ROLE / "tasks" / "main.yml"):
        said = task.get("ansible.builtin.command")
        if isinstance(said, str):
            yield shlex.split(re.sub(r"{{.*?}}", "x", said))
        elif isinstance(said, dict):
            yield [re.sub(r"{{.*?}}", "x", word) for word in said["argv"]]


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words[:3]))
def test_a_command_of_a_sample_is_one_that_the_command_line_takes(words: list[str]) -> None:
    assert words[0] == "edge-runtime"
    parser_of(words[1]).parse_args(words[2:])


def test_samples_name_both_verbs() -> None:
    assert {words[1] for words in commands()} == {"enroll", "authority"}


def test_the_cloud_init_sample_is_one_and_keeps_its_token_from_others() -> None:
    file = SAMPLES / "cloud-init.yaml"
    assert file.read_text(encoding="utf-8").startswith("#cloud-config\n")
    (token,) = read(file)["write_files"]
    assert token["permissions"] == "0600"
    assert ["rm", token["path"]] in read(file)["runcmd"]


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
