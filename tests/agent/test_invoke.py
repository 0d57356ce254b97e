"""Misbehaving user-supplied tools: the agent gets an error, the episode is scored, and the run continues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ToolOutcome, invoke, load_tools
from agentrl.agent.invoke import call_tool
from agentrl.agent.tools import Tool, function_schema
from agentrl.errors import InfrastructureError, PluginError, SandboxError, TaskError, ToolUnavailable
from agentrl.protocols import Sandbox
from agentrl.records import Blame, EpisodeState, ExecResult, Limits, SandboxSpec, Task, codec
from agentrl.rollout import CaptureState
from agentrl.rollout.active import MAX_TOOL_FAILURES
from agentrl.sandbox import select_backend
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

LIMITS = Limits(tool_timeout_s=0.05, tool_output_chars=400)
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


class UserTool:
    """A user-supplied tool with a given behaviour."""

    def __init__(self, run: Callable[[Mapping[str, Any], Any], Awaitable[Any]], *, name: str = "own", needs_sandbox: bool = False) -> None:
        self.name, self.needs_sandbox, self.run = name, needs_sandbox, run
        self.schema = function_schema(name, "Does it.", "text", "any text")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> Any:
        return await self.run(arguments, sandbox)


async def calculate(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    left, right = arguments["text"].split("/")
    return ToolOutcome(output=str(int(left) / int(right)), ok=True)


calculator = UserTool(calculate, name="calculator")


def call_text(text: Any, name: str = "calculator") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'text': text}})}\n</tool_call>"


def with_tools(task: Task, *names: str) -> Task:
    limits = replace(task.limits, turns=30, episode_tokens=4000, tool_timeout_s=0.05)
    return replace(task, tools=(*(f"{__file__}:{name}" for name in names), "submit"), limits=limits)


async def test_an_exception_of_a_tool_is_an_error_for_the_agent_and_scored(
    tokenizer: Any, task: Task, make_runner: Any, caplog: Any
) -> None:
    policy = ScriptedPolicy.saying(tokenizer, call_text("1/0"), call_text(["a"]), call_text("6/3"), SUBMIT)
    episode = await make_runner(policy).run(with_tools(task, "calculator"), episode_id="e")
    (trajectory,) = episode.trajectories
    assert [turn.tool_results[0].output for turn in trajectory.turns] == [
        "error: calculator failed: ZeroDivisionError: division by zero",
        "error: calculator failed: AttributeError: 'list' object has no attribute 'split'",
        "2.0",
        "submitted",
    ]
    assert (episode.answer, trajectory.stop_reason, episode.left_out) == ("3", "submitted", False)
    first, second = episode.failures
    assert (first.stage, first.blame, first.kind, first.turn) == ("tool", Blame.POLICY, "ZeroDivisionError", 1)
    assert (second.kind, second.turn) == ("AttributeError", 2)
    assert "tool calculator: ZeroDivisionError" in caplog.text and "in calculate" in caplog.text


async def test_the_record_contains_only_the_first_failures(tokenizer: Any, task: Task, make_runner: Any) -> None:
    failing_policy = ScriptedPolicy(tokenizer, lambda turn, _: call_text("1/0") if turn < MAX_TOOL_FAILURES + 2 else SUBMIT)
    episode = await make_runner(failing_policy).run(with_tools(task, "calculator"), episode_id="e")
    assert episode.answer == "3" and [failure.turn for failure in episode.failures] == list(range(1, MAX_TOOL_FAILURES + 1))


async def test_tool_failures_survive_a_resume_but_are_not_inherited_by_a_branch(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states: list[EpisodeState] = []

    async def on_turn(turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None
        states.append(codec.from_json(EpisodeState, codec.to_json(state)))

    tool_task, completions = with_tools(task, "calculator"), (call_text("1/0"), SUBMIT)
    await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(tool_task, episode_id="e", on_turn=on_turn)
    for episode_id, kinds in (("e", ["ZeroDivisionError"]), ("branch", [])):
        resumed = await make_runner(ScriptedPolicy.saying(tokenizer, *completions)).run(tool_task, episode_id=episode_id, start=states[0])
        assert [failure.kind for failure in resumed.failures] == kinds and resumed.answer == "3"


def raising(error: BaseException) -> UserTool:
    async def raise_error(arguments: Mapping[str, Any], sandbox: Any) -> Any:
        raise error

    return UserTool(raise_error)


def returning(value: Any) -> UserTool:
    async def return_value(arguments: Mapping[str, Any], sandbox: Any) -> Any:
        return value() if callable(value) else value

    return UserTool(return_value)


async def deep(arguments: Mapping[str, Any], sandbox: Any) -> Any:
    return await deep(arguments, sandbox)


async def hang(arguments: Mapping[str, Any], sandbox: Any) -> Any:
    await asyncio.sleep(60)


async def bytes_out(arguments: Mapping[str, Any], sandbox: Any) -> Any:
    return ToolOutcome(output=b"", ok=True)  # type: ignore[arg-type]


async def number_out(arguments: Mapping[str, Any], sandbox: Any) -> Any:
    return ToolOutcome(output="", ok=True, answer=3)  # type: ignore[arg-type]


class NotAwaited(UserTool):
    def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> Any:
        return ToolOutcome(output="", ok=True)


@pytest.mark.parametrize(
    ("tool", "kind", "output"),
    [
        (raising(SystemExit(2)), "SystemExit", "error: own failed: SystemExit: 2"),
        (raising(MemoryError()), "MemoryError", "error: own failed: MemoryError"),
        (raising(asyncio.CancelledError()), "CancelledError", "error: own failed: CancelledError"),
        (raising(KeyError("\x1b[2J\ud800" + "x" * 9000)), "KeyError", "error: own failed: KeyError: '\\x1b[2J\\ud800xx"),
        (raising(KeyError(10**5000)), "KeyError", "error: own failed: KeyError: (its text cannot be shown)"),
        (raising(ExceptionGroup("g", [KeyError("x")])), "ExceptionGroup", "error: own failed: KeyError: 'x'"),
        (UserTool(deep), "RecursionError", "error: own failed: RecursionError"),
        (UserTool(hang), "tool_timeout", "error: own gave no result within 0.05 s"),
        (returning(None), "wrong_outcome", "error: own failed: it returned NoneType, not a ToolOutcome"),
        (UserTool(bytes_out), "ValueError", "error: own failed: ValueError: ToolOutcome.output: must be text, got bytes"),
        (UserTool(number_out), "ValueError", "error: own failed: ValueError: ToolOutcome.answer: must be text, got int"),
        (returning(ToolOutcome(output="", ok=True, answer="x" * 2_000_000)), "wrong_outcome", "error: own failed: its answer has 2000000 "),
        (NotAwaited(hang), "TypeError", "error: own failed: TypeError: object ToolOutcome can't be used in 'await'"),
    ],
)
async def test_every_failure_of_a_tool_is_an_error_for_the_agent(tool: UserTool, kind: str, output: str) -> None:
    result = await call_tool(tool, {}, None, LIMITS, turn=4)
    assert result.failure is not None and result.failure.kind == kind and result.failure.blame is Blame.POLICY
    assert result.outcome.output.startswith(output) and not result.outcome.ok and result.outcome.answer is None
    for text in (result.outcome.output, result.failure.message):
        assert len(text) < 600 and text.isprintable() and text.encode()
    assert len(asyncio.all_tasks()) == 1


async def test_the_output_of_a_tool_is_clipped() -> None:
    result = await call_tool(returning(ToolOutcome(output="a" * 3_000_000 + "\ud83d", ok=True, answer="b\ud83d")), {}, None, LIMITS, turn=1)
    assert result.failure is None and result.outcome.ok is True and result.outcome.answer == "b\ufffd"
    assert len(result.outcome.output) < 500 and "characters cut" in result.outcome.output and result.outcome.output.endswith("a\ufffd")


OUTAGES = [ConnectionRefusedError(111, "Connection refused"), TimeoutError("at the bank"), RuntimeError("503 Service Unavailable")]


@pytest.mark.parametrize("error", [*OUTAGES, ExceptionGroup("g", [KeyError("x"), OUTAGES[0]])])
async def test_an_outage_of_a_tools_dependency_is_not_blamed_on_the_policy(error: Exception) -> None:
    with pytest.raises(ToolUnavailable, match=r"tool own: .*\n  fix: "):
        await call_tool(raising(error), {"text": "a"}, None, LIMITS, turn=1)
    result = await call_tool(raising(error), {"url": "http://10.0.0.1/"}, None, LIMITS, turn=1)
    assert result.failure is not None and result.failure.blame is Blame.POLICY, "the agent chose the address"


@pytest.mark.parametrize("error", [SandboxError("gone"), InfrastructureError("no licence server"), TaskError("no data"), PluginError("?")])
async def test_typed_errors_are_raised_unchanged(error: Exception, tokenizer: Any, task: Task, make_runner: Any) -> None:
    for tool_error in (error, ExceptionGroup("g", [KeyError(), error])):
        with pytest.raises(type(error)):
            await call_tool(raising(tool_error), {}, None, LIMITS, turn=1)


class SlowBoxes(ScriptedSandboxes):
    """A backend whose sandboxes need a second per program and raise SandboxError after a call that was cut short, as real ones do."""

    async def open(self, *args: Any, **options: Any) -> Any:
        sandbox = await super().open(*args, **options)
        run_program = sandbox.python

        async def run_slowly(code: str, **options: Any) -> ExecResult:
            if code == "quick":
                return await run_program(code, **options)
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                sandbox.closed = True
                raise
            return await run_program(code, **options)

        sandbox.python = run_slowly  # type: ignore[method-assign]
        return sandbox


async def patient(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    await sandbox.python("slow", timeout_s=60.0)
    raise AssertionError("the deadline passes before")


async def impatient(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    try:
        async with asyncio.timeout(0.01):
            await sandbox.python("slow", timeout_s=60.0)
    except TimeoutError:
        pass
    return ToolOutcome(output="it takes too long", ok=False)


async def idle(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    await sandbox.python("quick", timeout_s=60.0)
    await asyncio.sleep(60)
    raise AssertionError("the deadline passes before")


in_the_box, cut_short, idles = (UserTool(run, name=run.__name__, needs_sandbox=True) for run in (patient, impatient, idle))


@pytest.mark.parametrize(
    ("name", "output", "kind"),
    [
        ("in_the_box", "error: patient gave no result within 0.1 s", "tool_timeout"),
        ("cut_short", "it takes too long", "sandbox_abandoned"),
    ],
)
async def test_a_tool_that_is_cancelled_in_its_sandbox_ends_the_episode_with_a_score(
    name: str, output: str, kind: str, tokenizer: Any, task: Task, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is unusable. If the next call's error were an infrastructure failure, an agent could discard episodes with a tool."""
    monkeypatch.setattr(invoke, "SANDBOX_MARGIN_S", 0.05)
    sandboxes = SlowBoxes(printing(""))
    policy = ScriptedPolicy.saying(tokenizer, call_text("x", {"in_the_box": "patient"}.get(name, "impatient")), SUBMIT)
    episode = await make_runner(policy, sandboxes).run(replace(with_tools(task, name), outputs=("*.csv",)), episode_id="e")
    (trajectory,) = episode.trajectories
    assert trajectory.turns[0].tool_results[0].output == output
    assert (trajectory.stop_reason, len(trajectory.turns), episode.answer, episode.left_out) == ("tool_timeout", 1, None, False)
    assert [(failure.stage, failure.blame, failure.kind) for failure in episode.failures] == [("tool", Blame.POLICY, kind)]
    assert episode.outputs == {} and sandboxes.opened[0].closed


async def test_a_tool_that_hangs_outside_of_its_sandbox_leaves_it_usable(
    tokenizer: Any, task: Task, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoke, "SANDBOX_MARGIN_S", 0.05)
    policy = ScriptedPolicy.saying(tokenizer, call_text("x", "idle"), SUBMIT)
    episode = await make_runner(policy, SlowBoxes(printing(""))).run(replace(with_tools(task, "idles"), outputs=("a.csv",)), episode_id="e")
    assert (episode.trajectories[0].stop_reason, episode.answer, episode.outputs) == ("submitted", "3", {"a.csv": b"x\n1\n"})
    assert [failure.kind for failure in episode.failures] == ["tool_timeout"]


async def sleep(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    await sandbox.exec(["sleep", "30"], timeout_s=60.0)
    raise AssertionError("the deadline passes before")


async def lists(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    await sandbox.write("note", b"seen")
    content = (await sandbox.read("note", max_bytes=10)).decode()
    return ToolOutcome(output=content + (await sandbox.exec(["ls"], timeout_s=5.0)).stdout, ok=True)


sleeps_inside, lists_files = UserTool(sleep, name="sleepy", needs_sandbox=True), UserTool(lists, name="lists", needs_sandbox=True)


@pytest.mark.bubblewrap
async def test_tools_in_a_sandbox(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool works in a real sandbox; a tool that is cancelled in it ends the episode with a typed outcome and leaves nothing behind."""
    monkeypatch.setattr(invoke, "SANDBOX_MARGIN_S", 2.0)
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    policy = ScriptedPolicy.saying(tokenizer, call_text("x", "lists"), call_text("x", "sleepy"), SUBMIT)
    tool_task = replace(with_tools(task, "lists_files", "sleeps_inside"), sandbox=SandboxSpec(image="image"), outputs=("a.csv",))
    try:
        episode = await make_runner(policy, backend).run(tool_task, episode_id="e")
        assert backend._open == {}
    finally:
        await backend.close()
    (trajectory,) = episode.trajectories
    assert [turn.tool_results[0].output for turn in trajectory.turns] == [
        "seena.csv\nnote\n",
        "error: sleepy gave no result within 2.05 s",
    ]
    assert (trajectory.stop_reason, episode.left_out, episode.outputs) == ("tool_timeout", False, {})
    assert [(failure.blame, failure.kind) for failure in episode.failures] == [(Blame.POLICY, "tool_timeout")]


async def hides(arguments: Mapping[str, Any], sandbox: Any) -> ToolOutcome:
    try:
        await sandbox.read(arguments["text"], max_bytes=10)
    except Exception as error:
        return ToolOutcome(output=f"cannot read: {error}", ok=False)
    return ToolOutcome(output="read", ok=True)


@pytest.mark.parametrize(
    ("error", "hidden"),
    [
        (SandboxError("gone"), False),
        (OSError("disk"), False),
        (KeyError("id"), False),
        (ValueError("a link"), True),
        (TypeError("a dict"), True),
    ],
)
async def test_a_tool_cannot_hide_a_failure_of_the_sandbox(error: Exception, hidden: bool) -> None:
    sandbox = await ScriptedSandboxes(printing("")).open(SandboxSpec(image="none"))

    async def read(path: str, *, max_bytes: int) -> bytes:
        raise error

    sandbox.read = read  # type: ignore[method-assign]
    tool_call = call_tool(UserTool(hides, needs_sandbox=True), {"text": "a"}, sandbox, LIMITS, turn=1)
    if hidden:
        result = await tool_call
        assert result.failure is None and result.outcome.output.startswith("cannot read")
    else:
        with pytest.raises(type(error)):
            await tool_call


class Class:
    name = "c"


def changed(**attributes: Any) -> Any:
    tool = UserTool(hang)
    for name, value in attributes.items():
        setattr(tool, name, value)
    return tool


no_schema = UserTool(hang)
del no_schema.schema
numeric_name = changed(name=3)
vague = changed(needs_sandbox="no")
list_schema = changed(schema=["own"])
nan_schema = changed(schema={"type": "function", "function": {"name": "own"}, "x": float("nan")})
other_name = changed(name="mine")
no_tool = 3
same_name: Tool = UserTool(hang)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Class", "is a class: refer to an object, such as search = Class()"),
        ("no_tool", "cannot be called"),
        ("no_schema", "has no name, needs_sandbox or schema"),
        ("numeric_name", "has the name 3"),
        ("vague", "needs_sandbox='no'"),
        ("list_schema", "has an invalid OpenAI function schema"),
        ("nan_schema", "has an invalid OpenAI function schema"),
        ("other_name", "has the name 'mine', but 'own' in its schema"),
    ],
)
def test_an_invalid_tool_raises_with_its_name(name: str, message: str) -> None:
    with pytest.raises(PluginError) as error:
        load_tools((f"{__file__}:{name}", "submit"))
    assert (
        message in str(error.value)
        and f":{name}'" in str(error.value)
        and "fix: use a function with the decorator @tool" in str(error.value)
    )


def test_two_tools_with_the_same_name_raise() -> None:
    assert load_tools((f"{__file__}:same_name",)).keys() == {"own"}
    with pytest.raises(TaskError, match="are named 'submit'"):
        load_tools(("submit", "submit"))
