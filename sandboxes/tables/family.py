"""`Tables`: the family's tasks by split and index, with their gold solutions."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from agentrl.errors import TaskError, UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from sandboxes.tables.generated import generated_table
from sandboxes.tables.kinds import BY_NAME, KINDS, Kind, Question
from sandboxes.tables.real import real_table

REAL_TASKS = 240
ATTEMPTS = 2000  # tables drawn before a kind is given up; about ten are needed
SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
LIMITS = Limits(turns=4, turn_tokens=192, episode_tokens=768, tool_timeout_s=10.0, tool_output_chars=400, wall_s=120.0)


class Tables:
    """Questions about small files. `task` is a pure function of (seed, split, index); kinds take turns by index.

    Train and held-out tasks are generated without end from disjoint word pools; the held-out real part has `REAL_TASKS` tasks
    on tables of scikit-learn and pycountry, which must be installed for that split only.
    """

    name = "tables"

    def __init__(
        self,
        seed: int = 0,
        *,
        wild: bool = False,
        turn_tokens: int = LIMITS.turn_tokens,
        episode_tokens: int = LIMITS.episode_tokens,
    ) -> None:
        """`wild` names are longer and stranger; `turn_tokens` and `episode_tokens` give a policy room to think before it acts.

        In a recipe these are `tasks.options`.
        """
        self.seed = seed
        self.wild = wild
        self.limits = replace(LIMITS, turn_tokens=turn_tokens, episode_tokens=episode_tokens)

    def size(self, split: Split) -> int | None:
        return REAL_TASKS if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Raises `UserError` for an index outside the split, or when a real table's package is missing."""
        size = self.size(split)
        if index < 0 or (size is not None and index >= size):
            raise UserError(
                f"tables has no task {index} in split {split}", fix=f"use an index from 0 to {'...' if size is None else size - 1}"
            )
        kind = KINDS[index % len(KINDS)]
        rng = Random(f"tables:{self.seed}:{split}:{index}")
        question = self._question(rng, kind, split)
        text = rng.choice(kind.phrasings).format(**question.names)
        return Task(
            id=f"tables-{self.seed}-{split}-{index}",
            family=self.name,
            prompt=(Message(role="user", content=text),),
            tools=("python", "submit"),
            sandbox=SANDBOX,
            verifiers=("rewards.tables:exact_answer",),
            data={"kind": kind.name, "answer": question.answer, "tolerance": question.tolerance, "names": dict(question.names)},
            split=split,
            files=question.files,
            limits=self.limits,
        )

    def gold(self, task: Task) -> str:
        """Python source that prints the right answer when run beside the task's files."""
        return BY_NAME[task.data["kind"]].program(task.data["names"])

    def _question(self, rng: Random, kind: Kind, split: Split) -> Question:
        for _ in range(ATTEMPTS):
            table = real_table(rng, kind.name) if split is Split.HELDOUT_REAL else generated_table(rng, split, wild=self.wild)
            question = kind.ask(rng, table)
            if question is not None:
                return question
        raise TaskError(f"no table gave a question of kind {kind.name!r} in {ATTEMPTS} attempts")
