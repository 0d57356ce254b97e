"""A retry after a policy-reachable fault repeats the actions. A recurring fault is blamed on the policy if other groups have none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import SandboxError
from agentrl.records import Blame, Completion, Episode, ExecResult, Failure, Score, Task
from agentrl.rollout import GroupRunner
from agentrl.rollout.repeats import GENERATE, MIN_OTHERS, PROVOKED, SANDBOX, FaultHistory, SampledTurns
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.clock import run_virtually

PYTHON = '{number}<tool_call>{{"name": "python", "arguments": {{"code": "print({number})"}}}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {"answer": "3"}}</tool_call>'
FAULT = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="SandboxError", message="gone", turn=1)


class Counting(ScriptedPolicy):
    """Samples a different program in each request, so that a repeated one differs from a new one."""

    def __init__(self, tokenizer: Any) -> None:
        self.requests = 0
        super().__init__(tokenizer, self._next)

    def _next(self, turn: int, episode: str) -> str:
        self.requests += 1
        return SUBMIT if turn else PYTHON.format(number=self.requests)


async def graded(task: Task, episode: Episode) -> Score:
    return Score(value=1.0 if episode.answer == "3" else 0.0)


def failing(times: int) -> ScriptedSandboxes:
    """Sandboxes whose first `times` programs end the exec server."""
    ran: list[str] = []

    def answer(code: str) -> ExecResult:
        ran.append(code)
        if len(ran) <= times:
            raise SandboxError("the exec server ended")
        return ExecResult(exit_code=0, stdout=" ".join(ran), stderr="", wall_s=0.0)

    return ScriptedSandboxes(answer)


def groups_of(runner: Any, **changes: Any) -> GroupRunner:
    return replace(GroupRunner(runner=runner, scorer=graded, slots=asyncio.Semaphore(8), group_size=1), **changes)


def test_an_infrastructure_fault_changes_no_sampled_token(tokenizer: Any, task: Task, make_runner: Any) -> None:
    policy = Counting(tokenizer)
    group = run_virtually(groups_of(make_runner(policy, failing(2))).run_group(0, task))
    (scored,) = group.scored
    turns = scored.episode.trajectories[0].turns
    assert (scored.episode.attempt, policy.requests) == (2, 2), "three attempts, and one request for each of the two turns"
    assert turns[0].tool_results[0].output.split()[:3] == ["print(1)"] * 3, "all attempts ran the first one's program"


def test_a_fault_before_the_first_turn_leaves_nothing_to_repeat(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Busy(Counting):
        def _next(self, turn: int, episode: str) -> str:
            text = super()._next(turn, episode)
            if episode.endswith("-a0"):
                raise ConnectionResetError("busy")
            return text

    policy = Busy(tokenizer)
    group = run_virtually(groups_of(make_runner(policy)).run_group(0, task))
    assert len(group.scored) == 1 and policy.requests == 3


def test_a_fault_without_evidence_from_other_groups_is_excluded(tokenizer: Any, task: Task, make_runner: Any) -> None:
    group = run_virtually(groups_of(make_runner(Counting(tokenizer), failing(99))).run_group(0, task))
    assert group.scored == () and group.episodes[0].episode.failures[-1].blame is Blame.INFRASTRUCTURE


@pytest.mark.parametrize("spare", [0, 1])
def test_a_fault_that_the_actions_provoke_is_scored_at_most_like_the_worst_sibling(
    spare: int, tokenizer: Any, task: Task, make_runner: Any
) -> None:
    """An attempt of group 0 ends its exec server. Wrong answers score -1, and no answer scores 0. Spare attempts change nothing."""

    def script(turn: int, episode: str) -> str:
        bad = episode.startswith("g000000-1")
        return PYTHON.format(number=7 if bad else 1) if not turn else SUBMIT.replace("3", "4")

    class Slow(ScriptedPolicy):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(1.0)
            return await super().generate(*arguments, **options)

    def answer(code: str) -> ExecResult:
        if "7" in code:
            raise SandboxError("the exec server ended")
        return ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0)

    async def negative(task: Task, episode: Episode) -> Score:
        return Score(value=0.0 if episode.answer is None else -1.0)

    groups = groups_of(
        make_runner(Slow(tokenizer, script), ScriptedSandboxes(answer)), group_size=4 - spare, spare_attempts=spare, scorer=negative
    )

    async def played() -> Any:
        return (await asyncio.gather(*(groups.run_group(index, task) for index in range(4))))[0]

    group = run_virtually(played())
    assert [scored.score.value for scored in group.scored] == [-1.0] * 4 and group.cancelled == ()
    (failure,) = group.episodes[1].episode.failures
    assert (failure.blame, failure.kind, failure.stage) == (Blame.POLICY, PROVOKED, "sandbox")
    assert "SandboxError ended 3 attempts that repeated the same actions, and in the same period 0 of" in failure.message


def history(*others: Failure | str, group: str = "other") -> FaultHistory:
    """Returns the history of a fault, and then one event of each other episode: its fault, or the part that it used."""
    record = FaultHistory()
    record.record_fault("own", "own 0", FAULT)
    for number, event in enumerate(others):
        if isinstance(event, Failure):
            record.record_fault(group, f"{group} {number}", event)
        else:
            record.record_use(group, f"{group} {number}", event)
    return record


USED = (SANDBOX,) * MIN_OTHERS
SAMPLED = (GENERATE,) * MIN_OTHERS
UNREADABLE = replace(FAULT, stage="generate", kind="OverflowError")


@pytest.mark.parametrize(
    ("faults", "record", "blamed"),
    [
        ([FAULT] * 3, history(*USED), True),
        ([FAULT] * 2, history(*USED), False),  # one repetition
        ([FAULT] * 3, history(*USED[1:]), False),  # too few others
        ([FAULT] * 3, history(*SAMPLED), False),  # others did not use a sandbox
        ([UNREADABLE] * 3, history(*SAMPLED), True),
        ([FAULT] * 3, history(*USED, group="own"), False),
        ([FAULT] * 3, history(*USED, FAULT), False),  # another episode had the fault too
        ([FAULT] * 3, history(*USED * 3, FAULT), True),  # the fault is rare
        ([FAULT] * 3, history(*USED, replace(FAULT, kind="SandboxTimeout")), True),
        ([FAULT, FAULT, replace(FAULT, kind="SandboxTimeout")], history(*USED), False),
        ([replace(FAULT, turn=0)] * 3, history(*USED), False),
        ([replace(FAULT, kind="ServerDied")] * 3, history(*USED), False),
        ([replace(FAULT, stage="tool")] * 3, history(*USED, *SAMPLED), False),
        ([replace(FAULT, stage="score")] * 3, history(*USED, *SAMPLED), False),
    ],
)
def test_the_evidence_that_blames_the_policy(faults: list[Failure], record: FaultHistory, blamed: bool) -> None:
    provoked = record.provoked(faults, "own", since=1)
    assert (provoked is not None and provoked.blame is Blame.POLICY) == blamed


def test_only_uses_after_the_first_fault_are_evidence() -> None:
    record = FaultHistory()
    for number in range(MIN_OTHERS):
        record.record_use("other", str(number), SANDBOX)
    record.record_fault("own", "own 0", FAULT)
    since = record.events
    assert record.provoked([FAULT] * 3, "own", since=since) is None
    for number in range(MIN_OTHERS):
        record.record_use("other", str(number), SANDBOX)
    assert record.provoked([FAULT] * 3, "own", since=since) is not None


def test_several_uses_of_one_episode_count_once() -> None:
    record = history()
    for _ in range(100):
        record.record_use("other", "0", SANDBOX)
    assert record.provoked([FAULT] * 3, "own", since=1) is None


def test_agents_with_the_same_context_repeat_their_own_completions() -> None:
    sampled, context = SampledTurns(), [1, 2, 3]
    first, second = (Completion(token_ids=(n,), logprobs=(-1.0,), versions=(), finish_reason="stop") for n in (4, 5))
    for completion in (first, second):
        assert sampled.take(context, most=9) is None, "an attempt does not repeat itself"
        sampled.add(context, completion)
    sampled.end_attempt(repeat=True)
    assert [sampled.take(context, most=9) for _ in range(3)] == [first, second, None]
    sampled.end_attempt(repeat=False)
    assert sampled.take(context, most=9) is None


def test_waiting_for_others_ends_when_no_other_group_runs_or_time_is_up() -> None:
    async def waiting_s(*running: str) -> float:
        record, loop = FaultHistory(), asyncio.get_running_loop()
        before = loop.time()
        if not running:
            await record.wait_for_others(FAULT, "own", since=0)
            return loop.time() - before
        with record.running(running[0]):
            await record.wait_for_others(FAULT, "own", since=0)
        return loop.time() - before

    assert run_virtually(waiting_s()) == 0 and run_virtually(waiting_s("own")) == 0
    assert run_virtually(waiting_s("other")) == pytest.approx(20.0)
