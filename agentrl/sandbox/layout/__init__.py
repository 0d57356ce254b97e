"""What a Dockerfile says besides files and still holds in a sandbox: its WORKDIR with what lies there, and its ENV.

A sandbox's root is read-only, and its working directory is /home/agent. So the last step of making such an image
(`agentrl.sandbox.layout.arrange`) puts aside what lies in the WORKDIR (or in /app, when there is none) and leaves a link to
/home/agent in its place, and links from /logs, /tests and /solution to places below /tmp. Each new sandbox then copies what was put
aside into its working directory (`agentrl.sandbox.layout.begin`). All of it is a part of the image, so both backends have it.
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
# What a sandbox sets itself, and what would start code in a program that was not asked for it.
_OWN = ("HOME", "USER", "LOGNAME", "TMPDIR", "PWD", "OLDPWD", "HOSTNAME", "BASH_ENV", "ENV", "PYTHONSTARTUP", "PYTHONHOME")


def environment(said: Sequence[str], workdir: str) -> dict[str, str]:
    """The variables that programs of a sandbox get from an image's `NAME=value` lines. Raises `ValueError` for too many."""
    found = dict(line.partition("=")[::2] for line in said if "=" in line)
    kept = {name: value for name, value in found.items() if name not in _OWN and not name.startswith("LD_")}
    if len(kept) > MAX_VARIABLES or sum(map(len, (*kept, *kept.values()))) > MAX_ENVIRONMENT:
        raise ValueError(f"ENV sets more than {MAX_VARIABLES} variables or {MAX_ENVIRONMENT} characters")
    if "PATH" in kept:
        kept["PATH"] = _path(kept["PATH"], workdir)
    return kept


def _path(said: str, workdir: str) -> str:
    """PATH without places that an agent can write to, where it could put a python3 of its own; ours come last where they are missing."""
    folders = [folder for folder in said.split(":") if folder.startswith("/") and not _below(folder, (*WRITABLE, workdir))]
    return ":".join(dict.fromkeys([*folders, *ENVIRONMENT["PATH"].split(":")]))


def working_directory(said: str) -> str:
    """Where an image's working directory is. Raises `ValueError` for one that a sandbox cannot have."""
    path = posixpath.normpath(said or "/")
    if path == "/":
        return DEFAULT
    if path != HOME and (path in _SYSTEM or _below(path, WRITABLE)):
        raise ValueError(f"WORKDIR {path} cannot be an agent's working directory: choose another one, such as WORKDIR {DEFAULT}")
    return path


def _below(path: str, tops: Sequence[str]) -> bool:
    normal = posixpath.normpath(path)
    return any(normal == top or normal.startswith(top + "/") for top in tops)


def arrange(api: docker.APIClient, tag: str, dockerfile: Path, timeout_s: float) -> None:
    """Replaces the image `tag` by one that is arranged. Raises `TaskError` naming `dockerfile`. Blocking."""
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


async def begin(sandbox: Sandbox) -> None:
    """Fills the working directory of a new sandbox. Raises `TaskError` where it has no room, `SandboxError`."""
    result = await sandbox.python(BEGIN, timeout_s=BEGIN_S)
    if result.ok:
        return
    if "No space left" in result.stderr:
        raise TaskError(
            "the image's WORKDIR does not fit into the sandbox's working directory", fix="raise environment.storage_mb and memory_mb"
        )
    raise SandboxError(f"sandbox {sandbox.id}: its working directory was not filled: {result.reason or result.stderr[-300:]}")
