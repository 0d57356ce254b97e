"""Writes demonstrations of mixed quality for a base model: some careful, some sloppy, all well formed.

For each task a demonstrator writes the correct program with probability `CAREFUL`, otherwise one of the kind's sloppy programs.
Occasionally, the demonstrator guesses without running a program, or misspells a name, sees the error and rewrites the program. The programs
may run in this process, because they come from this package's templates, never from a policy.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.records import Task
from sandboxes.tables.kinds import BY_NAME, Kind

CAREFUL = 0.34  # share of correct programs; less than that of the most common mistake, so that a sloppy program is the most likely
GUESS = 0.05  # share of the demonstrations that submit without running a program
MISSPELT = 0.03  # share of the demonstrations whose first program misspells a name
COMMONER_MISTAKE = 0.7  # share of a kind's first sloppy program among its sloppy programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """An assistant turn, the tool's output, and whether the turn is trained."""

    completion: str  # ends with <|im_end|>
    observation: str | None  # None after submit
    learn: bool = True


def call(name: str, **arguments: str) -> str:
    """Returns an assistant turn with one tool call, in the format of Qwen3's template."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"


def demonstrate(task: Task, rng: Random, *, careful: float = CAREFUL, guess: float = GUESS, misspelt: float = MISSPELT) -> list[Act]:
    """Returns a demonstration of a task with one to three turns."""
    kind, names = BY_NAME[task.data["kind"]], task.data["names"]
    if rng.random() < guess:
        return [Act(completion=call("submit", answer=_guess(rng, names)), observation=None)]
    acts = []
    body = _choose(rng, kind, careful)
    if rng.random() < misspelt:
        wrong = kind.program(_misspell(rng, names), body)
        acts.append(Act(completion=call("python", code=wrong), observation=run_template(wrong, task.files), learn=False))
    code = kind.program(names, body)
    output = run_template(code, task.files)
    acts.append(Act(completion=call("python", code=code), observation=output))
    acts.append(Act(completion=call("submit", answer=output), observation=None))
    return acts


def run_template(code: str, files: Mapping[str, str]) -> str:
    """Returns the output of a program from this package on these files or, if a file or a key is missing, the end of its traceback.

    Do not use this function for other programs, because they run without a sandbox.
    """
    printed: list[str] = []

    def open_file(path: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return io.StringIO(files[path])

    scope: dict[str, Any] = {"open": open_file, "print": lambda value: printed.append(str(value))}
    try:
        exec(compile(code, "<string>", "exec"), scope)
    except (FileNotFoundError, KeyError) as error:
        head = 'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\n'
        return f"{head}{type(error).__name__}: {error}"
    return "\n".join(printed)


def _choose(rng: Random, kind: Kind, careful: float) -> str:
    if rng.random() < careful:
        return kind.right
    return kind.sloppy[0 if rng.random() < COMMONER_MISTAKE else 1]


def _guess(rng: Random, names: Mapping[str, str]) -> str:
    return str(rng.randint(1, 999)) if rng.random() < 0.7 else rng.choice(list(names.values()))


def _misspell(rng: Random, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names, with one letter removed from the name of a file or column."""
    field = rng.choice([f for f in ("f", "c", "k", "d") if f in names])
    at = rng.randrange(len(names[field]) - 4 if field == "f" else len(names[field]))
    return {**names, field: names[field][:at] + names[field][at + 1 :]}
