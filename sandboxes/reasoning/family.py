"""`Reasoning`: the family's tasks by split and index, with their gold solutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from agentrl.errors import UserError
from agentrl.records import Limits, Message, SandboxSpec, Split, Task, ToolCall
from sandboxes.reasoning import catalogue, problems
from sandboxes.reasoning.mixture import Rounds, Source, parse
from sandboxes.reasoning.problems import Problem, digest
from sandboxes.reasoning.worked import GENERAL, program, telling

MOST_EXAMPLES = 8
_CANDIDATES = 24  # number of problems from which a dataset's examples are chosen
SANDBOX = SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16)
ASKED = {
    "python": "Solve the problem with the tool python. Then submit the answer.",
    "none": "Reply with the answer and nothing else.",
}
LEAST_OUTPUT = 400  # smallest limit on a program's output, in characters; it is higher for longer answers
_OF_EXAMPLES = -1  # seed of the examples, which no run uses


class Reasoning:
    """Problems from reasoning-gym. `task` is a pure function of (seed, split, index). The datasets rotate by index.

    The training and held-out splits draw from different seeds and share no question: for every seed, a hash of a question's text determines
    its split. The split `heldout_real` contains the datasets in `heldout_kinds`, which are never trained. The agent submits its answer.
    With `tool=none`, the agent's message is the answer. `Task.data` contains the answer and the origin of the problem, but not the scorer's
    data.
    """

    name = "reasoning"

    def __init__(
        self,
        seed: int = 0,
        *,
        datasets: str = "chain_sum, products, gcd, spell_backward",
        heldout_kinds: str = "",
        tool: str = "python",
        examples: int = 2,
        turn_tokens: int = 160,
        episode_tokens: int = 1024,
    ) -> None:
        """The arguments come from `tasks.family.options` in the recipe.

        Args:
            datasets: datasets for the training and held-out splits, such as "chain_sum, gcd:2, spell_backward@1, products(max_terms=2)";
                see `sandboxes.reasoning.mixture`.
            heldout_kinds: datasets that are only evaluated, in the split `heldout_real`.
            tool: `python` or `none`.
            examples: number of solved problems at the start of the prompt. The solved problems come from the task's dataset if a short
                program solves its problems.
            turn_tokens: maximum number of completion tokens in one turn.
            episode_tokens: maximum number of prompt and completion tokens in an episode.

        Raises `UserError` if an option is invalid, if a dataset is excluded, or if a dataset, a level or a key does not exist, and
        `ValueError` if a limit is not positive.
        """
        if tool not in ASKED:
            raise UserError(f"tasks.family.options.tool is {tool!r}", fix=f"use {' or '.join(ASKED)}")
        if not 0 <= examples <= MOST_EXAMPLES:
            raise UserError(f"tasks.family.options.examples is {examples}", fix=f"use 0 to {MOST_EXAMPLES}")
        self.seed = seed
        self.tool = tool
        self.examples = examples
        trained, unseen = parse(datasets, "datasets"), parse(heldout_kinds, "heldout_kinds")
        if not trained:
            raise UserError(
                "tasks.family.options.datasets is empty", fix="name at least one dataset, as in tasks.family.options.datasets=chain_sum"
            )
        if both := sorted({source.name for source in trained} & {source.name for source in unseen}):
            raise UserError(f"tasks.family.options.heldout_kinds and datasets both contain {both[0]}", fix="remove it from one of them")
        for source in (*trained, *unseen):
            catalogue.admit(source)
            problems.try_out(source)
        self._rounds = {Split.TRAIN: Rounds(trained), Split.HELDOUT: Rounds(trained)}
        if unseen:
            self._rounds[Split.HELDOUT_REAL] = Rounds(unseen)
        self._limits = Limits(turns=4, turn_tokens=turn_tokens, episode_tokens=episode_tokens, tool_timeout_s=10.0, wall_s=120.0)
        self._trained = frozenset(source.name for source in trained)
        self._worked: dict[str, tuple[Problem, ...]] = {}

    def size(self, split: Split) -> int | None:
        """Returns None if the split is infinite; 0 if it has no datasets."""
        return None if split in self._rounds else 0

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index. Raises `UserError` if the index is outside the split, and `TaskError` if the dataset yields no
        problem for it."""
        if index < 0 or split not in self._rounds:
            raise UserError(f"reasoning has no task {index} in split {split}", fix="set tasks.family.options.heldout_kinds")
        source, number = self._rounds[split].at(index)
        return self._make_task(source, self.seed, split, number, f"reasoning-{self.seed}-{split}-{index}")

    def variants(self, task: Task, *, seed: int) -> Iterator[tuple[str, Task]]:
        """Yields training problems from the task's dataset: similar problems and, if the dataset has levels, problems of neighbouring
        levels.

        The problems of other levels come from the next harder and the next easier level. The sequence is a pure function of the task's
        content and the seed. Yields nothing for datasets in `heldout_kinds`.
        """
        origin = task.data["origin"]
        source = Source(name=origin["dataset"], level=origin["level"], keys=origin["config"])
        if source.name not in self._trained:
            return
        neighbours = [
            ("alike", source),
            *(("harder", near) for near in _level(source, 1)),
            *(("easier", near) for near in _level(source, -1)),
        ]
        drawn = int(task.key[:6], 16) + seed
        for number in count():
            kind, near = neighbours[number % len(neighbours)]
            name = f"reasoning-like-{task.key[:16]}-{seed}-{number}"
            yield kind, self._make_task(near, drawn, Split.TRAIN, number // len(neighbours), name)

    def _make_task(self, source: Source, seed: int, split: Split, number: int, name: str) -> Task:
        """Returns the task for problem `number` of a dataset, with this seed and split."""
        worked = self._examples(source)
        drawn = problems.problem(
            source, seed=seed, heldout=split is not Split.TRAIN, number=number, but=frozenset(digest(e.question) for e in worked)
        )
        return Task(
            id=name,
            family=self.name,
            prompt=(
                Message(role="system", content=ASKED[self.tool]),
                *(message for example in worked for message in self._solved(example)),
                Message(role="user", content=drawn.question),
            ),
            tools=() if self.tool == "none" else (self.tool, "submit"),
            sandbox=SANDBOX,
            verifiers=("rewards.reasoning:own_scorer",),
            data={"kind": source.name, "answer": drawn.answer, "origin": drawn.origin()},
            split=split,
            limits=replace(self._limits, tool_output_chars=max(LEAST_OUTPUT, 2 * len(drawn.answer))),
        )

    def gold(self, task: Task) -> str:
        """Returns a short program that computes the answer, or a program that prints the answer if no short program exists."""
        known = program(str(task.data["kind"]), task.prompt[-1].content)
        return f"print({task.data['answer']!r})" if known is None else known

    def _examples(self, source: Source) -> tuple[Problem, ...]:
        """Returns the solved problems for a dataset's prompts.

        These problems are the same for every task and seed, and no task uses their questions.
        """
        if source.name not in self._worked:
            own = self._representative(source, self.examples)
            self._worked[source.name] = own or self._of_other_kinds()
        return self._worked[source.name]

    def _of_other_kinds(self) -> tuple[Problem, ...]:
        """Returns examples from the datasets in `GENERAL`, in rotation, for datasets that have no short program."""
        kinds = [self._representative(Source(name=name), self.examples) for name in GENERAL]
        places = [divmod(place, len(kinds)) for place in range(self.examples)]
        return tuple(kinds[turn][number] for number, turn in places)

    def _representative(self, source: Source, count: int) -> tuple[Problem, ...]:
        """Returns `count` representative problems of a dataset; empty if no short program solves them."""
        drawn = problems.problem(source, seed=_OF_EXAMPLES, heldout=False, number=0)
        if program(source.name, drawn.question) is None:
            return ()
        others = (problems.problem(source, seed=_OF_EXAMPLES, heldout=False, number=number) for number in range(1, _CANDIDATES))
        return telling([drawn, *(candidate for candidate in others if program(source.name, candidate.question) is not None)], count)

    def _solved(self, example: Problem) -> tuple[Message, ...]:
        """Returns an example as messages: the question, the program, its output and the answer.

        Without a tool, returns only the question and the answer.
        """
        question = Message(role="user", content=example.question)
        if self.tool == "none":
            return question, Message(role="assistant", content=example.answer)
        code = program(example.source.name, example.question)
        assert code is not None, "only such problems are examples"
        return (
            question,
            _calls(self.tool, code=code),
            Message(role="tool", content=example.answer),
            _calls("submit", answer=example.answer),
        )


def _level(source: Source, step: int) -> Iterator[Source]:
    """Yields the dataset `step` levels higher; yields nothing if the dataset has no such level."""
    if source.level is None or source.level + step < 0:
        return
    other = replace(source, level=source.level + step)
    try:
        problems.check(other)
    except UserError:  # the dataset has no further level
        return
    yield other


def _calls(tool: str, **arguments: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=tool, arguments=arguments),))
