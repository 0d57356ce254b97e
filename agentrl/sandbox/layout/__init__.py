"""What a sandbox keeps of a Dockerfile besides the file tree: its WORKDIR with the files there, and its ENV.

A sandbox's root is read-only, and its working directory is /home/agent. So the last build step of such an image
(`agentrl.sandbox.layout.lay_out_image`) moves the files in the WORKDIR (or in /app, without one) to /opt/agentrl/start, replaces that
folder by a link to /home/agent, and links /logs, /tests and /solution to folders below /tmp. Each new sandbox then copies the
moved files into its working directory (`agentrl.sandbox.layout.fill_workdir`). All of it is part of the image, so both backends have it.
"""

from __future__ import annotations

import io
import json
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker

from agentrl.errors import SandboxError, TaskError
from agentrl.protocols import Sandbox
from agentrl.sandbox.inside.users import ENVIRONMENT, HOME

FOLDER = Path(__file__).parent
ARRANGE, BEGIN = ((FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in ("arrange", "begin"))
DEFAULT = "/app"
BEGIN_S = 60.0
MAX_VARIABLES = 128
MAX_ENVIRONMENT = 16_384
"""Characters of all variables together."""
WRITABLE = ("/tmp", "/dev", "/proc", "/sys", "/agentrl", "/opt/agentrl", HOME)
_SYSTEM = {f"/{name}" for name in ("bin", "boot", "etc", "home", "lib", "lib32", "lib64", "opt", "run", "sbin", "srv", "usr", "var")}
_SYSTEM |= {f"/usr/{name}" for name in ("bin", "lib", "local", "sbin", "share", "src")}
_SYSTEM |= {"/var/lib", "/logs", "/tests", "/solution"}
_BUILDERS_OWN = ("Step ", " ---> ", "Removing intermediate container ")
# What the sandbox sets itself, and what would make a program run other code.
_OWN = ("HOME", "USER", "LOGNAME", "TMPDIR", "PWD", "OLDPWD", "HOSTNAME", "BASH_ENV", "ENV", "PYTHONSTARTUP", "PYTHONHOME")


def environment(said: Sequence[str], workdir: str) -> dict[str, str]:
    """The variables that a sandbox's programs get from an image's `NAME=value` lines. Raises `ValueError` for too many."""
    declared = dict(line.partition("=")[::2] for line in said if "=" in line)
    kept = {name: value for name, value in declared.items() if name not in _OWN and not name.startswith("LD_")}
    if len(kept) > MAX_VARIABLES or sum(map(len, (*kept, *kept.values()))) > MAX_ENVIRONMENT:
        raise ValueError(f"ENV sets more than {MAX_VARIABLES} variables or {MAX_ENVIRONMENT} characters")
    if "PATH" in kept:
        kept["PATH"] = _path(kept["PATH"], workdir)
    return kept


def _path(said: str, workdir: str) -> str:
    """PATH without folders that an agent can write to, and so plant a python3 in; missing default folders are appended."""
    folders = [folder for folder in said.split(":") if folder.startswith("/") and not _below(folder, (*WRITABLE, workdir))]
    return ":".join(dict.fromkeys([*folders, *ENVIRONMENT["PATH"].split(":")]))


def working_directory(said: str) -> str:
    """An image's working directory. Raises `ValueError` for one that a sandbox cannot have."""
    path = posixpath.normpath(said or "/")
    if path == "/":
        return DEFAULT
    if path != HOME and (path in _SYSTEM or _below(path, WRITABLE)):
        raise ValueError(f"WORKDIR {path} cannot be an agent's working directory: choose another one, such as WORKDIR {DEFAULT}")
    return path


def _below(path: str, tops: Sequence[str]) -> bool:
    normal = posixpath.normpath(path)
    return any(normal == top or normal.startswith(top + "/") for top in tops)


def lay_out_image(api: docker.APIClient, tag: str, dockerfile: Path, timeout_s: float) -> None:
    """Replaces the image `tag` by one laid out for sandboxes. Raises `TaskError` naming `dockerfile`. Blocking."""
    config: Mapping[str, Any] = api.inspect_image(tag)["Config"] or {}
    try:
        workdir = working_directory(config.get("WorkingDir") or "")
        said = {"workdir": workdir, "environment": environment(config.get("Env") or (), workdir)}
    except ValueError as error:
        raise TaskError(f"{dockerfile}: {error}", fix=f"correct its ENV and WORKDIR lines; {DEFAULT} is a good WORKDIR") from None
    step = json.dumps(["python3", "-I", "-c", ARRANGE, json.dumps(said)])
    text = f"FROM {tag}\nUSER 0:0\nWORKDIR /\nENV PATH={ENVIRONMENT['PATH']}\nRUN {step}\n"
    printed: list[str] = []
    for item in api.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True, forcerm=True, decode=True, timeout=timeout_s):
        if "error" in item:
            why = printed[-1] if printed else str(item["error"])
            raise TaskError(f"{dockerfile}: {why}", fix=f"put the task's files under {DEFAULT} or the WORKDIR, as plain files and folders")
        lines = str(item.get("stream") or "").splitlines()
        printed += [line for line in lines if line.strip() and not line.startswith(_BUILDERS_OWN)]


async def fill_workdir(sandbox: Sandbox) -> None:
    """Fills a new sandbox's working directory. Raises `TaskError` when the files do not fit, else `SandboxError`."""
    result = await sandbox.python(BEGIN, timeout_s=BEGIN_S)
    if result.ok:
        return
    if "No space left" in result.stderr:
        raise TaskError(
            "the image's WORKDIR does not fit into the sandbox's working directory", fix="raise environment.storage_mb and memory_mb"
        )
    raise SandboxError(f"sandbox {sandbox.id}: its working directory could not be filled: {result.reason or result.stderr[-300:]}")
