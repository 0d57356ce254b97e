"""`Archive`: tasks by split and index, with their gold solutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from random import Random

from agentrl.errors import UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from sandboxes.tables.names import Names

SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
KINDS = ("invoice", "lease", "licence", "order", "permit", "quote", "receipt", "waybill")


class Archive:
    """Questions like "What is the amount of permit 4711 in project kelmor?", for an agent that has time for only a few of the drawers.

    Each kind of record is in one drawer. The assignment of kinds to drawers is the same for all tasks of a project, and an agent can
    discover it only by opening drawers. An agent without notes can open `turns - 1` of the 8 drawers, and finds the record in `turns - 1`
    of 8 tasks on average. An agent with notes about the drawers finds every record. Each task asks for a different record, so a note that
    contains an answer does not help. `task` is a pure function of (seed, split, index). The projects of different splits have different
    names and drawers.
    """

    name = "archive"

    def __init__(self, seed: int = 0, *, projects: int = 4, entries: int = 4, turns: int = 4) -> None:
        """The arguments come from `tasks.family.options` in the recipe.

        Args:
            projects: number of projects per split; task `index` is about project `index % projects`.
            entries: number of records in a drawer.
            turns: number of turns in an episode, including the turn that submits. Must not exceed the number of drawers, so that an episode
                cannot look into all of them.

        Raises `UserError` if a number is invalid.
        """
        if not 1 <= projects <= 1000 or not 1 <= entries <= 100 or not 2 <= turns <= len(KINDS):
            raise UserError(
                f"archive cannot have {projects} projects, {entries} entries and {turns} turns",
                fix=f"in tasks.family.options, set 1 to 1000 projects, 1 to 100 entries and 2 to {len(KINDS)} turns",
            )
        self.seed, self.projects, self.entries = seed, projects, entries
        self.limits = Limits(turns=turns, turn_tokens=400, episode_tokens=3000, tool_output_chars=64 * (entries + 1))

    def size(self, split: Split) -> int | None:
        """Returns None, which means infinite, or 0 for the split of real data."""
        return 0 if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is negative or the split is that of real data, which is empty."""
        if index < 0 or split is Split.HELDOUT_REAL:
            raise UserError(f"archive has no task {index} in split {split}", fix="use train or heldout, and an index from 0")
        project, kinds = self._project(split, index % self.projects)
        rng = Random(f"archive:{self.seed}:{split}:{index}")
        numbers = rng.sample(range(1000, 10_000), len(kinds) * self.entries)
        drawers = {kind: {number: rng.randrange(100, 1000) for number in numbers[at :: len(kinds)]} for at, kind in enumerate(kinds)}
        kind = rng.choice(kinds)
        number = rng.choice(list(drawers[kind]))
        return Task(
            id=f"archive-{self.seed}-{split}-{index}",
            family=self.name,
            prompt=(Message(role="user", content=_question(project, kind, number)),),
            tools=("sandboxes.archive:look", "submit"),
            sandbox=SANDBOX,
            verifiers=("rewards.tables:exact_answer",),
            data={"kind": "archive", "answer": str(drawers[kind][number]), "project": project, "drawer": kinds.index(kind) + 1},
            split=split,
            files={f"drawer{place}.txt": _contents(place, of, drawers[of]) for place, of in enumerate(kinds, 1)},
            limits=self.limits,
        )

    def gold(self, task: Task) -> str:
        """Returns Python source that prints the correct answer when run in the folder of the task's files."""
        sought = str(task.prompt[0].content).partition("amount of ")[2].partition(" in project")[0]
        return (
            f"for line in open('drawer{task.data['drawer']}.txt', encoding='utf-8'):\n"
            "    name, _, amount = line.strip().partition(': ')\n"
            f"    if name == {sought!r}:\n"
            "        print(amount)\n"
        )

    def _project(self, split: Split, number: int) -> tuple[str, tuple[str, ...]]:
        """Returns a project's name and the kind of record in each drawer."""
        return _projects(self.seed, split, self.projects)[number]


@lru_cache(maxsize=64)
def _projects(seed: int, split: Split, count: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rng = Random(f"archive:{seed}:{split}")
    names, chosen = Names(rng, split, wild=False), dict[str, None]()
    while len(chosen) < count:
        chosen[names.word()] = None
    return tuple((name, tuple(rng.sample(KINDS, len(KINDS)))) for name in chosen)


def _contents(drawer: int, kind: str, amounts: Mapping[int, int]) -> str:
    return "\n".join([f"drawer {drawer}: {kind}s", *(f"{kind} {number}: {amount}" for number, amount in amounts.items())])


def _question(project: str, kind: str, number: int) -> str:
    return (
        f"What is the amount of {kind} {number} in project {project}? The project has drawers 1 to {len(KINDS)}, with one kind of record in"
        " each: in all its tasks the same."
    )
