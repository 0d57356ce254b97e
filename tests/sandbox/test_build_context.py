"""Build contexts: content hash, limits, links, and the counting of a Dockerfile's steps."""

import errno
import os
import socket
import tarfile
import time

import pytest

from agentrl.errors import SandboxError, TaskError, UserError
from agentrl.sandbox import builds, images
from agentrl.sandbox.builds import dockerfile_steps, read_build_context


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "My_Task" / "environment"
    (folder / "data").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (folder / "data" / "a").write_text("1")
    return folder


def names(folder):
    with read_build_context(folder).archive() as file, tarfile.open(fileobj=file) as archive:
        return archive.getnames()


def test_key_depends_on_content_only(folder):
    first = read_build_context(folder).key
    os.utime(folder / "data" / "a", (1, 1))
    (folder / "data" / "a").chmod(0o600)
    assert read_build_context(folder).key == first
    seen = {first}
    for change in (
        lambda: (folder / "data" / "a").write_text("2"),
        lambda: (folder / "data" / "a").chmod(0o755),
        lambda: (folder / "data" / "a").rename(folder / "data" / "b"),
        lambda: (folder / "data" / "c").symlink_to("b"),
        lambda: (folder / "empty").mkdir(),
        lambda: (folder / "Dockerfile").write_text("FROM scratch\n#\n"),
    ):
        change()
        seen.add(read_build_context(folder).key)
    assert len(seen) == 7


def test_at_most_the_size_of_a_file_is_read(folder, monkeypatch):
    monkeypatch.setattr(builds, "_opened", lambda entry: os.fdopen(os.open("/dev/zero", os.O_RDONLY), "rb"))  # no end
    assert read_build_context(folder).key == read_build_context(folder).key


def test_image_is_named_after_its_task(folder, tmp_path):
    image = images.load_image(folder, cache=tmp_path)
    assert image.tag == f"agentrl/my-task:{image.recipe.key}"
    (folder / "image.toml").write_text("")
    assert images.load_image(folder, cache=tmp_path).recipe == images.ImageRecipe()  # image.toml has precedence


def test_ignored_files_do_not_count(folder):
    before = read_build_context(folder).key
    (folder / "log").write_text("x")
    (folder / "kept.log").write_text("y")
    (folder / ".dockerignore").write_text("# comment\n*log\n!kept.log\ndata\n")
    assert names(folder) == [".dockerignore", "Dockerfile", "kept.log"]
    after = read_build_context(folder).key
    (folder / "log").write_text("changed")
    assert read_build_context(folder).key == after != before


def test_links_are_not_followed(folder):
    (folder / "link").symlink_to("/etc")
    (folder / "loop").symlink_to(".")
    with read_build_context(folder).archive() as file, tarfile.open(fileobj=file) as archive:
        kinds = {member.name: (member.type, member.linkname) for member in archive}
    assert kinds["link"] == (tarfile.SYMTYPE, "/etc") and kinds["loop"] == (tarfile.SYMTYPE, ".") and len(kinds) == 5


def test_special_files_and_oversized_contexts_are_refused(folder, monkeypatch):
    os.mkfifo(folder / "pipe")
    with pytest.raises(TaskError, match=r"pipe is not a file(.|\n)*\.dockerignore"):
        read_build_context(folder)
    (folder / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(folder / "socket"))
        with pytest.raises(TaskError, match="socket is not a file"):
            read_build_context(folder)
    (folder / "socket").unlink()
    with open(folder / "big", "wb") as file:
        file.truncate(builds.MAX_BYTES + 1)
    with pytest.raises(TaskError, match=r"more than 256 MiB(.|\n)*\.dockerignore"):
        read_build_context(folder)
    (folder / "big").unlink()
    monkeypatch.setattr(builds, "MAX_ENTRIES", 2)
    with pytest.raises(TaskError, match="more than 2 entries"):
        read_build_context(folder)
    monkeypatch.setattr(builds, "MAX_ENTRIES", 1000)
    deep = folder / "/".join("d" * 80)
    deep.mkdir(parents=True)
    with pytest.raises(TaskError, match="nested more than 64 levels deep"):
        read_build_context(folder)


def test_a_symlinked_dockerfile_raises_a_user_error(folder, tmp_path):
    (folder / "Dockerfile").rename(tmp_path / "elsewhere")
    (folder / "Dockerfile").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="Dockerfile is not a regular file"):
        images.load_image(folder)


def test_folder_that_changes_before_the_build_is_refused(folder):
    context = read_build_context(folder)
    (folder / "data" / "a").write_text("later")
    with pytest.raises(TaskError, match="changed while"), context.archive():
        pass


def test_full_disk_is_not_the_tasks_fault(folder, monkeypatch):
    context = read_build_context(folder)
    monkeypatch.setattr(builds.tempfile, "TemporaryFile", lambda prefix: os.fdopen(os.open("/dev/full", os.O_RDWR), "w+b"))
    for size in (1, 1 << 20):  # smaller than a file's buffer, and larger
        (folder / "data" / "a").write_text("1" * size)
        with pytest.raises(SandboxError, match=r"cannot write the build context of .*: No space left on device"), context.archive():
            pass


def test_exhausted_descriptors_are_not_the_tasks_fault(folder, monkeypatch):
    context = read_build_context(folder)

    def fail(number):
        raise OSError(number, os.strerror(number), "x")

    for number, error in ((errno.EMFILE, SandboxError), (errno.EACCES, TaskError)):
        with monkeypatch.context() as patch:
            patch.setattr(builds, "_opened", lambda entry, number=number: fail(number))
            with pytest.raises(error, match="cannot read x"):
                read_build_context(folder)
    monkeypatch.setattr(builds.tempfile, "TemporaryFile", lambda prefix: fail(errno.EMFILE))
    with pytest.raises(SandboxError, match="cannot write the build context"), context.archive():
        pass


def test_steps_are_counted_like_the_daemon():
    text = "# syntax=x\n\nARG A=1\nFROM a\n# note\nRUN one && \\\n  # inside\n\n  two\n  COPY a b\n"
    assert dockerfile_steps(text) == [(3, "ARG A=1"), (4, "FROM a"), (6, "RUN one && two"), (10, "COPY a b")]
    assert dockerfile_steps("# escape=`\nFROM a\nRUN one `\n  two \\\nCMD x") == [(2, "FROM a"), (3, "RUN one two \\"), (5, "CMD x")]
    assert dockerfile_steps("# syntax=docker/dockerfile:1\n# escape = `\nFROM a `\n  b") == [(3, "FROM a b")]
    assert dockerfile_steps("FROM a\n# escape=`\nRUN b `\nRUN c") == [(1, "FROM a"), (3, "RUN b `"), (4, "RUN c")], (
        "too late for a directive"
    )


@pytest.mark.parametrize("line", ["# a=b\n", "# a comment A=0\n", "\n", "RUN a \\\n", "#\t=\n"])
def test_the_steps_of_a_long_dockerfile_are_read_in_linear_time(line: str) -> None:
    began = time.process_time()
    dockerfile_steps(line * 20_000)
    assert time.process_time() - began < 2.0, "took minutes"


def test_invalid_dockerignore_pattern_is_an_error(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / ".dockerignore").write_text("[a-z].log\nkeep[z-a]\n")
    with pytest.raises(TaskError, match=r"dockerignore contains an invalid pattern(.|\n)*fix: write ranges in order"):
        builds.read_build_context(tmp_path)
