"""A device whose root is read-only, with an overlay of overlayfs where the daemon keeps its state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.test_readme_tour import ROOT

SET_UP = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir lower upper work state run models
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work state
cp -r "$2/demo/models/digits" models/
mount -o remount,ro,bind /
! touch "$2/anything" 2> /dev/null
exec "$3" -B -c "$4" "$1" "$2"
"""

PROGRAM = """
import subprocess, sys
from pathlib import Path
from edge_runtime import Client
import json, numpy as np
folder, root = Path(sys.argv[1]), Path(sys.argv[2])
words = ["--models", f"{folder}/models", "--state", f"{folder}/state", "--zmq", f"ipc://{folder}/run/i.sock"]
serve = [sys.executable, "-B", "-m", "edge_runtime", "serve", *words, "--json"]
daemon = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
try:
    for line in daemon.stderr:
        if json.loads(line)["message"] == "ready":
            break
    with Client(f"ipc://{folder}/run/i.sock") as client:
        array = np.array(json.loads((root / "demo" / "seven.json").read_text()), np.float32)
        name = client.metadata("digits")["inputs"][0]["name"]
        print(int(client.infer("digits", {name: array}).outputs["scores"].argmax()))
finally:
    daemon.terminate()
    print(daemon.wait())
print(sorted(path.name for path in (folder / "upper").iterdir()))
"""


def can_mount() -> bool:
    """Whether this process may make a namespace of mounts, and an overlay in it."""
    if os.geteuid():
        return False
    words = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && cd /mnt && mkdir a b c d && "
    words += "mount -t overlay overlay -o lowerdir=a,upperdir=b,workdir=c d && mount -o remount,ro,bind /"
    return not subprocess.run(["unshare", "-m", "sh", "-c", words], capture_output=True, check=False).returncode


@pytest.mark.skipif(not can_mount(), reason="needs root, and a kernel that lets it mount overlays")
def test_a_daemon_serves_where_the_root_is_read_only_and_keeps_its_state_in_the_overlay(tmp_path: Path) -> None:
    words = ["unshare", "-m", "sh", "-c", SET_UP, "sh", str(tmp_path), str(ROOT), sys.executable, PROGRAM]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 0, ended.stderr
    answer, status, kept = ended.stdout.splitlines()
    assert (answer, status) == ("7", "0")
    assert "loads" in kept
