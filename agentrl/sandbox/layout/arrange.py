"""The last build step of an image from a Dockerfile: the paths that its programs expect, under a read-only root.

    python3 -I -c SOURCE '{"workdir": "/app", "environment": {"MODE": "test"}}'     as root, in the build

The files in the working directory go to START, from which each sandbox copies them when it opens; the directory itself becomes
a link to the sandbox's. /logs, /tests and /solution become links to folders below /tmp. Standard library only, Python 3.9 or
later. On failure the last line printed is the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys

HOME = "/home/agent"
KEPT = "/opt/agentrl"
START = KEPT + "/start"
SCRATCH = ("/logs", "/tests", "/solution")
MAX_BYTES = 256 << 20
MAX_ENTRIES = 15_000
MAX_DEPTH = 32


class Unfit(Exception):
    """Something that the Dockerfile must do differently."""


def bounded(top: str) -> None:
    """Raises `Unfit` unless the files below `top` can be the start of a working directory."""
    size = count = 0
    for folder, folders, files in os.walk(top):
        if folder.count("/") - top.count("/") > MAX_DEPTH:
            raise Unfit(f"{folder} is nested more than {MAX_DEPTH} deep")
        for name in folders + files:
            info = os.lstat(os.path.join(folder, name))
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                raise Unfit(f"{os.path.join(folder, name)} is not a file, a folder or a link")
            size, count = size + info.st_size, count + 1
        if size > MAX_BYTES or count > MAX_ENTRIES:
            raise Unfit(f"{top}, the working directory, holds more than {MAX_BYTES >> 20} MiB or {MAX_ENTRIES} entries")


def open_to_all(top: str) -> None:
    """Makes all files readable for every user: programs of a sandbox are never root."""
    for folder, _, files in os.walk(top):
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | 0o755)
        for path in (os.path.join(folder, name) for name in files):
            if not os.path.islink(path):
                mode = stat.S_IMODE(os.lstat(path).st_mode) & 0o777
                os.chmod(path, mode | 0o644 | (0o111 if mode & 0o111 else 0))


def take(workdir: str) -> None:
    """Moves the files in the working directory to START and replaces it by a link to HOME."""
    os.makedirs(START, exist_ok=True)
    real = os.path.realpath(workdir)
    if os.path.isdir(real):
        bounded(real)
        for name in os.listdir(real):
            shutil.move(os.path.join(real, name), os.path.join(START, name))
    open_to_all(START)
    if real == HOME:
        return
    if os.path.lexists(real):
        if not os.path.isdir(real):
            raise Unfit(f"{real}, the working directory, is not a folder")
        os.rmdir(real)
    os.makedirs(os.path.dirname(real), exist_ok=True)
    os.symlink(HOME, real)


def scratch(path: str) -> None:
    """Makes `path` a link to a folder below /tmp, unless the image already made it a link."""
    if os.path.islink(path):
        return
    if os.path.lexists(path):
        if any(files for _, _, files in os.walk(path)) or not os.path.isdir(path):
            raise Unfit(f"{path} holds files, but is reserved for tests, solution or logs: put them elsewhere")
        shutil.rmtree(path)
    os.symlink("/tmp" + path, path)


def search_path(said: str) -> str:
    """PATH without folders that resolve to where an agent can write, and so plant a python3."""
    return ":".join(folder for folder in said.split(":") if not (os.path.realpath(folder) + "/").startswith((HOME + "/", "/tmp/")))


def main() -> None:
    said = json.loads(sys.argv[1])
    try:
        take(said["workdir"])
        for path in SCRATCH:
            scratch(path)
        if "PATH" in said["environment"]:
            said["environment"]["PATH"] = search_path(said["environment"]["PATH"])
        with open(KEPT + "/image.json", "w") as file:
            json.dump({"environment": said["environment"]}, file)
    except (Unfit, OSError, shutil.Error) as error:
        print(f"{error}"[:1000])
        sys.exit(1)


main()
