"""Run folders: their names, their locks, and the records of how runs were started.

`run.json` stores the overrides with which a run was started. A resumed run uses these overrides again, unless new overrides replace them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from agentrl.base import files
from agentrl.base.run_lock import drive_folder, is_vacant
from agentrl.base.untrusted_files import read_bytes
from agentrl.config.recipe import Recipe, load
from agentrl.config.section import Section, resumable_keys
from agentrl.errors import RecipeError, RunFolderBusy, StoreError, UserError
from agentrl.observe import Summary
from agentrl.observe.summary import read_sessions, record_start
from agentrl.plugins.parts import Part

_RECIPE, _STARTED = "recipe.json", "run.json"
_FREE_BYTES = 1 << 30
_LARGEST = 16 << 20  # maximum size of run.json in bytes
_SANDBOX = "sandbox.backend="
_CHANGED = re.compile(r"^\.lock$|\.(jsonl|log|sqlite(-\w+)?)$")  # files that a run locks or changes in place
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_WANDB = "wandb"  # subfolder in which the package wandb stores the links debug.log and debug-internal.log


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """How a user started a run."""

    recipe: Path  # path as typed by the user
    folder: Path
    verb: str = "train"  # the command: train, eval or sample
    overrides: tuple[str, ...]
    began: float = field(default_factory=time.monotonic, compare=False)  # start of the command, in monotonic seconds

    def command(self, *, resume: bool = False) -> str:
        """Returns the shell command with every override, for use in the same directory."""
        words = [*_program(), self.verb, str(self.recipe)]
        words += [item for item in self.overrides if not item.startswith(_SANDBOX)]
        words += ["--run-dir", str(self.folder)]
        for item in self.overrides:
            words += ["--sandbox", item.removeprefix(_SANDBOX)] if item.startswith(_SANDBOX) else []
        return shlex.join([*words, *(["--resume"] if resume else [])])


def _program() -> list[str]:
    """Returns the program as the user typed it: the console script, with its path if it is not on PATH, or the Python interpreter."""
    typed = Path(sys.argv[0])
    if typed.name == "agentrl":
        script = shutil.which("agentrl")
        return ["agentrl"] if script is not None and Path(script).resolve() == typed.resolve() else [str(typed)]
    return [sys.executable, "-m", "agentrl"]


def merge_overrides(earlier: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Merges overrides. A later override replaces earlier ones with the same key or a key below it."""
    replaced = [item.partition("=")[0] for item in later]
    both = [*(item for item in earlier if not any(item.startswith(f"{key}.") for key in replaced)), *later]
    keys = [item.partition("=")[0] for item in both]
    return tuple(item for number, item in enumerate(both) if keys[number] not in keys[number + 1 :])


@contextmanager
def claim_run_folder(wanted: Path | None, runs: Path, name: str, *, resume: bool, command: str, resumable: bool = True) -> Iterator[Path]:
    """Yields a run folder of which this process is the only driver: `wanted`, or the first vacant one of `name`, `name-2`, ... in `runs`.

    With `resume` and without `wanted`, yields the last of these folders that contains a run. Two commands that are started at the same time
    get different folders. Raises `UserError` if another process drives the folder, if the folder already contains a run, or, with `resume`,
    if it contains no run.
    """
    with ExitStack() as stack:
        folder = _first_free(stack, runs, name, command) if wanted is None and not resume else wanted or _last(runs, name)
        if wanted is not None or resume:
            _take(stack, folder, resume=resume, command=command, resumable=resumable)
        stack.callback(lambda: files.make_private(folder) if files.is_private(folder) else None)
        yield folder


def _take(stack: ExitStack, folder: Path, *, resume: bool, command: str, resumable: bool) -> None:
    if resume and not folder.is_dir():
        raise _no_run(folder)
    stack.enter_context(drive_folder(folder, command=command))
    check_links(folder)
    if resume and not holds_run(folder):
        raise _no_run(folder)
    if not resume and holds_run(folder):
        go_on = "continue it with --resume, or " if resumable else ""
        raise UserError(f"{folder} already contains a run", fix=f"{go_on}choose a different --run-dir (or delete {folder})")
    _copy_hard_links(folder)


def check_links(folder: Path) -> None:
    """Raises `UserError` if the folder or one of its subfolders contains a link to a file outside the folder, because runs and commands
    append to files there. Skips the folder of wandb, which replaces its links itself, missing folders, and folders of other users that this
    user cannot enter."""
    for entry in _entries(folder):
        if entry.is_symlink() and not os.path.isdir(entry) and not _is_inside(entry.path, folder):
            raise UserError(
                f"{entry.path} is a symbolic link, and agentrl could write to {os.readlink(entry)!r}",
                fix="replace it with a copy of the file",
            )


def _copy_hard_links(folder: Path) -> None:
    """Replaces hard links of files that a run locks or changes in place with copies, so that a copy of the folder by `cp -al` can be
    continued without changes to the original. The caller must hold the folder's lock."""
    for entry in _entries(folder):
        if _CHANGED.search(entry.name) and entry.is_file(follow_symlinks=False) and os.stat(entry.path).st_nlink > 1:
            with files.replace_file(Path(entry.path)) as part:
                shutil.copy(entry.path, part)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of the folder and of its direct subfolders, except the folders that `check_links` skips."""
    entries = _scan(folder)
    for part in [entry for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name != _WANDB]:
        entries += _scan(Path(part))
    return entries


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [*os.scandir(folder)]
    except OSError as error:
        if error.errno in _NO_FOLDER:  # a running driver removes temporary folders
            return []
        if not isinstance(error, PermissionError):
            raise
        if os.access(folder, os.X_OK):  # otherwise it is a folder such as lost+found
            raise UserError(f"{folder} cannot be read: {error.strerror}", fix=f"chmod u+r {shlex.quote(str(folder))}") from None
        return []


def _is_inside(path: str, folder: Path) -> bool:
    try:
        return Path(path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def holds_run(folder: Path) -> bool:
    """Whether a folder contains a run."""
    return (folder / _RECIPE).exists()


def _no_run(folder: Path) -> UserError:
    return UserError(f"{folder} contains no run to resume", fix="start a run without --resume")


def _first_free(stack: ExitStack, runs: Path, name: str, command: str) -> Path:
    """Locks and returns the first vacant folder.

    If two processes choose the same folder, the lock decides between them. The process that gets the lock checks again that the folder is
    vacant.
    """
    for folder in _names(runs, name):
        if not is_vacant(folder):
            continue
        with ExitStack() as attempt, suppress(RunFolderBusy):
            attempt.enter_context(drive_folder(folder, command=command))
            if is_vacant(folder):
                stack.push(attempt.pop_all())
                return folder
    raise AssertionError("the sequence of names is endless")


def _last(runs: Path, name: str) -> Path:
    there = list(takewhile(Path.exists, _names(runs, name)))
    return next((folder for folder in reversed(there) if holds_run(folder)), runs / name)


def _names(runs: Path, name: str) -> Iterator[Path]:
    yield runs / name
    for number in count(2):
        yield runs / f"{name}-{number}"


def recorded_overrides(folder: Path) -> tuple[str, ...]:
    """Returns the overrides with which the run in a folder was started; empty if there is no record. Raises `UserError` if the record is
    damaged."""
    return tuple(str(item) for item in _started(folder).get("overrides", ()))


def resume_command(folder: Path) -> str:
    """Returns the command that continues the run in a folder, as recorded when the run was last started. If none is recorded, returns a
    command with the placeholder `RECIPE`. Raises `UserError` if the record is damaged."""
    return str(_started(folder).get("resume") or f"agentrl train RECIPE --run-dir {shlex.quote(str(folder))} --resume")


def check_same_command(folder: Path, verb: str) -> None:
    """Raises `UserError` if a different command created the content of a folder, because the command `verb` would damage that content."""
    command = str(_started(folder).get("verb", "train"))
    if command != verb:
        raise UserError(f"{folder} was created by `agentrl {command}`", fix=f"choose a different --run-dir, or use agentrl {command}")


def _started(folder: Path) -> dict[str, Any]:
    path = folder / _STARTED
    try:
        data = json.loads(read_bytes(path, most=_LARGEST, inside=folder))
        if not isinstance(data, dict) or not isinstance(data.get("overrides"), list):
            raise ValueError("no overrides")
        return data
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error})", fix=f"delete it, and repeat the run's overrides: {folder / _RECIPE} contains them"
        ) from None


def finished_summary(folder: Path, recipe: Recipe) -> Summary | None:
    """Returns the summary of a run that finished under exactly this recipe; None if the run did not, if its summary cannot be read, or if
    the recipe has no last step. Raises the errors of `check_resumed_recipe`."""
    starts = read_sessions(folder)
    if not starts or starts[-1].ended != "finished" or check_resumed_recipe(folder, recipe) or recipe.steps is None:
        return None
    with suppress(FileNotFoundError, StoreError):
        return Summary.read(folder)
    return None


def check_resumed_recipe(folder: Path, recipe: Recipe) -> list[str]:
    """Returns a line for each recipe key that was changed for a resumed run.

    Raises `RecipeError` if `agentrl.config.section.resumable` does not list a changed key, because data sampled under one recipe must not
    be trained under a different one.
    """
    before, after = _flat(load(folder / _RECIPE)), _flat(recipe)
    keys = [key for key in (*before, *(key for key in after if key not in before)) if before.get(key) != after.get(key)]
    changes = {key: f"{key} {before.get(key)} -> {after.get(key)}" for key in keys}
    may = resumable_keys(Recipe)
    fixed = [change for key, change in changes.items() if not any(fnmatchcase(key, pattern) for pattern in may)]
    if fixed:
        allowed = ", ".join(key for key in may if f"{key}.*" not in may)
        raise RecipeError(
            f"--resume: the recipe differs from the run's: {'; '.join(fixed)}",
            fix=f"undo these changes, or start a new run. Keys that may change: {allowed}",
        )
    return list(changes.values())


def _flat(section: Section | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values in a section by dotted key. Each option of a part has its own key, such as `tasks.family.options.size`."""
    flat: dict[str, Any] = {}
    for name, value in dict(section).items():
        key = f"{prefix}{name}"
        match value:
            case Section() | dict():
                flat |= _flat(value, f"{key}.")
            case Part():
                flat |= {key: value.ref, **_flat(value.options, f"{key}.options.")}
            case tuple():
                flat[key] = tuple(item.as_data() if isinstance(item, Part) else item for item in value)
            case _:
                flat[key] = value
    return flat


def write_start(folder: Path, recipe: Recipe, start: RunStart) -> None:
    """Creates the run folder with its sub-folders and `run.json`, and finally `recipe.json`, which marks the folder as a run.

    A new folder is private to the user. The folder of a resumed run keeps its mode, so that its owner can share it.
    """
    if not holds_run(folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    for name in ("episodes", "versions", "checkpoints", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    started = {
        "verb": start.verb,
        "recipe": str(start.recipe.resolve()),
        "overrides": start.overrides,
        "directory": str(Path.cwd()),
        "resume": start.command(resume=True) if start.verb != "eval" else None,  # an evaluation cannot be resumed
    }
    files.write_atomically(folder / _STARTED, json.dumps(started, indent=2) + "\n")
    if start.verb == "train":
        record_start(folder)  # recorded first, so that no earlier session counts as finished under this recipe
    files.write_atomically(folder / _RECIPE, recipe.model_dump_json(indent=2) + "\n")


def check_disk(folder: Path) -> None:
    """Raises `UserError` if the folder's disk has less than 1 GiB of free space or the folder is not writable."""
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES:
        raise UserError(
            f"{folder}: only {free >> 20} MiB are free on this disk", fix="free at least 1 GiB, or choose a different --run-dir"
        )
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} is not writable", fix="choose a different --run-dir")
