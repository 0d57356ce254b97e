from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.errors import ServingError, UserError
from agentrl.protocols.reward import AWAITING_GROUP_JUDGE
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode, Task, codec
from agentrl.reward import TaskScorer
from agentrl.rollout import GroupRunner
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing

PYTHON = '<tool_call>\n{"name": "python", "arguments": {"code": "print(3)"}}\n</tool_call>'

SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "3"}}\n</tool_call>'


async def full_score(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


def group_runner(runner: Any, *, retries: int, size: int = 4) -> GroupRunner:
    return GroupRunner(runner=runner, scorer=full_score, slots=asyncio.Semaphore(2), group_size=size, max_retries=retries)


async def test_a_fault_is_retried_and_then_not_recorded(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def fails_first(turn: int, episode: str) -> str:
        if episode.endswith("-a0"):
            raise ServingError("busy")
        return SUBMIT

    group = await group_runner(make_runner(ScriptedPolicy(tokenizer, fails_first)), retries=1).run_group(7, task)
    assert len(group.scored) == 4
    assert {e.episode.attempt for e in group.episodes} == {1}


async def test_a_permanent_fault_is_excluded_and_never_scored_zero(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def member_2_fails(turn: int, episode: str) -> str:
        if "-2-" in episode:
            raise ServingError("no route")
        return SUBMIT

    group = await group_runner(make_runner(ScriptedPolicy(tokenizer, member_2_fails)), retries=1).run_group(7, task)
    assert len(group.episodes) == 4 and len(group.scored) == 3
    (failed,) = [e for e in group.episodes if e.episode.left_out]
    assert failed.score.value is None and "no route" in failed.score.reason


async def test_a_broken_task_excludes_its_group_at_once(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """If the image of one attempt cannot be built, the others, idle or waiting, are excluded without retries."""

    class NoImage(ScriptedSandboxes):
        async def open(self, *args: Any, **options: Any) -> Any:
            self.opened.append(None)  # type: ignore[arg-type]
            raise UserError("image.toml: no such suite")

    def only_the_third_runs_code(turn: int, episode: str) -> str:
        return PYTHON if "-2-" in episode else SUBMIT

    sandboxes = NoImage(printing(""))
    runner = make_runner(ScriptedPolicy(tokenizer, only_the_third_runs_code), sandboxes)
    group = await group_runner(runner, retries=3).run_group(7, task)
    assert len(group.episodes) == 4 and group.scored == () and len(sandboxes.opened) == 1
    assert group.fault is not None and (group.fault.blame, "no such suite" in group.fault.message) == (Blame.TASK, True)
    assert all(e.score.reason.startswith("excluded: task TaskError") for e in group.episodes)
    assert codec.from_json(Group, codec.to_json(group)) == group


async def test_a_verifier_that_does_not_exist_is_blamed_on_the_task(tokenizer: Any, task: Task, make_runner: Any) -> None:
    runner = replace(group_runner(make_runner(ScriptedPolicy.saying(tokenizer, SUBMIT)), retries=3), scorer=TaskScorer())
    group = await runner.run_group(0, replace(task, verifiers=("rewards.gone:score",)))
    assert group.fault is not None and "rewards.gone" in group.fault.message
    alone = await runner.run_episode(replace(task, verifiers=("rewards.gone:score",)), name="evaluation")
    assert alone.episode.left_out and alone.score.value is None


async def test_a_bug_costs_one_episode_and_its_traceback_is_logged_once(tokenizer: Any, task: Task, make_runner: Any, caplog: Any) -> None:
    def defect(turn: int, episode: str) -> str:
        if "-1-" in episode:
            raise ZeroDivisionError("of our own making")
        return SUBMIT

    reported: list[Failure | None] = []
    runner = replace(group_runner(make_runner(ScriptedPolicy(tokenizer, defect)), retries=1), on_attempt=reported.append)
    group = await runner.run_group(0, task)
    assert [scored.score.value for scored in group.episodes] == [1.0, None, 1.0, 1.0]
    (failure,) = group.episodes[1].episode.failures
    assert (failure.stage, failure.blame, failure.kind, failure.retryable) == ("generate", Blame.INFRASTRUCTURE, "ZeroDivisionError", True)
    assert "of our own making" in failure.message and group.episodes[1].episode.attempt == 1
    assert sorted(str(f and f.kind) for f in reported) == ["None"] * 3 + ["ZeroDivisionError"] * 2, "the listener receives every attempt"
    assert caplog.text.count("Traceback") == 1 and "in defect" in caplog.text


async def test_slots_bound_the_episodes_in_flight(tokenizer: Any, task: Task, make_runner: Any) -> None:
    running = peak = 0
    two = asyncio.Barrier(2)

    class Counting(ScriptedPolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            await two.wait()  # with one slot, it would wait forever
            for _ in range(20):  # lets other tasks run
                await asyncio.sleep(0)
            running -= 1
            return await super().generate(*args, **kwargs)

    await group_runner(make_runner(Counting.saying(tokenizer, SUBMIT)), retries=0, size=10).run_group(0, task)
    assert peak == 2


class Together:
    """Judges groups: the value of an attempt is its index."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, 0

    async def score_attempt(self, task: Task, episode: Episode) -> Score:
        return Score(value=None, reason=AWAITING_GROUP_JUDGE)

    async def score_group(self, task: Task, scored: Sequence[ScoredEpisode]) -> list[Score]:
        self.calls += 1
        if self.fails:
            raise RuntimeError("a bug")
        return [attempt.score if attempt.episode.left_out else Score(value=float(index)) for index, attempt in enumerate(scored)]


async def test_a_group_is_judged_after_all_attempts_have_ended(tokenizer: Any, task: Task, make_runner: Any) -> None:
    def member_2_fails(turn: int, episode: str) -> str:
        if "-2-" in episode:
            raise ServingError("no route")
        return SUBMIT

    reported: list[Failure | None] = []
    plain = group_runner(make_runner(ScriptedPolicy(tokenizer, member_2_fails)), retries=0)
    runner = replace(plain, group_scoring=Together(), on_attempt=reported.append)
    group = await runner.run_group(7, task)
    assert [scored.score.value for scored in group.episodes] == [0.0, 1.0, None, 3.0] and "no route" in group.episodes[2].score.reason
    assert [failure is None for failure in reported] == [False, True, True, True], "each attempt is reported once, after it is judged"
    assert (await runner.run_episode(task, name="alone")).score.value == 1.0, "evaluations use the verifiers"
    reported.clear()
    failed = await replace(runner, group_scoring=Together(fails=True)).run_group(7, task)
    assert failed.scored == () and all("a bug" in scored.score.reason for scored in failed.episodes if not scored.episode.left_out)
    assert len(reported) == 4 and None not in reported


async def test_a_group_whose_driver_died_before_judging_is_judged_on_resume(tokenizer: Any, task: Task, make_runner: Any) -> None:
    """The attempts are stored, so none is repeated; they are judged together as before."""

    class Keeper:
        scored: ClassVar[dict[int, ScoredEpisode]] = {}

        async def save_state(self, group: int, member: int, state: Any) -> None: ...

        async def save_scored(self, group: int, member: int, scored: ScoredEpisode) -> None:
            self.scored[member] = scored

        async def load(self, group: int, member: int) -> ScoredEpisode | None:
            return self.scored.get(member)

    turns: list[str] = []

    def counts(turn: int, episode: str) -> str:
        turns.append(episode)
        return SUBMIT

    judge, keeper = Together(), Keeper()
    runner = replace(group_runner(make_runner(ScriptedPolicy(tokenizer, counts)), retries=0), group_scoring=judge, checkpoints=keeper)
    group = await runner.run_group(7, task)
    assert all(attempt.score.reason == AWAITING_GROUP_JUDGE for attempt in keeper.scored.values()) and len(turns) == 4
    assert await runner.run_group(7, task) == group and len(turns) == 4 and judge.calls == 2
    alone = await replace(runner, group_scoring=None).run_group(7, task)
    assert {attempt.score.value for attempt in alone.episodes} == {1.0} and len(turns) == 4, "the judge was removed from the recipe"
