"""Making a case smaller while it still fails: which parts a task has, and which of them can go (delta debugging).

The search is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): chunks of the parts are taken
out, the largest first, as long as what is left still fails; then smaller ones, down to single parts or to the end of the budget.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovablePart:
    """What may go: a message before the last, a file, or a line of one."""

    message: int | None = None
    file: str = ""
    line: int | None = None  # of the file, counted from 0; None: all of it


def message_and_file_parts(task: Task) -> tuple[RemovablePart, ...]:
    """The messages before the last, which is what is asked, and the files."""
    messages = (RemovablePart(message=number) for number in range(len(task.prompt) - 1))
    return (*messages, *(RemovablePart(file=path) for path in sorted({*task.files, *task.binary_files})))


def line_parts(task: Task) -> tuple[RemovablePart, ...]:
    """The lines of the files that have several."""
    texts = {path: text.splitlines() for path, text in task.files.items()}
    return tuple(
        RemovablePart(file=path, line=number) for path in sorted(texts) if len(texts[path]) > 1 for number in range(len(texts[path]))
    )


def remove_parts(task: Task, gone: Sequence[RemovablePart]) -> Task:
    """The task without these parts."""
    messages = {part.message for part in gone if part.message is not None}
    files = {part.file for part in gone if part.file and part.line is None}
    lines = {(part.file, part.line) for part in gone if part.line is not None}

    def left(path: str, text: str) -> str:
        if not any(path == name for name, _ in lines):
            return text
        return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if (path, number) not in lines)

    return replace(
        task,
        prompt=tuple(message for number, message in enumerate(task.prompt) if number not in messages),
        files={path: left(path, text) for path, text in task.files.items() if path not in files},
        binary_files={path: text for path, text in task.binary_files.items() if path not in files},
    )


async def removable_parts(
    parts: Sequence[RemovablePart], fails: Callable[[tuple[RemovablePart, ...]], Awaitable[bool | None]]
) -> tuple[RemovablePart, ...]:
    """The parts that can go, all at once.

    Args:
        fails: whether a task without these parts still fails; None: the budget is spent, and the search ends with what it has.
    """
    gone: tuple[RemovablePart, ...] = ()
    left, chunks = list(parts), 1
    while left:
        size = -(-len(left) // chunks)
        for first in range(0, len(left), size):
            chunk = left[first : first + size]
            found = await fails((*gone, *chunk))
            if found is None:
                return gone
            if found:
                gone, left, chunks = (*gone, *chunk), [part for part in left if part not in chunk], max(chunks - 1, 1)
                break
        else:
            if chunks >= len(left):
                return gone
            chunks = min(2 * chunks, len(left))
    return gone


def describe_size(task: Task) -> str:
    """How large a task is, for a person: `1 message, 2 files, 40 lines`."""
    lines = sum(len(text.splitlines()) for text in task.files.values())
    counts = ((len(task.prompt), "message"), (len(task.files) + len(task.binary_files), "file"), (lines, "line"))
    return ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for number, name in counts)
