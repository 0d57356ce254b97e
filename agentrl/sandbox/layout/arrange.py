"""The last build step of an image from a Dockerfile. This step arranges the paths that programs expect under a read-only root.

    python3 -I -c SOURCE '{"workdir": "/app", "environment": {"MODE": "test"}}'     as root, in the build

Moves the files in the working directory to START, from which each new sandbox copies them, and replaces that directory with a link to the
sandbox's working directory. Replaces /logs, /tests and /solution with links to folders below /tmp. Uses only the standard library of Python
3.9 or later. After a failure, the last printed line is the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys

HOME = "/home/agent"
AGENTRL = "/opt/agentrl"
START = AGENTRL + "/start"
SCRATCH = ("/logs", "/tests", "/solution")
MAX_BYTES = 256 << 20
MAX_ENTRIES = 15_000
MAX_DEPTH = 32


class Unfit(Exception):
    """The image of a Dockerfile cannot be arranged. The message says what must change."""


def check_bounds(top: str) -> None:
    """Raises `Unfit` if the files below `top` do not fit in a working directory, or are not files, folders and links."""
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
            raise Unfit(f"{top}, the working directory, contains more than {MAX_BYTES >> 20} MiB or {MAX_ENTRIES} entries")


def make_readable(top: str) -> None:
    """Makes all files and folders readable for every user, because programs in a sandbox are never root."""
    for folder, _, files in os.walk(top):
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | 0o755)
        for path in (os.path.join(folder, name) for name in files):
            if not os.path.islink(path):
                mode = stat.S_IMODE(os.lstat(path).st_mode) & 0o777
                os.chmod(path, mode | 0o644 | (0o111 if mode & 0o111 else 0))


def move_workdir(workdir: str) -> None:
    """Moves the files in the working directory to START, and replaces the directory with a link to HOME unless it is HOME. Raises `Unfit`
    if the directory or its files are unsuitable."""
    os.makedirs(START, exist_ok=True)
    real = os.path.realpath(workdir)
    if os.path.isdir(real):
        check_bounds(real)
        for name in os.listdir(real):
            shutil.move(os.path.join(real, name), os.path.join(START, name))
    make_readable(START)
    if real == HOME:
        return
    if os.path.lexists(real):
        if not os.path.isdir(real):
            raise Unfit(f"{real}, the working directory, is not a folder")
        os.rmdir(real)
    os.makedirs(os.path.dirname(real), exist_ok=True)
    os.symlink(HOME, real)


def link_scratch(path: str) -> None:
    """Makes `path` a link to a folder below /tmp, unless it is already a link in the image. Raises `Unfit` if it contains files."""
    if os.path.islink(path):
        return
    if os.path.lexists(path):
        if any(files for _, _, files in os.walk(path)) or not os.path.isdir(path):
            raise Unfit(f"{path} contains files, but is reserved for tests, solution or logs: put them elsewhere")
        shutil.rmtree(path)
    os.symlink("/tmp" + path, path)


def main() -> None:
    """Arranges the image. Exits with status 1 on failure."""
    settings = json.loads(sys.argv[1])
    variables = settings["environment"]
    try:
        move_workdir(settings["workdir"])
        for path in SCRATCH:
            link_scratch(path)
        if "PATH" in variables:  # excludes folders that resolve to where an agent could plant a python3
            folders = variables["PATH"].split(":")
            variables["PATH"] = ":".join(path for path in folders if not (os.path.realpath(path) + "/").startswith((HOME + "/", "/tmp/")))
        with open(AGENTRL + "/image.json", "w") as file:
            json.dump({"environment": variables}, file)
    except (Unfit, OSError, shutil.Error) as error:
        print(f"{error}"[:1000])
        sys.exit(1)


main()
