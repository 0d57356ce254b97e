"""Families and tools with one mistake each that `agentrl check` reports; the good family has none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, ClassVar

from agentrl.agent import tool
from agentrl.agent.tools import ToolOutcome, function_schema
from agentrl.errors import SandboxError
from agentrl.records import Episode, Limits, Message, SandboxSpec, Score, Split, Task

_calls = count()


class Good:
    """Sums of the numbers in a file; splits share no task, since each draws different numbers."""

    name = "sums"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def size(self, split: Split) -> int | None:
        return {Split.TRAIN: None, Split.HELDOUT: 6, Split.HELDOUT_REAL: 0}[split]

    def numbers(self, split: Split, index: int) -> list[int]:
        rng = Random(f"{self.seed}/{split}/{index}")
        return [rng.randrange(100, 100_000) for _ in range(5)]

    def files(self, split: Split, index: int) -> dict[str, str]:
        return {"numbers.txt": "".join(f"{number}\n" for number in self.numbers(split, index))}

    def task(self, split: Split, index: int) -> Task:
        return Task(
            id=f"{self.name}-{split}-{index}",
            family=self.name,
            prompt=(Message(role="user", content=self.question(split, index)),),
            tools=self.tools(),
            sandbox=SandboxSpec(image="sandboxes/tables", memory_mb=128, processes=16, disk_mb=16),
            verifiers=(self.verifier(),),
            data={"answer": str(sum(self.numbers(split, index))), "kind": "sum"},
            split=split,
            files=self.files(split, index),
            limits=Limits(tool_timeout_s=1.0),
        )

    def question(self, split: Split, index: int) -> str:
        return "What is the sum of numbers.txt?"

    def tools(self) -> tuple[str, ...]:
        return ("python", "submit")

    def verifier(self) -> str:
        return "tests.check.bad_families:exact"

    def gold(self, task: Task) -> str:
        return "print(sum(map(int, open('numbers.txt'))))"


async def exact(task: Task, episode: Episode) -> Score:
    return Score(value=float((episode.answer or "").strip() == task.data["answer"]))


class Impure(Good):
    """The question depends on how many questions were generated before."""

    def question(self, split: Split, index: int) -> str:
        return f"What is the sum of numbers.txt? Say it {next(_calls)} times."


class Hashed(Good):
    def question(self, split: Split, index: int) -> str:
        return f"What is sum number {hash('numbers') % 1_000_000} of numbers.txt?"


class Overlapping(Good):
    """Held-out tasks are the training tasks of the same index."""

    def numbers(self, split: Split, index: int) -> list[int]:
        return super().numbers(Split.TRAIN, index)


class Leaking(Good):
    def files(self, split: Split, index: int) -> dict[str, str]:
        answer = sum(self.numbers(split, index))
        return {
            **super().files(split, index),
            **({"data/answer.txt": f"{answer}\n"} if index % 2 else {"meta.json": f'{{"answer": {answer}}}'}),
        }


class Unmade(Good):
    """The third task cannot be created, the fourth contains a set, and the seed does nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(0)

    def task(self, split: Split, index: int) -> Task:
        result = super().task(split, index)
        if index == 2:
            raise KeyError("region")
        return result if index != 3 else Task(**{name: getattr(result, name) for name in result.__slots__} | {"data": {"answer": {1, 2}}})  # type: ignore[arg-type]


class Fickle(Good):
    def verifier(self) -> str:
        return "tests.check.bad_families:fickle"


async def fickle(task: Task, episode: Episode) -> Score:
    right = (episode.answer or "").strip() == task.data["answer"]
    return Score(value=float(right and next(_calls) % 2 == 0))


class Brittle(Good):
    def verifier(self) -> str:
        return "tests.check.bad_families:brittle"


async def brittle(task: Task, episode: Episode) -> Score:
    if episode.answer == "[" * 100_000:
        return "too deep"  # type: ignore[return-value]
    return Score(value=float("x" * 1000 in (episode.answer or "") or (episode.answer or "").strip() == task.data["answer"]))


class Tooled(Good):
    def tools(self) -> tuple[str, ...]:
        return ("python", *(f"tests.check.bad_families:{name}" for name in ("calculator", "talker", "holder", "misnamed")), "submit")


class _SandboxlessTool:
    needs_sandbox = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.schema: Mapping[str, Any] = function_schema(name, "Does something.", "text", "what")


class Calculator(_SandboxlessTool):
    async def __call__(self, arguments: Mapping[str, Any], sandbox: object, limits: Limits) -> ToolOutcome:
        return ToolOutcome(output=str(len(arguments["text"])), ok=True)


class Talker(_SandboxlessTool):
    async def __call__(self, arguments: Mapping[str, Any], sandbox: object, limits: Limits) -> ToolOutcome:
        return "hello"  # type: ignore[return-value]


class Holder(_SandboxlessTool):
    async def __call__(self, arguments: Mapping[str, Any], sandbox: object, limits: Limits) -> ToolOutcome:
        if arguments.get("text") is None and "text" in arguments:
            time.sleep(60)
        return ToolOutcome(output="", ok=True)


calculator, talker, holder = Calculator("calculator"), Talker("talker"), Holder("holder")
misnamed, untold = Calculator("misnamed"), Calculator("untold")
misnamed.schema = function_schema("other", "Adds.", "text", "what")
untold.schema = function_schema("untold", "", "text", "what")


class Breaker(_SandboxlessTool):
    """Reads the file that the model names, and breaks its sandbox if the name is empty."""

    needs_sandbox = True

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Any, limits: Limits) -> ToolOutcome:
        if arguments.get("text") == "":
            raise SandboxError("the exec server is gone")
        try:
            data = await sandbox.read(str(arguments.get("text")), max_bytes=1000)
        except (FileNotFoundError, ValueError) as error:
            return ToolOutcome(output=f"error: {error}", ok=False)
        return ToolOutcome(output=data.decode("utf-8", "replace"), ok=True)


breaker = Breaker("breaker")


@dataclass
class Notes:
    """A set of tools whose state belongs to one episode and can be restored."""

    notes: list[str] = field(default_factory=list)

    @tool
    async def note(self, text: str) -> int:
        """Note a text."""
        self.notes.append(text)
        return len(self.notes)


class Gossip:
    """Its state leaks from one episode into the next."""

    heard: ClassVar[list[str]] = []

    @tool
    async def tell(self, text: str) -> None:
        """Tell it."""
        self.heard.append(text)

    def state(self) -> Any:
        return self.heard

    def restore(self, state: Any) -> None: ...


class Forgetful:
    """Restores nothing, so its restored state differs from the saved one."""

    def __init__(self) -> None:
        self.count = 0

    @tool
    async def add(self, text: str) -> None:
        """Add one."""
        self.count += 1

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None: ...


class Stubborn(Forgetful):
    """Raises when its state is restored."""

    def restore(self, state: Any) -> None:
        raise KeyError("count")


class Opaque(Forgetful):
    """Its state is not JSON."""

    def state(self) -> Any:
        return {self.count}


class Leaves(Good):
    """Ends its process for one task."""

    def task(self, split: Split, index: int) -> Task:
        if index == 1:
            raise SystemExit(0)
        return super().task(split, index)
