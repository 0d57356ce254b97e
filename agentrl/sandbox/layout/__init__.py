"""Applies the WORKDIR and ENV of a Dockerfile in sandboxes, which have a read-only root and the working directory /home/agent.

The last build step of such an image (`agentrl.sandbox.layout.arrange`) moves the files in the WORKDIR (/app if it is unset or /) to
/opt/agentrl/start, replaces the WORKDIR with a link to /home/agent, and links /logs, /tests and /solution to folders below /tmp. Each new
sandbox creates the folders below /logs and, unless it is opened from a snapshot, copies the moved files to its working directory
(`agentrl.sandbox.layout.begin`).
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

_FOLDER = Path(__file__).parent
_ARRANGE, _BEGIN = ((_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in ("arrange", "begin"))
DEFAULT = "/app"
_BEGIN_S = 60.0
_MAX_VARIABLES = 128
_MAX_CHARACTERS = 16_384  # maximum total length of all variables
_WRITABLE = ("/tmp", "/dev", "/proc", "/sys", "/agentrl", "/opt/agentrl", HOME)
_SYSTEM = {f"/{name}" for name in ("bin", "boot", "etc", "home", "lib", "lib32", "lib64", "opt", "run", "sbin", "srv", "usr", "var")}
_SYSTEM |= {f"/usr/{name}" for name in ("bin", "lib", "local", "sbin", "share", "src")}
_SYSTEM |= {"/var/lib", "/logs", "/tests", "/solution"}
_BUILDER_LINES = ("Step ", " ---> ", "Removing intermediate container ")
# Variables that the sandbox sets itself, or that would make a program run other code.
_RESERVED = ("HOME", "USER", "LOGNAME", "TMPDIR", "PWD", "OLDPWD", "HOSTNAME", "BASH_ENV", "ENV", "PYTHONSTARTUP", "PYTHONHOME")


def environment(declared: Sequence[str], workdir: str) -> dict[str, str]:
    """Returns the variables for a sandbox's programs from the `NAME=value` lines of an image, without reserved variables, and with a PATH
    in which an agent cannot plant programs. Raises `ValueError` if there are too many variables or characters."""
    pairs = dict(line.partition("=")[::2] for line in declared if "=" in line)
    variables = {name: value for name, value in pairs.items() if name not in _RESERVED and not name.startswith("LD_")}
    if len(variables) > _MAX_VARIABLES or sum(map(len, (*variables, *variables.values()))) > _MAX_CHARACTERS:
        raise ValueError(f"ENV sets more than {_MAX_VARIABLES} variables or {_MAX_CHARACTERS} characters")
    if "PATH" in variables:  # excludes folders in which an agent could plant a python3, and adds the default ones
        folders = [path for path in variables["PATH"].split(":") if path.startswith("/") and not _below(path, (*_WRITABLE, workdir))]
        variables["PATH"] = ":".join(dict.fromkeys([*folders, *ENVIRONMENT["PATH"].split(":")]))
    return variables


def working_directory(declared: str) -> str:
    """Returns the working directory for the WORKDIR `declared` of an image; `DEFAULT` if it is empty or `/`. Raises `ValueError` if a
    sandbox cannot use that directory."""
    path = posixpath.normpath(declared or "/")
    if path == "/":
        return DEFAULT
    if path != HOME and (path in _SYSTEM or _below(path, _WRITABLE)):
        raise ValueError(f"WORKDIR {path} cannot be an agent's working directory: choose a different one, such as WORKDIR {DEFAULT}")
    return path


def _below(path: str, tops: Sequence[str]) -> bool:
    normal = posixpath.normpath(path)
    return any(normal == top or normal.startswith(top + "/") for top in tops)


def lay_out_image(api: docker.APIClient, tag: str, dockerfile: Path, timeout_s: float) -> None:
    """Replaces the image `tag` with an image that is laid out for sandboxes. Raises `TaskError`, whose message names `dockerfile`, if the
    image cannot be laid out. Blocking."""
    config: Mapping[str, Any] = api.inspect_image(tag)["Config"] or {}
    try:
        workdir = working_directory(config.get("WorkingDir") or "")
        settings = {"workdir": workdir, "environment": environment(config.get("Env") or (), workdir)}
    except ValueError as error:
        raise TaskError(f"{dockerfile}: {error}", fix=f"correct the ENV and WORKDIR lines, for example with WORKDIR {DEFAULT}") from None
    step = json.dumps(["python3", "-I", "-c", _ARRANGE, json.dumps(settings)])
    text = f"FROM {tag}\nUSER 0:0\nWORKDIR /\nENV PATH={ENVIRONMENT['PATH']}\nRUN {step}\n"
    printed: list[str] = []
    for message in api.build(fileobj=io.BytesIO(text.encode()), tag=tag, rm=True, forcerm=True, decode=True, timeout=timeout_s):
        if "error" in message:
            reason = printed[-1] if printed else str(message["error"])
            fix = f"put the task's files under {DEFAULT} or the WORKDIR, as plain files and folders"
            raise TaskError(f"{dockerfile}: {reason}", fix=fix)
        lines = str(message.get("stream") or "").splitlines()
        printed += [line for line in lines if line.strip() and not line.startswith(_BUILDER_LINES)]


async def prepare_folders(sandbox: Sandbox, *, restored: bool) -> None:
    """Creates the folders below /logs of a new sandbox and, unless its files were `restored` from a snapshot, copies the image's files to
    its working directory. Raises `TaskError` if the files do not fit, and `SandboxError` after any other failure."""
    result = await sandbox.python(_BEGIN + ("" if restored else "fill_workdir()\n"), timeout_s=_BEGIN_S)
    if result.ok:
        return
    if "No space left" in result.stderr:
        raise TaskError(
            "the image's WORKDIR does not fit into the sandbox's working directory", fix="raise environment.storage_mb and memory_mb"
        )
    raise SandboxError(f"sandbox {sandbox.id}: its working directory could not be filled: {result.reason or result.stderr[-300:]}")
