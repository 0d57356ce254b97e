"""`Questions`: tasks by split and index, with their gold solutions. Each page contains one question, and every task has several pages."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.errors import UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from sandboxes.tables import Tables
from sandboxes.tables.kinds import BY_NAME

SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
KINDS = "total, distinct, line_count, longest_line"
"""The kinds of questions in the family `tables` that have the shortest programs."""


class Questions:
    """Tasks like "Answer the questions on pages 1 to 3.": each page asks about a small file and requires a different program.

    A context has room for the page, the program and the answer of one question, but not for all pages and programs. A single agent
    therefore cannot solve these tasks, but an agent that delegates every page to a sub-agent (`rollout.agent=delegating`) can solve all of
    them. `task` is a pure function of (seed, split, index). The questions come from `Tables`, whose training and held-out names come from
    disjoint pools.
    """

    name = "questions"

    def __init__(
        self, seed: int = 0, *, pages: int = 3, kinds: str = KINDS, turn_tokens: int = 160, episode_tokens: int = 320, wall_s: float = 300.0
    ) -> None:
        """The arguments come from `tasks.family.options` in the recipe.

        Args:
            pages: number of pages in a task, each with one question.
            kinds: kinds of questions from `Tables`, used in rotation.
            turn_tokens: maximum number of completion tokens in one turn. Delegating every page needs about thirty tokens per page.
            episode_tokens: size of one context. With the tokenizer in recipes/models/tables-base, one question needs up to 240 tokens.
            wall_s: maximum duration of an episode in seconds.

        Raises `UserError` if there are fewer than two pages or a kind is unknown, and `ValueError` if a limit is not positive.
        """
        if pages < 2:
            raise UserError(f"questions needs at least 2 pages, got {pages}", fix="change tasks.family.options")
        self.seed, self.pages = seed, pages
        self.tables = Tables(seed=seed, kinds=kinds)
        self.limits = Limits(
            turns=4 * pages + 4, turn_tokens=turn_tokens, episode_tokens=episode_tokens, tool_output_chars=400, wall_s=wall_s
        )

    def size(self, split: Split) -> int | None:
        """Returns None, which means infinite, or 0 for the split of real data."""
        return 0 if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is negative or the split is that of real data, which is empty."""
        if index < 0 or split is Split.HELDOUT_REAL:
            raise UserError(f"questions has no task {index} in split {split}", fix="use train or heldout, and an index from 0")
        questions = self._page_tasks(split, index)
        files = {f"page{page}.txt": question.prompt[0].content for page, question in enumerate(questions, 1)}
        for question in questions:
            files |= question.files
        answers = [str(question.data["answer"]) for question in questions]
        return Task(
            id=f"questions-{self.seed}-{split}-{index}",
            family=self.name,
            prompt=(Message(role="user", content=request(1, self.pages)),),
            tools=("sandboxes.pages:read", "python", "submit"),
            sandbox=SANDBOX,
            verifiers=("rewards.pages:answered",),
            data={
                "kind": f"{self.pages} questions",
                "answer": "\n".join(answers),
                "answers": answers,
                "tolerances": [float(question.data["tolerance"]) for question in questions],
                "questions": [{"kind": question.data["kind"], "names": dict(question.data["names"])} for question in questions],
            },
            split=split,
            files=files,
            limits=self.limits,
        )

    def gold(self, task: Task) -> str:
        """Returns Python source that prints the correct answer when run in the folder of the task's files."""
        return "\n".join(program(question) for question in task.data["questions"])

    def _page_tasks(self, split: Split, index: int) -> list[Task]:
        """Returns a task of `Tables` for each page, with disjoint files."""
        questions: list[Task] = []
        used_files = {f"page{page}.txt" for page in range(1, self.pages + 1)}
        for page in range(self.pages):
            number = index * self.pages + page
            while used_files & set((question := self.tables.task(split, number)).files):
                number += 1_000_000 * len(self.tables.kinds)  # a different question of the same kind
            questions.append(question)
            used_files |= set(question.files)
        return questions


def request(first: int, last: int) -> str:
    """Returns the request that an agent answer the questions on pages `first` to `last`."""
    return f"Answer the question on page {first}." if first == last else f"Answer the questions on pages {first} to {last}."


def program(question: Mapping[str, Any], *, sloppy: Random | None = None) -> str:
    """Returns the program that answers a question in a task's data. If `sloppy` is set, the program contains a common mistake."""
    kind = BY_NAME[question["kind"]]
    return kind.program(question["names"], sloppy.choice(kind.sloppy) if sloppy is not None else "")
