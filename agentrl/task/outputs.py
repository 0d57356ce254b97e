"""Collects a task's declared outputs, which are the files to grade, from the agent's sandbox.

A task declares patterns of paths relative to the working directory: `report.json`, `src/*.py`, `site/**`. In a pattern, `*` and `?` match
characters within one name, and a name `**` matches any number of folders. `WHOLE_DIRECTORY`, which Harbor's tasks use, matches every file
that differs from the file in the image. Only regular files are collected, never the target of a link, and only within limits. The agent is
responsible for the state of its files, so a problem with them is never an infrastructure fault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from agentrl.errors import SandboxTimeout, TaskError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import OUTPUT_BYTES, OUTPUT_FILES, REMOVED_FILES, ExecResult, SandboxSpec, Task
from agentrl.records.paths import MAX_DEPTH, MAX_PATH, is_plain_path

WHOLE_DIRECTORY = "."
INITIAL_FILES = "/opt/agentrl/start"
"""In a sandbox whose image was built from a Dockerfile: the image's original working directory (see `agentrl.sandbox.layout`)."""
COLLECT_S = 90.0
"""Deadline for collecting outputs, in seconds. A sandbox that takes longer has failed, because its server responds regardless of what the
agent's programs do."""
LISTING_S = 20.0
LISTING_BYTES = 1 << 20

MAX_INVALID_NAMES = 16  # maximum number of invalid names that an episode reports

# Kills the agent's processes, because otherwise files could disappear while they are read, or the reader could get no CPU time.
_ALONE = """
import os
try: os.kill(-1, 9)
except OSError: pass
"""

# Prints the files under the working directory as JSON. The agent can change the output, so its names are only candidates.
_LISTING = (
    _ALONE
    + """
import json
names = []
for root in %r:
    for folder, folders, files in os.walk("./" + root):
        deep = folder.count("/") >= %d or len(folder) > %d
        names += [os.path.normpath(os.path.join(folder, name)) for name in sorted(files) + (folders if deep else [])]
        folders[:] = [] if deep else sorted(folders)
        if len(names) > 20000:
            break
print(json.dumps(names))
"""
)

# Prints the files that differ from those in the image's working directory, and the removed files, in the same way.
_CHANGES = (
    _ALONE
    + """
import filecmp, json
def files(top):
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(folders) if folder.count("/") - top.count("/") < %d else []
        yield from (os.path.relpath(os.path.join(folder, name), top) for name in sorted(names))
def same(path):
    old, new = os.path.join(START, path), os.path.join(".", path)
    if os.path.islink(old) or os.path.islink(new):
        return os.path.islink(old) and os.path.islink(new) and os.readlink(old) == os.readlink(new)
    return os.path.isfile(old) and os.path.isfile(new) and filecmp.cmp(old, new, shallow=False)
START, names = %r, []
for path in files("."):
    if not same(path):
        names.append(path)
        if len(names) > 20000:
            break
gone = [path for path in files(START) if not os.path.lexists(path)]
print(json.dumps([names, gone]))
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedOutputs:
    """The collected files (path -> content) and the rejected files (path or pattern -> reason). Missing files are in neither mapping."""

    files: Mapping[str, bytes]
    refused: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # only for the pattern WHOLE_DIRECTORY


def is_exact(pattern: str) -> bool:
    """Whether the pattern names a single file."""
    return pattern != WHOLE_DIRECTORY and "*" not in pattern and "?" not in pattern


def matches_pattern(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path.

    The running time is at most proportional to the length of the pattern times the length of the path.
    """
    if pattern == WHOLE_DIRECTORY:
        return True
    steps, reached = pattern.split("/"), {0}
    if steps[-1] == "**":
        steps.append("*")
    for name in path.split("/"):
        reached = _skip(steps, reached)
        stays = {at for at in reached if at < len(steps) and steps[at] == "**"}
        reached = stays | {at + 1 for at in reached if at < len(steps) and steps[at] != "**" and fnmatchcase(name, steps[at])}
    return len(steps) in reached


def _skip(steps: Sequence[str], reached: set[int]) -> set[int]:
    """Returns the positions in the pattern that can be reached if `**` matches no folder."""
    positions = set(reached)
    for at, step in enumerate(steps):
        if step == "**" and at in positions:
            positions.add(at + 1)
    return positions


def example_path(pattern: str) -> str:
    """Returns a path that the pattern matches."""
    if pattern == WHOLE_DIRECTORY:
        return "x"
    return "/".join("x" if step == "**" else step.replace("*", "x").replace("?", "x") for step in pattern.split("/"))


def select_files(files: Mapping[str, bytes], patterns: Sequence[str]) -> dict[str, bytes]:
    """Returns the entries of `files` whose path matches a pattern."""
    return {path: data for path, data in files.items() if any(matches_pattern(pattern, path) for pattern in patterns)}


def overlay(below: Mapping[str, bytes], above: Mapping[str, bytes]) -> dict[str, bytes]:
    """Merges two sets of files. A file in `above` replaces a file or folder in `below` at the same path.

    If `above` can be written to one folder, so can the result: no path is both a file and a folder.
    """
    folders = {parent for path in above for parent in _parents(path)}
    remaining = {
        path: data
        for path, data in below.items()
        if path not in above and path not in folders and not any(parent in above for parent in _parents(path))
    }
    return remaining | dict(above)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


async def collect_outputs(sandbox: Sandbox, patterns: Sequence[str], *, timeout_s: float = COLLECT_S) -> CollectedOutputs:
    """Collects the files that match `patterns` from an agent's sandbox, at most `OUTPUT_FILES` files and `OUTPUT_BYTES` bytes.

    If a pattern has wildcards, all processes in the sandbox are killed first. The agent is responsible for links, devices, files that are
    too large and folders that cannot be listed. Such files and folders are reported as rejected.

    Raises `SandboxError` if the sandbox fails, and `SandboxTimeout` if the collection takes longer than `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(sandbox, patterns)
    except TimeoutError as error:
        if isinstance(error, SandboxTimeout):
            raise
        raise SandboxTimeout(f"sandbox {sandbox.id}: outputs were not collected in {timeout_s:g} s") from None


async def _collect(sandbox: Sandbox, patterns: Sequence[str]) -> CollectedOutputs:
    files: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    removed: tuple[str, ...] = ()
    names: list[str] = []
    if WHOLE_DIRECTORY in patterns:
        names, deleted, problem = await _changes(sandbox)
        removed = tuple([name for name in deleted if is_plain_path(name)][:REMOVED_FILES])
        refused |= {WHOLE_DIRECTORY: problem} if problem else {}
    elif wild := [pattern for pattern in patterns if not is_exact(pattern)]:
        listed, problem = await _listing(sandbox, sorted({_root(pattern) for pattern in wild}))
        names = [name for name in listed if any(matches_pattern(pattern, name) for pattern in wild)]
        refused |= dict.fromkeys(wild, problem) if problem else {}
    exact = [pattern for pattern in patterns if is_exact(pattern)]
    refused |= {_printable(name): _INVALID_NAME for name in [name for name in names if not is_plain_path(name)][:MAX_INVALID_NAMES]}
    left = OUTPUT_BYTES
    for name in dict.fromkeys([*exact, *filter(is_plain_path, names)]):
        if len(files) == OUTPUT_FILES or len(refused) > OUTPUT_FILES:
            refused[name] = f"outputs have at most {OUTPUT_FILES} files; this one and the following are not collected"
            break
        try:
            files[name] = await sandbox.read(name, max_bytes=left)
        except FileNotFoundError:
            if name not in exact:
                refused[name] = "it was listed but is missing"
        except ValueError as error:
            refused[name] = str(error)[:200]
        else:
            left -= len(files[name])
    return CollectedOutputs(files=files, refused=refused, removed=removed)


_INVALID_NAME = f"not a valid path: it is not UTF-8, not below the folder, or has more than {MAX_PATH} characters or {MAX_DEPTH} names"


def _printable(name: str) -> str:
    """Returns the start of an invalid name as valid text. Bytes that cannot be decoded are escaped."""
    return name[:100].encode("utf-8", "backslashreplace").decode()


def _root(pattern: str) -> str:
    """Returns the path of the folder that contains every file that a pattern can match; empty for the working directory."""
    steps = pattern.split("/")[:-1]
    exact = next((count for count, step in enumerate(steps) if not is_exact(step)), len(steps))
    return "/".join(steps[:exact])


async def _listing(sandbox: Sandbox, roots: Sequence[str]) -> tuple[list[str], str]:
    """Returns the names of the files below `roots` as the sandbox reports them, and the problem with the report, which is empty if there is
    none."""
    answer, problem = await _answer(sandbox, _LISTING % (list(roots), MAX_DEPTH, MAX_PATH))
    names = _names(answer)
    if not problem and names is None:
        problem = "the working directory cannot be listed: the output is not a list of names"
    return names or [], problem


async def _changes(sandbox: Sandbox) -> tuple[list[str], list[str], str]:
    """Returns the names of new or changed files and of removed files, as the sandbox reports them, and the problem with the report, which
    is empty if there is none."""
    answer, problem = await _answer(sandbox, _CHANGES % (MAX_DEPTH, INITIAL_FILES))
    if problem:
        return [], [], problem
    if isinstance(answer, list) and len(answer) == 2:
        changed, deleted = map(_names, answer)
        if changed is not None and deleted is not None:
            return changed, deleted, ""
    return [], [], "the working directory cannot be listed: the output is not two lists of names"


async def _answer(sandbox: Sandbox, program: str) -> tuple[object, str]:
    """Returns the parsed output of a listing program, and the problem with the output, which is empty if there is none."""
    result = await sandbox.python(program, timeout_s=LISTING_S, output_bytes=LISTING_BYTES)
    if not result.ok or result.truncated:
        return None, f"the working directory cannot be listed: {(result.reason or result.stderr or 'too many names')[-200:]}"
    try:
        return json.loads(result.stdout), ""
    except (ValueError, RecursionError):
        return None, "the working directory cannot be listed: the output is not JSON"


def _names(answer: object) -> list[str] | None:
    """Returns `answer` if it is a list of strings, otherwise None."""
    return answer if isinstance(answer, list) and all(isinstance(name, str) for name in answer) else None


def sandbox_of(task: Task) -> SandboxSpec:
    """Returns the spec of a task's sandbox. Raises `TaskError` if the task has no sandbox."""
    if task.sandbox is None:
        raise TaskError(f"task {task.id!r} has no sandbox, which a tool, program or verifier needs", fix="set Task.sandbox")
    return task.sandbox


async def run_and_collect(task: Task, program: str, sandboxes: SandboxBackend, *, timeout_s: float) -> tuple[ExecResult, CollectedOutputs]:
    """Runs a Python program instead of an agent. Returns its result and the outputs. Raises the errors of `collect_outputs`, `sandbox_of`
    and `SandboxBackend.open`."""
    sandbox = await sandboxes.open(sandbox_of(task), files=task.contents())
    try:
        result = await sandbox.python(program, timeout_s=timeout_s, output_bytes=4 * task.limits.tool_output_chars)
        return result, await collect_outputs(sandbox, task.outputs)
    finally:
        await sandbox.close()
