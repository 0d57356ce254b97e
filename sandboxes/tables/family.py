"""`Tables`: the family's tasks by split and index, with their gold solutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from agentrl.errors import TaskError, UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from sandboxes.tables.generated import ROWS, generated_table
from sandboxes.tables.kinds import BY_NAME, KINDS, Kind, Question
from sandboxes.tables.real import real_table

REAL_TASKS = 240
ATTEMPTS = 2000  # maximum number of tables drawn for a question; usually about ten are needed
SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
LIMITS = Limits(turns=4, turn_tokens=192, episode_tokens=768, tool_timeout_s=10.0, tool_output_chars=400, wall_s=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a task's tables: the number of rows, and whether names are unusual."""

    rows: tuple[int, int] = ROWS
    wild: bool = False


NEIGHBOURS = ("alike", "harder", "easier")  # in rotation
_HARDER, _EASIER = Size(rows=(30, 60), wild=True), Size(rows=(6, 9))


class Tables:
    """Questions about small files. `task` is a pure function of (seed, split, index). The kinds of questions rotate by index.

    The training and held-out splits are infinite, and are generated from disjoint word pools. The real held-out split has `REAL_TASKS`
    tasks about tables from scikit-learn and pycountry. Only this split needs scikit-learn and pycountry.
    """

    name = "tables"

    def __init__(
        self,
        seed: int = 0,
        *,
        wild: bool = False,
        kinds: str = "",
        turn_tokens: int = LIMITS.turn_tokens,
        episode_tokens: int = LIMITS.episode_tokens,
        network: str = "",
    ) -> None:
        """The arguments come from `tasks.family.options` in the recipe.

        Args:
            wild: use longer and more unusual names.
            kinds: kinds of questions, such as "total, average"; empty means all kinds.
            turn_tokens: maximum number of completion tokens in one turn. Larger values, also for `episode_tokens`, leave a policy room to
                think before it acts.
            episode_tokens: maximum number of tokens in an episode.
            network: hosts that programs in the sandbox may reach, separated by commas, such as "127.0.0.1:8790"; empty means none.

        Raises `UserError` if a kind is unknown, and `ValueError` if a limit or a host is invalid.
        """
        self.seed = seed
        self.wild = wild
        self.kinds = tuple(_kind(name.strip()) for name in kinds.split(",")) if kinds else KINDS
        self.sandbox = replace(SANDBOX, network=tuple(entry.strip() for entry in network.split(",") if entry.strip()))
        self.limits = replace(LIMITS, turn_tokens=turn_tokens, episode_tokens=episode_tokens)

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if the split is infinite."""
        return REAL_TASKS if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is outside the split or a real table's package is missing, and
        `TaskError` if no table yields a question."""
        end = self.size(split)
        if index < 0 or (end is not None and index >= end):
            raise UserError(
                f"tables has no task {index} in split {split}", fix=f"use an index from 0 to {'...' if end is None else end - 1}"
            )
        rng = Random(f"tables:{self.seed}:{split}:{index}")
        return self._make_task(rng, self.kinds[index % len(self.kinds)], split, f"tables-{self.seed}-{split}-{index}", Size(wild=self.wild))

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Yields training questions of the task's kind about other tables: similar, harder (longer tables, more unusual names) and easier.

        The infinite sequence is a pure function of the task's content and the seed.
        """
        kind = BY_NAME[str(task.data["kind"])]
        sizes = {"alike": Size(wild=self.wild), "harder": _HARDER, "easier": _EASIER}
        for number in count():
            how = NEIGHBOURS[number % len(NEIGHBOURS)]
            name = f"{task.key[:16]}-{seed}-{number}"
            yield how, self._make_task(Random(f"tables:variant:{name}"), kind, Split.TRAIN, f"tables-like-{name}", sizes[how])

    def _make_task(self, rng: Random, kind: Kind, split: Split, name: str, size: Size) -> Task:
        """Returns a task with a question of a kind, drawn from `rng`."""
        question = self._question(rng, kind, split, size)
        text = rng.choice(kind.phrasings).format(**question.names)
        return Task(
            id=name,
            family=self.name,
            prompt=(Message(role="user", content=text),),
            tools=("python", "submit"),
            sandbox=self.sandbox,
            verifiers=("rewards.tables:exact_answer",),
            data={"kind": kind.name, "answer": question.answer, "tolerance": question.tolerance, "names": dict(question.names)},
            split=split,
            files=question.files,
            limits=self.limits,
        )

    def gold(self, task: Task) -> str:
        """Returns Python source that prints the correct answer when run in the folder of the task's files."""
        return BY_NAME[task.data["kind"]].program(task.data["names"])

    def _question(self, rng: Random, kind: Kind, split: Split, size: Size) -> Question:
        for _ in range(ATTEMPTS):
            real = split is Split.HELDOUT_REAL
            table = real_table(rng, kind.name) if real else generated_table(rng, split, wild=size.wild, rows_from_to=size.rows)
            question = kind.ask(rng, table)
            if question is not None:
                return question
        raise TaskError(f"no table yielded a question of kind {kind.name!r} in {ATTEMPTS} attempts")


def _kind(name: str) -> Kind:
    if name not in BY_NAME:
        raise UserError(f"tables has no question kind {name!r}", fix=f"choose from {', '.join(BY_NAME)} in tasks.family.options.kinds")
    return BY_NAME[name]
