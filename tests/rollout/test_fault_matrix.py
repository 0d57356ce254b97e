"""Planted faults: every part of an episode x every kind of failure, with the expected blame.

Each cell runs one scripted episode on an event loop without real time. The outcomes are:

    .  none: scored as if there were no fault
    P  policy: scored, but without the full score or with a recorded failure
    M  infrastructure: no score, and retried or excluded
    T  task: its group is excluded
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ToolOutcome, TurnLoop
from agentrl.agent.mcp import RunTools, Server
from agentrl.agent.mcp.transports import ENDINGS, Transport, Unanswered
from agentrl.agent.tools import function_schema
from agentrl.base import user_code
from agentrl.base.tool_list import usable_tools
from agentrl.config import MCPConfig
from agentrl.errors import (
    InfrastructureError,
    JudgeError,
    LearnerError,
    PluginError,
    PolicyFault,
    RequestRefused,
    SandboxError,
    SandboxTimeout,
    ServerDied,
    ServingError,
    StoreError,
    TaskError,
    ToolUnavailable,
    UserError,
)
from agentrl.protocols import Sandbox
from agentrl.records import Blame, Episode, Limits, Score, ScoredEpisode, Task
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.reward.group_judging import GroupJudgeScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.rollout.faults import failure_from_error, infrastructure_fault, task_fault
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.sandboxes import ScriptedSandbox, printing, sample_task
from tests.chats import chat_of, shared_tokenizer

TOKENIZER = shared_tokenizer()


class Panic(BaseException):
    """Like the exception that a Rust library raises."""


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


FAILURES: Mapping[str, Callable[[], BaseException] | None] = {
    "sandbox": lambda: SandboxError("gone"),
    "late": lambda: SandboxTimeout("no answer"),
    "server": lambda: ServingError("status 500"),
    "died": lambda: ServerDied("the inference server died"),
    "refused": lambda: RequestRefused("status 400"),
    "judge": lambda: JudgeError("down"),
    "learner": lambda: LearnerError("stuck"),
    "store": lambda: StoreError("the disk is full"),
    "tool": lambda: ToolUnavailable("search is down"),
    "down": lambda: ConnectionRefusedError(111, "Connection refused"),
    "busy": lambda: RuntimeError("503 Service Unavailable"),
    "slow": lambda: TimeoutError("no answer"),
    "value": lambda: ValueError("no such thing"),
    "bug": lambda: KeyError("id"),
    "deep": lambda: RecursionError("too deep"),
    "memory": lambda: MemoryError(),
    "exit": lambda: SystemExit(3),
    "cancel": lambda: asyncio.CancelledError("of nobody's wish"),
    "ctrlc": lambda: KeyboardInterrupt(),
    "panic": lambda: Panic("index out of bounds"),
    "task": lambda: TaskError("a file lacks", fix="add it"),
    "hangs": None,
}
LIKE_PANIC: Mapping[str, Callable[[], BaseException]] = {
    "mute": lambda: Mute(),
    "closed": lambda: GeneratorExit(),
    "several": lambda: BaseExceptionGroup("", [SystemExit(3), BaseExceptionGroup("", [asyncio.CancelledError(), KeyError("id")])]),
}
"""Failures with the outcomes of the column `panic`."""

TABLE = """
           sandbox late server died refused judge learner store tool down busy slow value bug deep memory exit cancel ctrlc panic task hangs
sample first     M     M     M      M     M      M      M      M    M    M    M    M    M    M   M     M     M     M     M     M     T    M
sample later     M     M     M      M     P      M      M      M    M    M    M    M    M    M   M     M     M     M     M     M     T    M
open             M     M     M      M     M      M      M      M    M    M    M    M    T    M   M     M     M     M     M     M     T    M
exec             M     M     M      M     M      M      M      M    M    M    M    M    P    M   P     M     M     M     M     M     T    P
host tool        M     M     M      M     M      M      M      M    M    M    M    M    P    P   P     P     P     P     P     P     T    M
inside tool      M     M     M      M     M      M      M      M    M    M    M    M    P    P   P     P     P     P     P     P     T    P
snapshot         M     M     M      M     M      M      M      M    M    M    M    M    .    M   M     M     M     M     M     M     .    M
collect          M     M     M      M     M      M      M      M    M    M    M    M    P    M   M     M     M     M     M     M     P    M
close            .     .     .      .     .      .      .      .    .    .    .    .    .    .   .     .     .     .     .     .     .    .
opening          M     M     M      M     M      M      M      M    M    M    M    M    M    M   M     M     M     M     M     M     T    .
parse            M     M     M      M     M      M      M      M    M    P    P    P    P    P   P     P     P     P     P     P     T    .
show             M     M     M      M     M      M      M      M    M    P    P    P    P    P   P     P     P     P     P     P     T    .
keep             .     .     .      .     .      .      .      .    .    .    .    .    .    .   .     .     .     .     .     .     .    .
judge always     M     M     M      M     M      M      M      M    M    M    M    M    M    M   M     M     M     M     M     M     T    M
judge answer     M     M     M      M     M      M      M      M    M    M    M    M    P    P   P     P     P     P     P     P     T    P
group always     M     M     M      M     M      M      M      M    M    M    M    M    M    M   M     M     M     M     M     M     T    M
group answer     M     M     M      M     M      M      M      M    M    M    M    M    P    P   P     P     P     P     P     P     T    P
"""
"""A program that never ends is blamed on the policy: a backend ends it, and raises `SandboxTimeout` (`late`) if it cannot.
`judge answer` and `group answer` fail only for a correct answer, `judge always` and `group always` for any. `parse`, `show` and
`opening` are not coroutines, so they cannot hang. `ctrlc` is a KeyboardInterrupt that the code raises. A learner is not part of an
episode: its errors are infrastructure faults in every part."""

MCP = """
              unstartable ended gone late flood garbage refused internal busy wrong changed hangs
start             M         M    M    M     M      M       M       M      .     .      M      M
call              M         M    M    M     P      M       .       M      M     .      .      M
later call        M         M    .    M     P      M       .       M      M     .      .      M
"""
"""How an external MCP server can fail. `start`: at the handshake and the list of its tools. `busy` and `wrong` are failed calls whose text
reports an outage or does not; a call that the server rejects is an answer. A server that has lost its session before a call gets
another."""


def cells(table: str = TABLE) -> list[tuple[str, str, str]]:
    head, *rows = table.strip("\n").splitlines()
    kinds = head.split()
    assert table != TABLE or kinds == [*FAILURES]
    expectations = []
    for row in rows:
        outcomes = row.split()[-len(kinds) :]
        part = " ".join(row.split()[: -len(kinds)])
        for kind, outcome in zip(kinds, outcomes, strict=True):
            expectations.append((part, kind, outcome))
    return expectations


@dataclass
class Plant:
    """Raises one failure in one part."""

    part: str
    kind: str

    async def at(self, part: str) -> None:
        if part == self.part:
            self.now(part)

    def now(self, part: str) -> None:
        if part == self.part and (make := {**FAILURES, **LIKE_PANIC}[self.kind]) is not None:
            raise make()

    async def wait(self, part: str) -> None:
        if part == self.part and self.kind == "hangs":
            await asyncio.sleep(10**6)
        await self.at(part)


class Box(ScriptedSandbox):
    plant: Plant

    async def python(self, code: str, **options: Any) -> Any:
        await self.plant.wait("exec")
        return await super().python(code, **options)

    async def snapshot(self) -> bytes:
        await self.plant.wait("snapshot")
        return await super().snapshot()

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        await self.plant.wait("collect")
        return await super().read(path, max_bytes=max_bytes)

    async def close(self) -> None:
        await super().close()
        await self.plant.wait("close")


class Boxes(ScriptedSandboxes):
    def __init__(self, plant: Plant) -> None:
        super().__init__(printing("3"))
        self.plant = plant

    async def open(self, spec: Any, *, files: Any = None, snapshot: Any = None, timeout_s: float = 60.0) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                await self.plant.wait("open")
        except TimeoutError as error:  # like real backends
            raise SandboxTimeout("not opened in time") from error
        plain = await super().open(spec, files=files, snapshot=snapshot, timeout_s=timeout_s)
        box = self.opened[-1] = Box(plain.id, printing("3"), plain.files)
        box.plant = self.plant
        return box


PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "print(3)"}}</tool_call>'
TOOLS = '<tool_call>{"name": "host", "arguments": {}}</tool_call><tool_call>{"name": "inside", "arguments": {}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {"answer": "3"}}</tool_call>'


class Policy(ScriptedPolicy):
    plant: Plant

    async def generate(self, *arguments: Any, request_id: str, timeout_s: float) -> Any:
        await self.plant.wait("sample first" if request_id.endswith("-0") else "sample later" if request_id.endswith("-1") else "")
        return await super().generate(*arguments, request_id=request_id, timeout_s=timeout_s)


class PlantedTool:
    """A user-supplied tool, on the host or in the sandbox."""

    def __init__(self, name: str, needs_sandbox: bool) -> None:
        self.name, self.needs_sandbox = name, needs_sandbox
        self.schema = function_schema(name, "Looks.", "text", "anything")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        await PLANTED[-1].wait("inside tool" if self.needs_sandbox else "host tool")
        return ToolOutcome(output="seen", ok=True)


PLANTED: list[Plant] = []
host, inside = PlantedTool("host", False), PlantedTool("inside", True)


async def judge(task: Task, episode: Episode) -> Score:
    await PLANTED[-1].wait("judge always")
    if episode.answer == "3":
        await PLANTED[-1].wait("judge answer")
    return Score(value=float(episode.answer == "3"))


async def compare(task: Task, episodes: Sequence[Episode]) -> list[Score]:
    await PLANTED[-1].wait("group always")
    if any(episode.answer == "3" for episode in episodes):
        await PLANTED[-1].wait("group answer")
    return [Score(value=float(episode.answer == "3")) for episode in episodes]


class Shelf:
    """Checkpoints that store nothing."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant

    async def save_state(self, group: int, member: int, state: Any) -> None:
        await self.plant.at("keep")

    async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
        await self.plant.at("keep")

    async def load(self, group: int, member: int) -> None:
        await self.plant.at("keep")


def planted_chat(plant: Plant) -> Any:
    """A chat format whose template, tokenizer or parser fails."""
    chat = copy.copy(chat_of(TOKENIZER))

    class Planted(type(chat)):  # type: ignore[misc]
        def opening(self, *arguments: Any) -> Any:
            plant.now("opening")
            return super().opening(*arguments)

        def parse(self, *arguments: Any) -> Any:
            plant.now("parse")
            return super().parse(*arguments)

        def tool_delta(self, *arguments: Any) -> Any:
            plant.now("show")
            return super().tool_delta(*arguments)

    chat.__class__ = Planted
    return chat


TASK = replace(
    sample_task(),
    tools=("python", f"{__name__}:host", f"{__name__}:inside", "submit"),
    verifiers=(f"{__name__}:judge",),
    files={"a.csv": "x"},
    outputs=("a.csv",),
    limits=Limits(turns=4, turn_tokens=400, episode_tokens=4000, wall_s=200.0, tool_timeout_s=5.0),
)


async def played(plant: Plant) -> ScoredEpisode:
    policy = Policy.saying(TOKENIZER, PYTHON, TOOLS, SUBMIT)
    policy.plant = plant
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=Boxes(plant),
        agent=TurnLoop(chat=planted_chat(plant)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
        open_timeout_s=30.0,
        tools=RunTools(servers={}, bounds={}),
    )
    scorer = TaskScorer(max_retries=0, timeout_s=10.0)
    compared = GroupJudgeScorer(judge=compare, name="compare", weight=1.0, task_scorer=scorer) if plant.part.startswith("group") else None
    groups = GroupRunner(
        runner=runner,
        scorer=scorer,
        group_scoring=compared,
        slots=asyncio.Semaphore(1),
        group_size=1 if compared is None else 2,
        max_retries=0,
        checkpoints=Shelf(plant),
    )
    async with asyncio.timeout(2000):  # for parts that hang
        group = await groups.run_group(0, TASK)
    return group.episodes[0]


def outcome_of(scored: ScoredEpisode) -> str:
    blames = {failure.blame for failure in scored.episode.failures}
    assert (scored.score.value is None) == bool(blames - {Blame.POLICY} or scored.score.reason)
    if Blame.TASK in blames or scored.score.blame is Blame.TASK:
        return "T"
    if scored.score.value is None:
        return "M"
    return "." if scored.score.value == 1.0 and not blames else "P"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("part", dict.fromkeys(part for part, _, _ in cells()))
def test_every_planted_fault_has_the_right_blame(part: str) -> None:
    wrong = []
    for planted_part, kind, expected in cells():
        if planted_part != part or (kind == "hangs" and part in ("opening", "parse", "show")):
            continue
        for variant in (kind, *(LIKE_PANIC if kind == "panic" else ())):
            plant = Plant(part, variant)
            PLANTED.append(plant)
            scored = run_virtually(played(plant))
            if outcome_of(scored) != expected:
                wrong.append(f"{variant}: {outcome_of(scored)}, not {expected}: {scored.episode.failures} {scored.score}")
    assert not wrong, "\n".join(wrong)


LOOK = {"name": "look", "description": "Looks.", "inputSchema": {"type": "object"}}


class FailingTransport(Transport):
    """An external MCP server that fails at its start, or from its first or second call on; a lost session fails once."""

    def __init__(self, part: str, kind: str) -> None:
        self.part, self.kind = part, kind
        self.calls = 0

    async def request(self, messages: Sequence[str], until: int | None, *, begin: bool, sandbox: Sandbox | None, timeout_s: float) -> bytes:
        message = json.loads(messages[-1])
        at = "start"
        if message["method"] == "tools/call":
            self.calls += 1
            at = "call" if self.calls == 1 else "later call"
        due = at == self.part or (at == "later call" and self.part == "call")
        failing = self.kind if due and (self.kind != "gone" or self.calls < 3) else ""
        if failing == "hangs":
            await asyncio.sleep(10**6)
        if failing in ENDINGS and failing != "garbage":
            raise Unanswered(failing, "no answer")
        if failing == "garbage":
            return b"<html>"
        text = {"busy": "HTTP 503", "wrong": "no such page"}.get(failing, "seen")
        results: dict[str, dict[str, Any]] = {
            "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}},
            "tools/list": {"tools": [] if failing == "changed" else [LOOK]},
            "tools/call": {"content": [{"type": "text", "text": text}], "isError": text != "seen"},
        }
        codes = {"refused": -32602, "internal": -32603}
        error = {"error": {"code": codes[failing], "message": "no"}} if failing in codes else {"result": results[message["method"]]}
        return json.dumps({"jsonrpc": "2.0", "id": until, **error}).encode()

    async def close(self) -> None: ...


class MCPServer(Server):
    def transport(self) -> Transport:
        return FailingTransport(*self.name.split("/"))


async def played_with_mcp(part: str, kind: str) -> ScoredEpisode:
    look = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    server = MCPServer(name=f"{part}/{kind}", config=MCPConfig(url="http://127.0.0.1:9/"), root=Path(), offers=usable_tools([LOOK], ()))
    runner = EpisodeRunner(
        policy=ScriptedPolicy.saying(TOKENIZER, look, look, SUBMIT),
        sandboxes=ScriptedSandboxes(printing("3")),
        agent=TurnLoop(chat=chat_of(TOKENIZER)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=60.0,
        tools=RunTools(servers={"it": server}, bounds={}),
    )
    PLANTED.append(Plant("nowhere", "bug"))
    scorer = TaskScorer(max_retries=0, timeout_s=10.0)
    groups = GroupRunner(runner=runner, scorer=scorer, slots=asyncio.Semaphore(1), group_size=1, max_retries=0)
    (scored,) = (await groups.run_group(0, replace(TASK, tools=("mcp:it", "submit"), outputs=()))).episodes
    return scored


@pytest.mark.parametrize(("part", "kind", "expected"), cells(MCP))
def test_every_fault_of_an_mcp_server_has_the_right_blame(part: str, kind: str, expected: str) -> None:
    scored = run_virtually(played_with_mcp(part, kind))
    assert outcome_of(scored) == expected, f"{scored.episode.failures} {scored.score}"


def test_an_episode_without_a_fault_has_no_failure() -> None:
    PLANTED.append(Plant("nowhere", "bug"))
    assert outcome_of(run_virtually(played(PLANTED[-1]))) == "."


def test_infrastructure_errors_share_a_base_class() -> None:
    """Every infrastructure error in the table subclasses `InfrastructureError`, so unlisted subclasses are treated alike."""
    for kind in ("sandbox", "late", "server", "died", "refused", "judge", "learner", "store", "tool"):
        make = FAILURES[kind]
        assert make is not None and isinstance(make(), InfrastructureError)


# The failure for each kind of exception that propagates out of an episode.
class Unreachable(InfrastructureError):
    """An infrastructure fault of neither a sandbox nor the server."""


@pytest.mark.parametrize(
    ("error", "stage", "blame", "kind"),
    [
        (ServingError("x"), "generate", Blame.INFRASTRUCTURE, "ServingError"),
        (SandboxError("x"), "sandbox", Blame.INFRASTRUCTURE, "SandboxError"),
        (Unreachable("x"), "tool", Blame.INFRASTRUCTURE, "Unreachable"),
        (KeyError("x"), "tool", Blame.INFRASTRUCTURE, "KeyError"),
        (ExceptionGroup("g", [SandboxError("x")]), "sandbox", Blame.INFRASTRUCTURE, "SandboxError"),
        (PolicyFault("x"), "tool", Blame.POLICY, "not_taken"),
        (ExceptionGroup("g", [PolicyFault("x"), ServingError("y")]), "generate", Blame.INFRASTRUCTURE, "ServingError"),
        (TaskError("x"), "task", Blame.TASK, "TaskError"),
        (PluginError("x"), "task", Blame.TASK, "PluginError"),
        (ExceptionGroup("g", [ServingError("x"), TaskError("y")]), "task", Blame.TASK, "TaskError"),
    ],
)
def test_exception_types_decide_the_blame(error: Exception, stage: str, blame: Blame, kind: str) -> None:
    failure = failure_from_error(error, stage="tool", turn=3)
    assert (failure.stage, failure.blame, failure.kind, failure.turn) == (stage, blame, kind, 3)
    assert failure.retryable == (blame is Blame.INFRASTRUCTURE)


def test_only_a_bug_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(user_code, "log_unexpected", lambda what, error: reported.append((what, error)))
    bug = KeyError("x")
    for error in (ServingError("x"), SandboxError("x"), PolicyFault("x"), TaskError("x"), bug):
        failure_from_error(error, stage="tool")
    assert reported == [("episode (tool)", bug)]


def test_kinds_and_messages_are_truncated() -> None:
    kind = type("K" * 100, (Exception,), {})
    failure = task_fault(kind("x" * 5000))
    assert failure.kind == "K" * 64 and len(failure.message) == 2000 and failure.message.startswith("KKK")
    assert task_fault(UserError("a\nb", fix="c")).message == "a\nb\n  fix: c", "line breaks are preserved"
    assert infrastructure_fault("tool", "k", "m").turn is None
