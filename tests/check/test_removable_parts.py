"""Removing parts of a failing task."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agentrl.check.minimize import RemovablePart, describe_size, line_parts, message_and_file_parts, removable_parts, remove_parts
from agentrl.failure.case import Case
from agentrl.failure.overlap import WithheldTasks
from agentrl.records import Message
from tests.failure.traces import task

PARTS = [RemovablePart(file="a", line=number) for number in range(40)]


@given(st.sets(st.integers(0, 39), max_size=6))
def test_only_the_parts_that_the_failure_needs_remain(needed: set[int]) -> None:
    calls = 0

    async def fails(removed: tuple[RemovablePart, ...]) -> bool:
        nonlocal calls
        calls += 1
        return not needed & {part.line for part in removed}

    removed = asyncio.run(removable_parts(PARTS, fails))
    assert {part.line for part in PARTS} - {part.line for part in removed} == needed
    assert calls <= 1 + 8 * max(1, len(needed)) * 6, "chunks first, single parts last"


def test_the_end_of_the_budget_keeps_the_removed_parts() -> None:
    answers = iter([False, True, None])

    async def fails(removed: tuple[RemovablePart, ...]) -> bool | None:
        return next(answers)

    assert asyncio.run(removable_parts(PARTS, fails)) == tuple(PARTS[:20])
    assert asyncio.run(removable_parts([], fails)) == ()


def test_removing_parts_keeps_the_rest_unchanged() -> None:
    original = task("What?", files={"a.csv": "x\r\n1\n\n2", "b.txt": "one"})
    original = replace(original, prompt=(Message(role="system", content="s"), *original.prompt), binary_files={"c.bin": "AAAA"})
    parts = message_and_file_parts(original)
    assert remove_parts(original, ()) == original and len([part for part in parts if part.file]) == 3
    assert all(part.message != len(original.prompt) - 1 for part in parts), "the question stays"
    smallest = remove_parts(original, parts)
    assert smallest.prompt == original.prompt[-1:] and not smallest.files and not smallest.binary_files
    assert [part.line for part in line_parts(original)] == [0, 1, 2, 3] and {part.file for part in line_parts(original)} == {"a.csv"}
    assert remove_parts(original, [RemovablePart(file="a.csv", line=1), RemovablePart(file="a.csv", line=3)]).files == {
        "a.csv": "x\r\n\n",
        "b.txt": "one",
    }
    assert describe_size(smallest) == "1 message, 0 files, 0 lines"


def test_the_original_task_stays_withheld() -> None:
    minimized, original, other = (task("What?", files={"a.csv": text}) for text in ("1\n", "1\n" * 50, "2\n" * 50))
    withheld = WithheldTasks([Case(id="c", task=minimized, original=original)])
    assert minimized in withheld and original in withheld and other not in withheld and len(withheld) == 1
