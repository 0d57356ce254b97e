"""Removes parts of a failing task while it still fails: ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
2002). It tries to remove chunks of the parts, the largest first, then smaller ones, down to single parts or to the end of the budget.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovablePart:
    """A removable part of a task: a message before the last, a file, or a line of a file."""

    message: int | None = None
    file: str = ""
    line: int | None = None  # counted from 0; None means the whole file


def message_and_file_parts(task: Task) -> tuple[RemovablePart, ...]:
    """The messages before the last, which is the question, and the files."""
    messages = (RemovablePart(message=number) for number in range(len(task.prompt) - 1))
    return (*messages, *(RemovablePart(file=path) for path in sorted({*task.files, *task.binary_files})))


def line_parts(task: Task) -> tuple[RemovablePart, ...]:
    """The lines of files with more than one line."""
    texts = {path: text.splitlines() for path, text in task.files.items()}
    return tuple(
        RemovablePart(file=path, line=number) for path in sorted(texts) if len(texts[path]) > 1 for number in range(len(texts[path]))
    )


def remove_parts(task: Task, gone: Sequence[RemovablePart]) -> Task:
    """The task without these parts."""
    messages = {part.message for part in gone if part.message is not None}
    files = {part.file for part in gone if part.file and part.line is None}
    lines = {(part.file, part.line) for part in gone if part.line is not None}
    shortened = {path for path, _ in lines}

    def remaining(path: str, text: str) -> str:
        if path not in shortened:
            return text
        return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if (path, number) not in lines)

    return replace(
        task,
        prompt=tuple(message for number, message in enumerate(task.prompt) if number not in messages),
        files={path: remaining(path, text) for path, text in task.files.items() if path not in files},
        binary_files={path: text for path, text in task.binary_files.items() if path not in files},
    )


async def removable_parts(
    parts: Sequence[RemovablePart], fails: Callable[[tuple[RemovablePart, ...]], Awaitable[bool | None]]
) -> tuple[RemovablePart, ...]:
    """Returns parts that can be removed together.

    Args:
        fails: whether the task without these parts still fails; None means that the budget is spent, which ends the search.
    """
    removed: tuple[RemovablePart, ...] = ()
    left, chunks = list(parts), 1
    while left:
        size = -(-len(left) // chunks)
        for first in range(0, len(left), size):
            chunk = left[first : first + size]
            still_fails = await fails((*removed, *chunk))
            if still_fails is None:
                return removed
            if still_fails:
                removed, left, chunks = (*removed, *chunk), [part for part in left if part not in chunk], max(chunks - 1, 1)
                break
        else:
            if chunks >= len(left):
                return removed
            chunks = min(2 * chunks, len(left))
    return removed


def describe_size(task: Task) -> str:
    """Describes the size of a task: `1 message, 2 files, 40 lines`."""
    lines = sum(len(text.splitlines()) for text in task.files.values())
    counts = ((len(task.prompt), "message"), (len(task.files) + len(task.binary_files), "file"), (lines, "line"))
    return ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for number, name in counts)
