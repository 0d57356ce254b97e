"""An exception raised at any await of an episode or a group becomes a typed failure.

The test drives the event loop's coroutines itself, and raises an exception at the n-th await of any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import ToolOutcome, TurnLoop, tool
from agentrl.agent.invoke import ARGUMENT_FAULTS
from agentrl.agent.tools import function_schema
from agentrl.errors import PluginError, SandboxError, SandboxTimeout, ServingError
from agentrl.protocols import Sandbox
from agentrl.records import Blame, Episode, EpisodeState, Failure, Group, Limits, Score, ScoredEpisode, Task, codec
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import ScriptedSandbox, printing
from tests.chats import chat_of

FAULTS = (
    SandboxError("gone"),
    SandboxTimeout("late"),
    ServingError("refused"),
    PluginError("no such thing"),
    KeyError("id"),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    RecursionError("too deep"),
    TimeoutError("not ours"),
    MemoryError(),
    asyncio.CancelledError("of nobody's wish"),
    SystemExit(3),
    ExceptionGroup("several", [KeyError("id"), ServingError("refused")]),
)
NOTHING_RAISES = ("TaskGroup.__aexit__", "Semaphore.acquire")  # except a requested cancellation
AGENTRL_ERRORS = (SandboxError, ServingError, PluginError, ExceptionGroup)


class Awaits:
    """Counts the awaits of an event loop, and raises `error` at number `at`; None cancels `main` there."""

    def __init__(self, at: int = -1, error: BaseException | None = None) -> None:
        self.at, self.error = at, error
        self.count = 0
        self.where: list[str] = []  # call stack of the task, outermost first, where the error was raised
        self.main: asyncio.Task[Any] | None = None

    def task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(self._driven(coroutine), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # cancelled before it started
        return task

    async def _driven(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _Driven(self, coroutine)

    def waiting(self, coroutine: Any) -> BaseException | None:
        """Called at every await. Returns the exception to raise there, if any."""
        self.count += 1
        if self.count - 1 != self.at:
            return None
        self.where = functions(coroutine)
        if self.error is not None and self.where[-1] in NOTHING_RAISES:
            return None
        if self.error is None:
            assert self.main is not None
            self.main.cancel()
        return self.error


class _Driven:
    def __init__(self, awaits: Awaits, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.awaits, self.coroutine = awaits, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, error = self.coroutine.__await__(), None
        while True:
            try:
                future = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            error = self.awaits.waiting(self.coroutine)
            if error is not None:
                if future is not None:
                    future._asyncio_future_blocking = False  # like a task that catches it
                continue
            try:
                yield future
            except BaseException as thrown:
                error = thrown


def functions(coroutine: Any) -> list[str]:
    """Returns the names of the awaiting functions, outermost first, including those in user code."""
    names = []
    while coroutine is not None:
        name = getattr(coroutine, "__qualname__", None)
        if name is None:
            break
        names.append(name)
        frame = getattr(coroutine, "gi_frame", None)
        if frame is not None and "running" in frame.f_locals:  # agentrl.base.user_code also drives coroutines by hand
            coroutine = frame.f_locals["running"]
        else:
            coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return names


@contextlib.asynccontextmanager
async def driven(awaits: Awaits, work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs `work` in a loop whose tasks are all driven. Checks that no task still runs at the end."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(awaits.task)  # type: ignore[arg-type]
    try:
        awaits.main = loop.create_task(work)
        yield awaits.main
    finally:
        loop.set_task_factory(None)
        for _ in range(4):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, f"something still runs: {awaits.where}"


async def pause() -> None:
    await asyncio.sleep(0)


class Box(ScriptedSandbox):
    """A sandbox that awaits before and after each operation, and counts closings."""

    closings = 0

    async def python(self, code: str, **options: Any) -> Any:
        await pause()
        result = await super().python(code, **options)
        await pause()
        return result

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        await pause()
        return await super().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await pause()
        await super().write(path, data)

    async def snapshot(self) -> bytes:
        await pause()
        return await super().snapshot()

    async def close(self) -> None:
        self.closings += 1
        await super().close()
        await pause()


class Boxes(ScriptedSandboxes):
    async def open(self, spec: Any, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> Any:
        await pause()
        plain = await super().open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        box = self.opened[-1] = Box(plain.id, printing("3"), plain.files)
        return box


class Waiting(ScriptedPolicy):
    async def generate(self, *arguments: Any, **options: Any) -> Any:
        await pause()
        completion = await super().generate(*arguments, **options)
        await pause()
        return completion


class Look:
    """A user-supplied tool, on the host or in the sandbox."""

    def __init__(self, name: str, needs_sandbox: bool) -> None:
        self.name, self.needs_sandbox = name, needs_sandbox
        self.schema = function_schema(name, "Looks.", "text", "anything")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        await pause()
        if sandbox is not None:
            await sandbox.write("note", b"seen")
            return ToolOutcome(output=(await sandbox.read("note", max_bytes=10)).decode(), ok=True)
        return ToolOutcome(output="seen", ok=True)


look, look_inside = Look("look", False), Look("look_inside", True)


class Notes:
    """User-supplied tools with state."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @tool
    async def note(self, text: str) -> str:
        """Keep it."""
        await pause()
        self.notes.append(text)
        return "kept"

    async def state(self) -> list[str]:
        await pause()
        return self.notes

    async def restore(self, state: list[str]) -> None:
        await pause()
        self.notes = state

    async def close(self) -> None:
        await pause()


async def judge(task: Task, episode: Episode) -> Score:
    await pause()
    return Score(value=1.0)


class Store:
    """In-memory checkpoints that await."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], EpisodeState] = {}

    async def save_state(self, group: int, member: int, state: EpisodeState) -> None:
        await pause()
        self.states[group, member] = state

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        await pause()

    async def load(self, group: int, member: int) -> EpisodeState | ScoredEpisode | None:
        await pause()
        return None


RESPONSES = (
    '<tool_call>{"name": "python", "arguments": {"code": "print(3)"}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {}}</tool_call><tool_call>{"name": "look_inside", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>',
    '<tool_call>{"name": "submit", "arguments": {"answer": "3"}}</tool_call>',
)


class Scene:
    """The parts around one episode or group, and the invariants at its end."""

    def __init__(self, tokenizer: Any, task: Task, *, size: int = 1, branches: int = 1) -> None:
        tools = ("python", f"{__file__}:look", f"{__file__}:look_inside", f"{__file__}:Notes", "submit")
        self.task = replace(task, tools=tools, verifiers=(f"{__file__}:judge",), outputs=("a.csv",))
        self.sandboxes = Boxes(printing("3"))
        self.reported: list[Failure | None] = []
        runner = EpisodeRunner(
            policy=Waiting.saying(tokenizer, *RESPONSES),
            sandboxes=self.sandboxes,
            agent=TurnLoop(chat=chat_of(tokenizer)),
            sampling=Sampling(),
            max_model_len=4096,
            request_timeout_s=60.0,
        )
        self.slots = asyncio.Semaphore(2)
        self.groups = GroupRunner(
            runner=runner,
            scorer=TaskScorer(max_retries=0),
            slots=self.slots,
            group_size=size,
            max_retries=0,
            branches=branches,
            checkpoints=Store(),
            on_attempt=self.reported.append,
        )

    def check(self, awaits: Awaits) -> None:
        closings = Counter(box.closings for box in self.sandboxes.opened)  # type: ignore[attr-defined]
        assert set(closings) <= {1}, f"closings of sandboxes: {closings} ({awaits.where})"
        assert self.slots._value == 2 and not self.slots.locked(), awaits.where


UNANSWERED = (SandboxError, ServingError, ExceptionGroup, TimeoutError)
"""Errors that are infrastructure faults in a verifier: a part that it needs did not answer."""


def expected(awaits: Awaits) -> str:
    """Returns what an exception at this await must become: a scored tool failure, nothing, or else an excluding fault."""
    where, error = awaits.where, awaits.error
    if where[-1] in NOTHING_RAISES:
        return "nothing"
    if isinstance(error, ValueError) and "Box.snapshot" in where:  # no state to continue from
        return "nothing"
    if isinstance(error, ValueError) and "Box.read" in where and "_collect" in where:  # blamed on the policy
        return "tool"
    agentrl_error = isinstance(error, AGENTRL_ERRORS)
    if {"ToolInstance.state", "ToolInstance.close", "Notes.state", "Notes.close"} & set(where):  # not captured, or finished
        return "nothing"
    if {"Store.save_state", "Store.save_scored", "Store.load", "Box.close"} & set(where):
        return "nothing"
    if "call_verifier" in where or "judge" in where:  # only infrastructure faults are retried
        return "unscored" if isinstance(error, UNANSWERED) else "nothing"
    in_tool = "call_tool" in " ".join(where) or ("_caught" in where and "TurnLoop.act" not in where)  # which has the same name
    if in_tool and isinstance(error, TimeoutError) and not any(name.startswith("Box.") for name in where):
        return "fault"  # the tool's await did not answer
    if in_tool and not agentrl_error and (isinstance(error, ARGUMENT_FAULTS) or not any(name.startswith("Box.") for name in where)):
        return "tool"
    return "fault"


def outcome_of(scored: ScoredEpisode, awaits: Awaits) -> str:
    """Returns what the exception became. Fails unless its failure is typed and consistent."""
    episode, score = scored.episode, scored.score
    assert codec.from_json(ScoredEpisode, codec.to_json(scored)) == scored
    foreign = [failure for failure in episode.failures if failure.blame is not Blame.POLICY]
    assert (score.value is None) == bool(foreign or score.reason), "a fault has no score but a reason"
    if foreign:
        assert episode.left_out and foreign[-1].kind and foreign[-1].stage
        return "fault"
    if score.value is None:
        return "unscored"
    assert score.value == 1.0
    return "tool" if episode.failures else "nothing"


async def count_awaits(scene: Scene, work: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """Returns the number of awaits and the result without an exception."""
    awaits = Awaits()
    async with driven(awaits, work) as main:
        result = await main
    scene.check(awaits)
    return awaits.count, result


def without_traceback(error: BaseException) -> BaseException:
    """Returns the same error without its traceback."""
    return type(error)(*error.args)


with_each_fault = pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)


@pytest.mark.slow
@pytest.mark.sampled(15)
@with_each_fault
async def test_an_exception_at_any_await_of_an_episode_becomes_a_typed_failure(tokenizer: Any, task: Task, error: BaseException) -> None:
    count, sound = await count_awaits(scene := Scene(tokenizer, task), scene.groups.run_group(0, scene.task))
    assert sound.scored[0].episode.outputs and count > 25
    counts = Counter[str]()
    for at in range(count):
        scene, awaits = Scene(tokenizer, task), Awaits(at, without_traceback(error))
        async with driven(awaits, scene.groups.run_group(0, scene.task)) as main:
            group: Group = await main
        scene.check(awaits)
        (scored,) = group.episodes
        outcome = outcome_of(scored, awaits)
        assert outcome == expected(awaits), f"at {at}: {' > '.join(awaits.where)}: {scored.episode.failures} {scored.score}"
        counts[outcome] += 1
        if outcome == "fault":
            assert (group.fault is not None) == isinstance(error, PluginError)
        if not isinstance(error, PluginError):
            assert [failure is None for failure in scene.reported] == [outcome in ("nothing", "tool")]
    assert counts["fault"] > 5 and counts["nothing"] > 3
    assert bool(counts["unscored"]) == isinstance(error, UNANSWERED)
    assert (counts["tool"] > 3) != isinstance(error, (*AGENTRL_ERRORS, TimeoutError))


@pytest.mark.slow
@with_each_fault
async def test_an_exception_at_any_await_of_a_group_costs_one_member(tokenizer: Any, task: Task, error: BaseException) -> None:
    """Two stems and two branches. A member without its stem's state starts from the task; only a broken task excludes all."""
    count, sound = await count_awaits(scene := Scene(tokenizer, task, size=4, branches=2), scene.groups.run_group(0, scene.task))
    assert len(sound.scored) == 4 and count > 90
    for at in range(count):
        scene, awaits = Scene(tokenizer, task, size=4, branches=2), Awaits(at, without_traceback(error))
        async with driven(awaits, scene.groups.run_group(0, scene.task)) as main:
            group: Group = await main
        scene.check(awaits)
        outcomes = [outcome_of(scored, awaits) for scored in group.episodes]
        if group.fault is not None:
            assert isinstance(error, PluginError) and outcomes == ["fault"] * 4
        else:
            assert outcomes.count("nothing") >= 3, f"at {at}: {' > '.join(awaits.where)}: {outcomes}"
            # A stem's boundary resumes branches, so the exception may be raised in another member.
            assert expected(awaits) in outcomes, f"at {at}: {' > '.join(awaits.where)}: {outcomes}"


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
async def test_a_cancellation_at_any_await_propagates_and_leaves_nothing_running(tokenizer: Any, task: Task, size: int) -> None:
    branches = 2 if size > 1 else 1
    count, _ = await count_awaits(scene := Scene(tokenizer, task, size=size, branches=branches), scene.groups.run_group(0, scene.task))
    for at in range(count):
        scene, awaits = Scene(tokenizer, task, size=size, branches=branches), Awaits(at)
        with pytest.raises(asyncio.CancelledError):
            async with driven(awaits, scene.groups.run_group(0, scene.task)) as main:
                await main
        assert awaits.where
        scene.check(awaits)
