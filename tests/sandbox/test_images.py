"""Image recipes: errors, names, and builds."""

import os
import threading
import time
from pathlib import Path

import pytest

from agentrl.errors import SandboxUnavailable, UserError
from agentrl.sandbox import images


def write(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "image.toml").write_text(text)
    return folder


def test_recipe_names_its_image(tmp_path):
    image = images.load_image(write(tmp_path / "My_Tables", 'suite = "bookworm"\npackages = ["python3"]'), cache=tmp_path)
    assert image.tag == f"agentrl/my-tables:{image.recipe.key}"
    assert image.tarball == tmp_path / "images" / image.recipe.key / "base.tar"
    other = images.load_image(write(tmp_path / "other", 'packages = ["python3", "jq"]'), cache=tmp_path)
    assert other.recipe.key != image.recipe.key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('pakages = ["python3"]', r"pakages: (.|\n)*fix: remove pakages; known keys: suite, packages"),
        ('packages = "python3"', r'packages: (.|\n)*fix: packages is a list .*\["python3"'),
        ('suite = "book worm; rm -rf /"', r"suite: (.|\n)*fix: suite is the name of a Debian release"),
        ('pull = "--all"', r"pull: (.|\n)*fix: pull is an image reference for `docker pull`"),
        ('packages = ["python3 --option"]', "packages"),
        ('packages = ["--hook=evil"]', "packages"),
        ("suite = ", r"image\.toml is not TOML(.|\n)*fix: write"),
    ],
)
def test_wrong_recipes_name_the_key(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        images.load_image(write(tmp_path / "image", text), cache=tmp_path)
    assert str(tmp_path / "image" / "image.toml") in str(caught.value)


def test_a_missing_recipe_names_the_file_and_the_fix(tmp_path):
    with pytest.raises(UserError, match=r"neither .*image\.toml nor a Dockerfile exists(.|\n)*fix: write"):
        images.load_image(tmp_path / "none", cache=tmp_path)


def test_too_long_name_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*File name too long"):
        images.load_image(tmp_path / ("x" * 300), cache=tmp_path)


def test_without_mmdebstrap_the_error_names_the_fix(tmp_path, monkeypatch):
    image = images.load_image(write(tmp_path / "image", ""), cache=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt-get install mmdebstrap"):
        images.ensure_tarball(image)


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    image = images.load_image(write(tmp_path / "image", ""), cache=tmp_path)
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor last; do :; done\necho half > "$last"\necho "E: mirror is away"\nexit 3\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"status 3(.|\n)*mirror is away"):
        images.ensure_tarball(image)
    assert [path.name for path in image.folder.iterdir()] == ["files.lock"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only builds by root mount anything")
def test_mounts_of_a_build_are_private(tmp_path, monkeypatch):
    """An attack that watches the machine's mounts must not mistake a concurrent build for an escape."""
    image = images.load_image(write(tmp_path / "image", ""), cache=tmp_path)
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    (tmp_path / "mounted").mkdir()
    seen = f"grep -c {tmp_path}/mounted"
    tool.write_text(
        f"#!/bin/sh\nmount -t tmpfs none {tmp_path}/mounted\n{seen} /proc/self/mountinfo\n{seen} /proc/$PPID/mountinfo\nexit 3\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"status 3:\n1\n0$|status 3:\n1\n0\n"):
        images.ensure_tarball(image)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_parallel_callers_build_once(tmp_path, monkeypatch):
    image = images.load_image(write(tmp_path / "image", ""), cache=tmp_path)
    built = []

    def build(image):
        built.append(image)
        time.sleep(0.2)
        image.tarball.write_bytes(b"tar")

    monkeypatch.setattr(images, "_build", build)
    threads = [threading.Thread(target=images.ensure_tarball, args=(image,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


@pytest.mark.parametrize(("version", "message"), [("", "no python3"), ("python3.7", r"python3\.7"), ("python3.11", None)])
def test_packages_must_include_a_recent_python(tmp_path, monkeypatch, version, message):
    image = images.load_image(write(tmp_path / "image", ""), cache=tmp_path)
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    link = f'ln -s {version} "$top/usr/bin/python3"\n' if version else ""
    pack = 'tar --create --file="$last" --directory="$top" .\n'
    tool.write_text(f'#!/bin/sh\nfor last; do :; done\ntop=$(mktemp -d -p {tmp_path})\nmkdir -p "$top/usr/bin"\n{link}{pack}')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    if message is None:
        assert images.ensure_tarball(image).exists()
        return
    with pytest.raises(UserError, match=rf"include {message}; the exec server(.|\n)*fix: add .python3. to packages"):
        images.ensure_tarball(image)
    assert [path.name for path in image.folder.iterdir()] == ["files.lock"]
