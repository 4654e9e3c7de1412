"""The parts of images: trees, locked packages and wheels, layers and archives. No network, nothing built."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from cross import build_image, debian, oci, wheels
from cross.tree import Tree

EPOCH = "1970-01-01T00:00:00Z"


def small_tree() -> Tree:
    tree = Tree()
    tree.file("usr/bin/tool", b"#!", mode=0o755)
    tree.link("bin", "usr/bin")
    tree.folder("var/lib/state", 0o750, owner=10001)
    return tree


def small_image(
    architecture: str = "amd64", base: oci.Image | None = None, text: bytes = b"", environment: str = "PATH=/bin"
) -> oci.Image:
    tree = small_tree()
    tree.file("text", text)
    config = {"Env": environment.split(), "Labels": {"version": "1"}}
    return oci.make_image((oci.make_layer(tree.tar(), "a test"),), architecture, config, EPOCH, base)


def config_of(image: oci.Image) -> dict[str, object]:
    described: dict[str, object] = json.loads(image.config.data or b"")
    return described


def test_a_tar_is_the_same_whatever_the_order_in_which_files_were_added() -> None:
    other = Tree()
    other.folder("var/lib/state", 0o750, owner=10001)
    other.link("bin", "usr/bin")
    other.file("usr/bin/tool", b"#!", mode=0o755)
    assert other.tar() == small_tree().tar()


def test_a_tar_holds_folders_before_what_is_in_them_with_their_modes_and_owners() -> None:
    with tarfile.open(fileobj=io.BytesIO(small_tree().tar())) as tar:
        found = {member.name: (member.mode, member.uid, member.gid, member.mtime) for member in tar}
    assert list(found) == ["bin", "usr", "usr/bin", "usr/bin/tool", "var", "var/lib", "var/lib/state"]
    assert found["usr/bin/tool"] == (0o755, 0, 0, 0)
    assert found["var/lib/state"] == (0o750, 10001, 10001, 0)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../etc/passwd", "a/../../b", "a//b", "a/"])
def test_a_path_that_leaves_the_image_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path inside an image"):
        Tree().file(path, b"")


def test_an_archive_that_was_written_is_read_as_the_same_image(tmp_path: Path) -> None:
    image = small_image()
    digest = oci.write_archive(tmp_path / "image.tar", [image], "test:1")
    found = oci.read_archive(tmp_path / "image.tar")
    assert digest == image.manifest.digest == found.manifest.digest
    assert (found.config.data, found.architecture) == (image.config.data, "amd64")
    assert [layer.diff_id for layer in found.layers] == [layer.diff_id for layer in image.layers]
    assert [path.name for path in tmp_path.iterdir()] == ["image.tar"]


def test_the_same_layers_give_the_same_archive_and_a_changed_file_another(tmp_path: Path) -> None:
    for name, text in (("1", b""), ("2", b""), ("3", b"x")):
        oci.write_archive(tmp_path / name, [small_image(text=text)], "test:1")
    first, second, third = ((tmp_path / name).read_bytes() for name in "123")
    assert first == second != third


def test_an_image_on_a_base_has_the_layers_of_both_and_the_base_s_path(tmp_path: Path) -> None:
    of_base = small_image("arm64", text=b"base", environment="PATH=/cuda/bin:/bin LANG=C CUDA=12")
    oci.write_archive(tmp_path / "base.tar", [of_base], "base:1")
    base = oci.read_archive(tmp_path / "base.tar")
    on_it = small_image("arm64", base, environment="PATH=/bin LANG=C.UTF-8 HOME=/state")
    oci.write_archive(tmp_path / "image.tar", [on_it], "test:1")
    found = oci.read_archive(tmp_path / "image.tar")
    assert len(found.layers) == 2
    assert found.layers[0].diff_id == base.layers[0].diff_id
    environment = config_of(found)["config"]["Env"]  # type: ignore[index]
    assert environment == ["PATH=/cuda/bin:/bin", "LANG=C.UTF-8", "CUDA=12", "HOME=/state"]
    with tarfile.open(tmp_path / "image.tar") as tar:
        for member in tar:
            if member.name.startswith("blobs/"):
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                assert member.name.endswith(hashlib.sha256(content).hexdigest())


def test_an_archive_of_two_architectures_is_not_a_base(tmp_path: Path) -> None:
    oci.write_archive(tmp_path / "both.tar", [small_image("amd64"), small_image("arm64")], "test:1")
    with pytest.raises(ValueError, match="several images"):
        oci.read_archive(tmp_path / "both.tar")


def test_both_architectures_are_locked_to_the_same_versions_of_the_same_packages() -> None:
    amd64, arm64 = debian.read_lock("amd64"), debian.read_lock("arm64")
    assert [(each.name, each.version) for each in amd64] == [(each.name, each.version) for each in arm64]
    assert {"libc6", "python3.13-minimal", "ca-certificates", "tzdata"} <= {each.name for each in amd64}
    assert all(len(each.sha256) == 64 for each in amd64 + arm64)
    assert len(debian.lock_day()) == 8


def test_a_damaged_package_in_the_cache_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = debian.read_lock("amd64")[0]
    (tmp_path / f"{package.sha256}.deb").write_bytes(b"something else")
    monkeypatch.setattr(debian, "MIRRORS", {"debian": tmp_path.as_uri(), "debian-security": tmp_path.as_uri()})
    monkeypatch.setattr(debian, "SNAPSHOT", tmp_path.as_uri() + "/{archive}/{day}/{path}")
    with pytest.raises(SystemExit, match="make image-lock"):
        debian.fetch(package, tmp_path)


@pytest.mark.parametrize("minor", [10, 13])
@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_markers_are_read_for_the_target_and_not_for_this_machine(architecture: str, minor: int) -> None:
    locked = wheels._locked(wheels.Target(architecture, minor, 35))
    assert ("tomli" in locked) == (minor == 10)
    assert locked["onnxruntime"].startswith("onnxruntime==1.23.2 " if minor == 10 else "onnxruntime==1.3")
    assert all("--hash=sha256:" in line for line in locked.values())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--flavour", "jetson"], "skopeo copy"),
        (["--flavour", "tensorrt"], "invalid choice"),
        (["--arch", "armhf"], "invalid choice"),
        (["--base", "x.tar"], "for the jetson flavour"),
    ],
)
def test_an_image_that_cannot_be_built_is_refused_before_anything_is_fetched(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_image.main(words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
