"""Declared outputs: the files of an agent's work that are judged, and how they leave its sandbox.

A task declares patterns of paths relative to the working directory: `report.json`, `src/*.py`, `site/**`. In a pattern `*` and
`?` stand for characters of one name, a `**` that is a whole name for any number of folders. Only regular files are taken, never
what a link points to, and only within bounds; what the agent made of its files is its own doing and never a fault of the machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from agentrl.errors import SandboxTimeout
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import OUTPUT_BYTES, OUTPUT_FILES, ExecResult, Task

MAX_DEPTH = 32
MAX_PATH = 512
COLLECT_S = 90.0
"""Deadline of collecting; a sandbox that needs longer has failed, for its server answers whatever the agent's programs do."""
LISTING_S = 20.0
LISTING_BYTES = 1 << 20

# Prints the files under the working directory as JSON. The agent can make it say anything: it only proposes names.
_LISTING = """
import json, os
names = []
for root in %r:
    for folder, folders, files in os.walk("./" + root):
        folders[:] = sorted(folders) if folder.count("/") < %d else []
        names += [os.path.normpath(os.path.join(folder, name)) for name in sorted(files)]
        if len(names) > 20000:
            break
print(json.dumps(names))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was taken from a sandbox, and what was refused: path or pattern -> reason. What is missing is in neither."""

    files: Mapping[str, bytes]
    refused: Mapping[str, str] = field(default_factory=dict)


def plain_path(path: str) -> bool:
    """Whether `path` names a file below a folder, whatever that folder is: relative, without empty, `.` or `..` steps."""
    parts = path.split("/")
    if len(parts) > MAX_DEPTH or len(path) > MAX_PATH or "\0" in path or any(part in ("", ".", "..") for part in parts):
        return False
    return path.isascii() or path.encode("utf-8", "replace").decode() == path  # a name that is not UTF-8 cannot be written down


def wrong_pattern(pattern: str) -> str:
    """What is wrong with a pattern; empty when nothing is."""
    if not plain_path(pattern):
        return "is not a plain path relative to the working directory"
    if any("**" in part and part != "**" for part in pattern.split("/")):
        return "holds ** as a part of a name; it stands for whole folders, as in src/**"
    return "holds [ or ], which have no meaning here; use * and ?" if "[" in pattern or "]" in pattern else ""


def is_exact(pattern: str) -> bool:
    """Whether the pattern names one file."""
    return "*" not in pattern and "?" not in pattern


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern names this path. In time of their lengths' product at most, however hostile the path."""
    steps, reached = pattern.split("/"), {0}
    if steps[-1] == "**":
        steps.append("*")
    for name in path.split("/"):
        reached = _skip(steps, reached)
        stays = {at for at in reached if at < len(steps) and steps[at] == "**"}
        reached = stays | {at + 1 for at in reached if at < len(steps) and steps[at] != "**" and fnmatchcase(name, steps[at])}
    return len(steps) in reached


def _skip(steps: Sequence[str], reached: set[int]) -> set[int]:
    """Every place that can be reached by letting `**` stand for no folder."""
    found = set(reached)
    for at, step in enumerate(steps):
        if step == "**" and at in found:
            found.add(at + 1)
    return found


def example(pattern: str) -> str:
    """A path that the pattern names."""
    return "/".join("x" if step == "**" else step.replace("*", "x").replace("?", "x") for step in pattern.split("/"))


def select(files: Mapping[str, bytes], patterns: Sequence[str]) -> dict[str, bytes]:
    """Those of `files` that a pattern names."""
    return {path: data for path, data in files.items() if any(matches(pattern, path) for pattern in patterns)}


def overlay(below: Mapping[str, bytes], above: Mapping[str, bytes]) -> dict[str, bytes]:
    """Both sets of files in one folder, `above` on top: a file there takes the place of a file or a whole folder below.

    The result can always be written: no path of it is a folder of another one, if that holds for `above` alone.
    """
    folders = {parent for path in above for parent in _parents(path)}
    kept = {
        path: data
        for path, data in below.items()
        if path not in above and path not in folders and not any(parent in above for parent in _parents(path))
    }
    return kept | dict(above)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


async def collect(sandbox: Sandbox, patterns: Sequence[str], *, timeout_s: float = COLLECT_S) -> Collected:
    """Takes the files that `patterns` name out of an agent's sandbox, at most `OUTPUT_FILES` with `OUTPUT_BYTES` in all.

    Raises `SandboxError` when the sandbox itself fails, and `SandboxTimeout` after `timeout_s`. A link, a device, a file too
    large or a folder that cannot be listed is the agent's doing: it is among the refused.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(sandbox, patterns)
    except TimeoutError as error:
        if isinstance(error, SandboxTimeout):
            raise
        raise SandboxTimeout(f"sandbox {sandbox.id}: outputs were not collected in {timeout_s:g} s") from None


async def _collect(sandbox: Sandbox, patterns: Sequence[str]) -> Collected:
    files: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    names = [pattern for pattern in patterns if is_exact(pattern)]
    if wild := [pattern for pattern in patterns if not is_exact(pattern)]:
        found, problem = await _listing(sandbox, sorted({_root(pattern) for pattern in wild}))
        names += [name for name in found if any(matches(pattern, name) for pattern in wild)]
        refused |= dict.fromkeys(wild, problem) if problem else {}
    left = OUTPUT_BYTES
    for name in dict.fromkeys(names):
        if len(files) == OUTPUT_FILES:
            refused[name] = f"outputs have at most {OUTPUT_FILES} files; this one and what follows is left behind"
            break
        try:
            files[name] = await sandbox.read(name, max_bytes=left)
        except FileNotFoundError:
            continue
        except ValueError as error:
            refused[name] = str(error)[:200]
            if len(refused) > OUTPUT_FILES:
                break
        else:
            left -= len(files[name])
    return Collected(files=files, refused=refused)


def _root(pattern: str) -> str:
    """The folder below which everything lies that a pattern names; empty for the working directory."""
    steps = pattern.split("/")[:-1]
    exact = next((count for count, step in enumerate(steps) if not is_exact(step)), len(steps))
    return "/".join(steps[:exact])


async def _listing(sandbox: Sandbox, roots: Sequence[str]) -> tuple[list[str], str]:
    """Names of files below `roots` as the sandbox tells them, checked, and what is wrong with its answer."""
    result = await sandbox.python(_LISTING % (list(roots), MAX_DEPTH), timeout_s=LISTING_S, output_bytes=LISTING_BYTES)
    if not result.ok or result.truncated:
        return [], f"the working directory cannot be listed: {(result.reason or result.stderr or 'too many names')[-200:]}"
    try:
        names = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return [], "the working directory cannot be listed: no list came back"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return [], "the working directory cannot be listed: no list of names came back"
    return [name for name in names if plain_path(name)], ""


async def produce(task: Task, program: str, sandboxes: SandboxBackend, *, timeout_s: float) -> tuple[ExecResult, Collected]:
    """Runs a Python program in the agent's place: how it ended, and the outputs it left. Raises what `collect` does."""
    sandbox = await sandboxes.open(task.sandbox, files=task.contents())
    try:
        result = await sandbox.python(program, timeout_s=timeout_s, output_bytes=4 * task.limits.tool_output_chars)
        return result, await collect(sandbox, task.outputs)
    finally:
        await sandbox.close()
