from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import SandboxError, SandboxUnavailable, ServingError, UserError
from agentrl.records import Blame, EpisodeState, ExecResult, Limits, Task
from agentrl.rollout.pace import OutOfTime
from agentrl.task.outputs import CollectedOutputs
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.sandboxes import printing

PYTHON = '<tool_call>\n{"name": "python", "arguments": {"code": "print(3)"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


async def test_act_observe_submit(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT)
    sandboxes = ScriptedSandboxes(printing("3\n"))
    episode = await make_runner(policy, sandboxes).run(task, episode_id="e")
    (trajectory,) = episode.trajectories
    assert (episode.answer, trajectory.stop_reason, episode.failures) == ("3", "submitted", ())
    assert [r.output for u in trajectory.turns for r in u.tool_results] == ["3", "submitted"]
    assert sandboxes.opened[0].files == {"a.csv": b"x\n1\n"} and sandboxes.opened[0].closed


async def test_prompts_are_the_exact_ids_of_the_turns_before(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = ScriptedPolicy.saying(tokenizer, PYTHON, PYTHON, SUBMIT)
    episode = await make_runner(policy).run(task, episode_id="e")
    context: tuple[int, ...] = ()
    for prompt, turn in zip(policy.prompts, episode.trajectories[0].turns, strict=True):
        context += turn.prompt_ids
        assert prompt == context
        context += turn.completion_ids


async def test_the_router_gets_the_task_and_encloses_all_requests_of_an_episode(tokenizer: Any, task: Task, make_runner: Any) -> None:
    heard: list[str] = []

    @contextmanager
    def hosted(episode_id: str, task_key: str) -> Iterator[None]:
        heard.append(f"begin {episode_id} {task_key == task.key}")
        yield
        heard.append(f"end {episode_id}")

    class Heard(ScriptedPolicy):
        async def generate(self, prompt_ids: Any, params: Any, *, request_id: str, timeout_s: float) -> Any:
            heard.append(request_id)
            if request_id == "x-y-1":
                raise ServingError("it died")
            return await super().generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)

    runner = replace(make_runner(Heard(tokenizer, lambda *_: PYTHON)), router=SimpleNamespace(episode=hosted))
    episode = await runner.run(task, episode_id="x-y")
    assert episode.left_out and heard == ["begin x-y True", "x-y-0", "x-y-1", "end x-y"]


async def test_no_sandbox_is_opened_for_an_agent_that_never_runs_code(tokenizer: Any, task: Task, make_runner: Any) -> None:
    sandboxes = ScriptedSandboxes(printing(""))
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, SUBMIT), sandboxes).run(task, episode_id="e")
    assert episode.answer == "3" and sandboxes.opened == []


async def test_a_malformed_call_is_answered_and_the_episode_continues(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = ScriptedPolicy.saying(tokenizer, "<tool_call>{</tool_call>", '<tool_call>{"name": "ls"}</tool_call>', SUBMIT)
    episode = await make_runner(policy).run(task, episode_id="e")
    outputs = [r.output for u in episode.trajectories[0].turns for r in u.tool_results]
    assert "not valid JSON" in outputs[0] and "no tool 'ls'" in outputs[1]
    assert episode.answer == "3"


async def test_limits_end_the_episode_without_blame(tokenizer: Any, task: Task, make_runner: Any) -> None:
    turns = await make_runner(ScriptedPolicy(tokenizer, lambda *_: PYTHON)).run(task, episode_id="e")
    assert (turns.trajectories[0].stop_reason, len(turns.trajectories[0].turns), turns.left_out) == ("turn_limit", 3, False)
    short = replace(task, limits=Limits(turn_tokens=10))
    cut = await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON)).run(short, episode_id="e")
    assert (cut.trajectories[0].stop_reason, cut.trajectories[0].turns[0].finish_reason) == ("token_limit", "length")
    plain = await make_runner(ScriptedPolicy.saying(tokenizer, "three")).run(task, episode_id="e")
    assert (plain.trajectories[0].stop_reason, plain.answer) == ("answered", None)


async def test_the_agent_sees_programs_that_fail_or_hang(tokenizer: Any, task: Task, make_runner: Any) -> None:
    late = ScriptedSandboxes(lambda _: ExecResult(exit_code=None, stdout="a" * 9000, stderr="", wall_s=1.0, reason="timeout"))
    episode = await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), late).run(task, episode_id="e")
    (result,) = episode.trajectories[0].turns[0].tool_results
    assert not result.ok and "timed out" in result.output and "characters cut" in result.output
    assert len(result.output) < 2100 and episode.failures == ()


async def test_tool_output_of_an_episode_is_bounded(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """60 characters per call, 100 per episode: the second call is cut to the rest, the third shows nothing."""
    limits = replace(task.limits, turns=4, tool_output_chars=60, episode_output_chars=100)
    policy = ScriptedPolicy.saying(tokenizer, PYTHON, PYTHON, "<tool_call>{</tool_call>", SUBMIT)
    sandboxes = ScriptedSandboxes(printing("a" * 30 + "b" * 30))
    episode = await make_runner(policy, sandboxes).run(replace(task, limits=limits), episode_id="e")
    first, second, third, last = (u.tool_results[0].output for u in episode.trajectories[0].turns)
    assert first == "a" * 30 + "b" * 30
    assert second == "a" * 20 + "\n... 20 characters cut: this episode's output is used up ...\n" + "b" * 20
    assert third.startswith("... not shown, ") and "error" not in third
    assert "not shown, 9 characters" in last and episode.answer == "3", "the agent's answer still counts"


async def test_the_default_bound_on_tool_output_is_generous(tokenizer: Any, task: Task, make_runner: Any) -> None:
    assert Limits(tool_output_chars=50).all_output_chars == 1000
    low_limit_task = replace(task, limits=replace(task.limits, episode_output_chars=1))
    runner = make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), ScriptedSandboxes(printing("ab")))
    episode = await runner.run(low_limit_task, episode_id="e")
    assert episode.trajectories[0].turns[0].tool_results[0].output.startswith("a\n... 1 characters cut")
    with pytest.raises(ValueError, match="episode_output_chars must be positive"):
        Limits(episode_output_chars=0)


async def test_task_faults_are_blamed_on_the_task(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class NoImage(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            raise UserError("image.toml: no such suite", fix="name a suite")

    class NoRoom(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            raise ValueError("no room for a.csv")

    broken = [
        (replace(task, tools=("pyhton",)), None, "unknown tool 'pyhton'"),
        (replace(task, tools=("nowhere:tool",)), None, "nowhere"),
        (replace(task, limits=Limits(episode_tokens=5)), None, "the limit for prompt and answer is 5\n  fix: shorten the prompt, or"),
        (task, NoImage(printing("")), "no such suite\n  fix: name a suite"),
        (task, NoRoom(printing("")), "no room for a.csv"),
    ]
    for bad, sandboxes, message in broken:
        episode = await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON), sandboxes).run(bad, episode_id="e")
        (failure,) = episode.failures
        assert (failure.blame, failure.stage, failure.retryable, episode.left_out) == (Blame.TASK, "task", False, True)
        assert message in failure.message


async def test_a_machine_without_sandboxes_is_not_blamed_on_the_task(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Nowhere(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            raise SandboxUnavailable("no runtime runsc")

    with pytest.raises(SandboxUnavailable):
        await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON), Nowhere(printing(""))).run(task, episode_id="e")


async def test_infrastructure_faults_are_blamed_on_the_infrastructure(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def dead_server(turn: int, episode: str) -> str:
        raise ServingError("connection refused")

    def dead_sandbox(code: str) -> ExecResult:
        raise SandboxError("daemon is gone")

    served = await make_runner(ScriptedPolicy(tokenizer, dead_server)).run(task, episode_id="e")
    boxed = await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON), ScriptedSandboxes(dead_sandbox)).run(task, episode_id="e")
    for episode, stage in ((served, "generate"), (boxed, "sandbox")):
        assert episode.left_out and episode.answer is None
        assert (episode.failures[0].stage, episode.failures[0].blame) == (stage, Blame.INFRASTRUCTURE)


async def test_a_server_that_hangs_is_not_blamed_on_the_policy(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Hanging(ScriptedPolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(60)

    hurried = replace(task, limits=Limits(wall_s=0.5))
    episode = await make_runner(Hanging.saying(tokenizer, "")).run(hurried, episode_id="e")
    assert (episode.failures[0].kind, episode.left_out) == ("wall_limit", True)


async def test_declared_outputs_are_collected_after_the_last_action(tokenizer: Any, task: Task, make_runner: Any) -> None:
    sandboxes = ScriptedSandboxes(printing("3\n"))
    runner = make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), sandboxes)
    episode = await runner.run(replace(task, outputs=("a.csv", "b.csv")), episode_id="e")
    assert episode.outputs == {"a.csv": b"x\n1\n"} and episode.failures == () and sandboxes.opened[0].closed


async def test_the_outputs_of_an_agent_that_ran_nothing_are_the_tasks_files(tokenizer: Any, task: Task, make_runner: Any) -> None:
    sandboxes = ScriptedSandboxes(printing(""))
    runner = make_runner(ScriptedPolicy.saying(tokenizer, SUBMIT), sandboxes)
    episode = await runner.run(replace(task, outputs=("*.csv", "new.txt")), episode_id="e")
    assert episode.outputs == {"a.csv": b"x\n1\n"} and sandboxes.opened == []


async def test_outputs_that_cannot_be_collected_are_blamed_on_the_policy(tokenizer: Any, task: Task, make_runner: Any) -> None:
    runner = make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), ScriptedSandboxes(printing("no list\n")))
    episode = await runner.run(replace(task, outputs=("a.csv", "src/*")), episode_id="e")
    (failure,) = episode.failures
    assert (failure.stage, failure.blame, failure.kind) == ("collect", Blame.POLICY, "outputs_refused")
    assert episode.outputs == {"a.csv": b"x\n1\n"} and not episode.left_out and "src/*" in failure.message


async def test_a_sandbox_that_dies_before_collecting_is_an_infrastructure_fault(tokenizer: Any, task: Task, make_runner: Any) -> None:
    sandboxes = ScriptedSandboxes(printing("3\n"))

    def script(turn: int, episode_id: str) -> str:
        if turn == 1:
            sandboxes.opened[0].closed = True
        return (PYTHON, SUBMIT)[turn]

    episode = await make_runner(ScriptedPolicy(tokenizer, script), sandboxes).run(replace(task, outputs=("*",)), episode_id="e")
    assert episode.left_out and episode.failures[0].blame is Blame.INFRASTRUCTURE and episode.outputs == {}
    assert episode.trajectories[0].stop_reason == "failed"


class Acting:
    """An agent that sleeps, and needs some time to end."""

    def __init__(self, rests_s: float, closes_s: float = 0.0) -> None:
        self.rests_s, self.closes_s, self.closed = rests_s, closes_s, False

    async def act(self, episode: Any) -> str:
        try:
            await asyncio.sleep(self.rests_s)
        finally:
            await asyncio.sleep(self.closes_s)
            self.closed = True
        return "answered"


def test_an_agent_has_its_full_time_plus_time_to_close_its_tools(tokenizer: Any, task: Task, make_runner: Any) -> None:
    bounded = replace(task, limits=replace(task.limits, wall_s=60.0, tool_timeout_s=10.0))

    def played(agent: Acting) -> Any:
        runner = replace(make_runner(ScriptedPolicy.saying(tokenizer, "")), agent=agent)
        return run_virtually(runner.run(bounded, episode_id="e"))

    assert played(Acting(59.0)).trajectories[0].stop_reason == "answered"
    closing = Acting(1000.0, closes_s=11.0)
    assert played(closing).trajectories[0].stop_reason == "wall_limit" and closing.closed


def test_a_continued_episode_has_its_remaining_time(tokenizer: Any, task: Task, make_runner: Any) -> None:
    states: list[EpisodeState] = []

    async def keep(turn: int, capture: Any) -> None:
        states.append(await capture())

    def continued(spent_s: float, rests_s: float) -> str:
        runner = replace(make_runner(ScriptedPolicy.saying(tokenizer, "")), agent=Acting(rests_s))
        start = replace(states[0], wall_s=spent_s)
        return str(run_virtually(runner.run(task, episode_id="e", start=start)).trajectories[0].stop_reason)

    asyncio.run(make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT)).run(task, episode_id="e", on_turn=keep))
    assert [continued(50.0, rests_s) for rests_s in (9.0, 11.0)] == ["answered", "wall_limit"]
    assert [continued(spent_s, 0.5) for spent_s in (60.0, 70.0)] == ["wall_limit", "wall_limit"]


async def test_the_caller_gets_the_running_episode(tokenizer: Any, task: Task, make_runner: Any) -> None:
    begun: list[str] = []
    await make_runner(ScriptedPolicy.saying(tokenizer, SUBMIT)).run(task, episode_id="e", on_start=lambda episode: begun.append(episode.id))
    assert begun == ["e"]


async def test_a_bug_at_the_end_of_the_time_is_a_bug(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Failing(Acting):
        async def act(self, episode: Any) -> str:
            raise ExceptionGroup("g", [OutOfTime("no time"), KeyError("bug")])

    episode = await replace(make_runner(ScriptedPolicy.saying(tokenizer, "")), agent=Failing(0.0)).run(task, episode_id="e")
    assert episode.trajectories[0].stop_reason == "failed" and episode.failures[0].blame is Blame.INFRASTRUCTURE


async def test_a_first_attempt_opens_its_sandbox_within_a_minute(tokenizer: Any, task: Task, make_runner: Any) -> None:
    waited: list[float] = []

    class Opening(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            waited.append(options["timeout_s"])
            return await super().open(*args, **options)

    episode = await make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), Opening(printing(""))).run(task, episode_id="e")
    assert waited == [60.0] and episode.attempt == 0


async def test_collecting_takes_sandbox_time_and_its_failure_is_cut(
    tokenizer: Any, task: Task, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(sandbox: Any, outputs: Any) -> CollectedOutputs:
        await asyncio.sleep(0.1)
        return CollectedOutputs(files={}, refused={"a": "x" * 5000})

    monkeypatch.setattr("agentrl.rollout.episode.collect_outputs", slowly)
    runner = make_runner(ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT))
    episode = await runner.run(replace(task, outputs=("a",)), episode_id="e")
    assert 0.1 <= episode.sandbox_s <= episode.wall_s
    assert episode.failures[0].message == "a: " + "x" * 1997
