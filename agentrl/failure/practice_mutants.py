"""The same question about other figures: for families that make no variants of their own.

The numbers in a task's files become others, and its gold program, which is proven right on the task itself, says the new truth. So
only a task will do whose truth is an answer (`data.answer`, a text) and whose gold program does not know it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from random import Random

from agentrl.errors import TaskError
from agentrl.protocols import TaskFamily
from agentrl.records import Split, Task

MUTATED = "mutated"
_NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:\.\d+)?(?![\w:/-]|\.\w)")  # one that stands alone: no part of an id, a date, a time
_UNKNOWN = "\x00the answer is not known\x00"
_DRAWS = 20  # for a number that no other one of the task became


def gold_without_answer(family: TaskFamily, task: Task) -> str:
    """The task's gold program, which works the answer out from the files.

    Raises `TaskError` where it knows the answer, or the task has none.
    """
    fix = "give its family a method variants"
    if not isinstance(task.data.get("answer"), str):
        raise TaskError(f"task {task.id!r} has no answer in its data that could be worked out anew", fix=fix)
    program = family.gold(task)
    if program != family.gold(replace(task, data={**task.data, "answer": _UNKNOWN})):
        raise TaskError(f"task {task.id!r}: its gold solution is made from the answer, and proves none", fix=fix)
    return program


def mutate_task(task: Task, *, seed: int) -> Iterator[Task]:
    """Tasks with other numbers in their files; their answer is still to be worked out, and is left as it was.

    A number that the prompt or the task's data mention stays, and equal numbers stay equal, in all files. A pure function of the task's
    content and the seed; without end, or empty where there is nothing to change.
    """
    kept = set(_NUMBER.findall(_said(task)))
    for number in count():
        rng = Random(f"mutant:{task.key}:{seed}:{number}")
        other = _other(rng, kept)
        files = {path: _NUMBER.sub(other, text) for path, text in task.files.items()}
        if files == dict(task.files):
            return
        yield replace(task, id=f"mutant-{task.key[:16]}-{seed}-{number}", files=files, split=Split.TRAIN)


def _said(task: Task) -> str:
    """What a question may be about: the words of the prompt, and the data without the answer."""
    about = [repr(value) for key, value in task.data.items() if key != "answer"]
    return " ".join([*(message.content for message in task.prompt), *about]).replace("'", " ").replace(",", " ")


def _other(rng: Random, kept: set[str]) -> Callable[[re.Match[str]], str]:
    """Gives every number another one of its length, always the same; no two numbers the same one."""
    given: dict[str, str] = {number: number for number in kept}
    taken = set(kept)

    def other(found: re.Match[str]) -> str:
        number = found.group()
        if number not in given:
            drawn = next((one for one in (_drawn(rng, number) for _ in range(_DRAWS)) if one not in taken), number)
            given[number] = drawn
            taken.add(drawn)
        return given[number]

    return other


def _drawn(rng: Random, number: str) -> str:
    digits = [str(rng.randint(0, 9)) if sign.isdigit() else sign for sign in number]
    if number[0] != "0":
        digits[0] = str(rng.randint(1, 9))
    elif len(number) == 1 or number[1] == ".":
        digits[0] = "0"
    return "".join(digits)
