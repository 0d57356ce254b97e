"""`Pages`: tasks by split and index, with their gold solutions."""

from __future__ import annotations

from random import Random

from agentrl.errors import UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task
from sandboxes.tables.names import Names

SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)


class Pages:
    """Questions like "Which number has kelmor? It is on one of the pages 1 to 5.", for an agent that can read only full pages.

    A single agent's context has room for two or three pages, so the agent finds at most about half of the entries. Two strategies find all
    entries: delegating each page to a sub-agent (`rollout.agent=delegating`), and noting which pages were seen before the context is full
    (`rollout.compaction`). `task` is a pure function of (seed, split, index). Training and held-out names come from disjoint pools.
    """

    name = "pages"

    def __init__(self, seed: int = 0, *, pages: int = 5, entries: int = 20, turn_tokens: int = 256, episode_tokens: int = 1024) -> None:
        """The arguments come from `tasks.family.options` in the recipe.

        Args:
            pages: number of pages in a task.
            entries: number of entries on a page. Each entry is a name with a number, and needs five to twelve tokens, depending on the
                tokenizer.
            turn_tokens: maximum number of completion tokens in one turn. Delegating every page needs about forty tokens per page.
            episode_tokens: size of one context, which has room for more than two pages but not for all of them.

        Raises `UserError` if there are fewer than two pages or no entries, and `ValueError` if a limit is not positive.
        """
        if pages < 2 or entries < 1:
            raise UserError(f"pages needs at least 2 pages and 1 entry, got {pages} and {entries}", fix="change tasks.family.options")
        self.seed, self.pages, self.entries = seed, pages, entries
        turns = 3 * pages + 4  # up to 3 turns per page, and 4 turns for the main agent
        self.limits = Limits(turns=turns, turn_tokens=turn_tokens, episode_tokens=episode_tokens, tool_output_chars=40 * entries)

    def size(self, split: Split) -> int | None:
        """Returns None, which means infinite, or 0 for the split of real data."""
        return 0 if split is Split.HELDOUT_REAL else None

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is negative or the split is that of real data, which is empty."""
        if index < 0 or split is Split.HELDOUT_REAL:
            raise UserError(f"pages has no task {index} in split {split}", fix="use train or heldout, and an index from 0")
        rng = Random(f"pages:{self.seed}:{split}:{index}")
        names = self._names(rng, split)
        numbers = rng.sample(range(100, 1000), len(names)) if len(names) <= 900 else [rng.randrange(100, 1000) for _ in names]
        lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
        sought = rng.randrange(len(lines))
        texts = {f"page{page + 1}.txt": "\n".join(lines[page :: self.pages]) for page in range(self.pages)}
        question = f"Which number has {names[sought]}? It is on one of the pages 1 to {self.pages}."
        return Task(
            id=f"pages-{self.seed}-{split}-{index}",
            family=self.name,
            prompt=(Message(role="user", content=question),),
            tools=("sandboxes.pages:read", "submit"),
            sandbox=SANDBOX,
            verifiers=("rewards.pages:correct_number",),
            data={"kind": "pages", "answer": str(numbers[sought]), "name": names[sought], "page": sought % self.pages + 1},
            split=split,
            files=texts,
            limits=self.limits,
        )

    def gold(self, task: Task) -> str:
        """Returns Python source that prints the correct answer when run in the folder of the task's files."""
        return (
            f"for page in range(1, {len(task.files)} + 1):\n"
            "    for line in open(f'page{page}.txt', encoding='utf-8'):\n"
            "        name, _, number = line.strip().partition(': ')\n"
            f"        if name == {task.data['name']!r}:\n"
            "            print(number)\n"
        )

    def _names(self, rng: Random, split: Split) -> list[str]:
        source, names = Names(rng, split, wild=False), dict[str, None]()
        while len(names) < self.pages * self.entries:
            names[source.word()] = None
        return list(names)
