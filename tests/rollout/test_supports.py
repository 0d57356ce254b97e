"""Supports of sampled tokens, from a truncated policy through store and batch to the learner's tensors, including branches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config import GroupConfig, PolicyConfig, Recipe, RolloutConfig, SamplingConfig, TasksConfig
from agentrl.experience import SqliteStore
from agentrl.objective import assemble
from agentrl.records import Blame, Completion, Episode, Group, SamplingParams, Score, Task
from agentrl.records.sampling import Sampling, Supports
from agentrl.rollout import GroupRunner
from agentrl.testing import ScriptedPolicy
from tests.rollout.test_branching import talkative

TOP_3 = Sampling(temperature=0.6, top_k=3, top_p=0.9, supports=True)
RECIPE = Recipe(
    name="t",
    policy=PolicyConfig(model="m", max_model_len=4096),
    tasks=TasksConfig(family="a:b"),
    rollout=RolloutConfig(group=GroupConfig(size=4), groups_per_step=1, sampling=SamplingConfig(temperature=0.6, top_k=3, top_p=0.9)),
)


async def play(tokenizer: Any, task: Task, make_runner: Any, sampling: Sampling, path: Path) -> Group:
    """Returns a group of four, two branches from each of two stems, read back from the store."""
    values = iter(range(99))

    async def score(task: Task, episode: Episode) -> Score:
        return Score(value=float(next(values)))

    runner = GroupRunner(
        runner=replace(make_runner(talkative(tokenizer)), sampling=sampling),
        scorer=score,
        slots=asyncio.Semaphore(4),
        group_size=4,
        max_retries=0,
        branches=2,
        checkpoints=None,
    )
    store = SqliteStore(path / "experience.sqlite")
    group = await runner.run_group(0, task)
    assert store.put(group)
    (stored,) = store.groups([0])
    store.close()
    assert stored == group
    return stored


async def test_supports_reach_the_learner_unchanged(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path) -> None:
    group = await play(tokenizer, task, make_runner, TOP_3, tmp_path)
    turns = [turn for scored in group.episodes for turn in scored.episode.trajectories[0].turns]
    for turn in turns:
        assert turn.supports is not None
        assert [len(row) for row in turn.supports.rows] == [1 + position % 3 for position in range(len(turn.completion_ids))]
    samples = assemble(0, [group], RECIPE).batch.samples
    assert len(samples) == len(group.episodes) == 4
    trained = 0
    for sample in samples:
        assert sample.supports is not None
        rows = sample.supports.rows
        assert [bool(row) for row in rows] == list(sample.loss_mask), "context tokens have no support"
        trained += sum(sample.loss_mask)
    branches = [scored.episode.trajectories[0] for scored in group.episodes if scored.episode.trajectories[0].inherited]
    assert len(branches) == 2, "two of the four are branches"
    for branch in branches:
        stem = next(scored.episode.trajectories[0] for scored in group.episodes if scored.episode.id == branch.inherited[0])
        assert branch.turns[0].supports == stem.turns[0].supports, "a shared turn has the same support"
    shared = sum(len(branch.turns[0].completion_ids) for branch in branches)
    assert trained == sum(len(turn.completion_ids) for turn in turns) - shared, "shared turns are trained once, in the first branch"


async def test_without_truncation_no_supports_are_stored(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path) -> None:
    group = await play(tokenizer, task, make_runner, Sampling(), tmp_path)
    turns = [turn for scored in group.episodes for turn in scored.episode.trajectories[0].turns]
    samples = assemble(0, [group], RECIPE).batch.samples
    assert {record.supports for record in (*turns, *samples)} == {None} and len(samples) == 4


async def test_a_sample_may_join_turns_with_and_without_supports(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path) -> None:
    group = await play(tokenizer, task, make_runner, TOP_3, tmp_path)
    (scored, *rest) = group.episodes
    trajectory = scored.episode.trajectories[0]
    plain = replace(trajectory, turns=(replace(trajectory.turns[0], supports=None), *trajectory.turns[1:]))
    mixed = replace(group, episodes=(replace(scored, episode=replace(scored.episode, trajectories=(plain,))), *rest))
    first = assemble(0, [mixed], RECIPE).batch.samples[0]
    assert first.supports is not None
    opening = len(plain.turns[0].prompt_ids) + len(plain.turns[0].completion_ids)
    assert Supports.from_rows(first.supports.rows[:opening]) == Supports.from_rows([()] * opening)
    assert any(first.supports.rows[opening:])


async def test_a_policy_without_supports_is_never_trained_on(tokenizer: Any, task: Task, make_runner: Any) -> None:
    class Silent(ScriptedPolicy):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **others: Any) -> Completion:
            return replace(await super().generate(prompt_ids, params, **others), supports=None)

    episode = await replace(make_runner(Silent.saying(tokenizer, "3")), sampling=TOP_3).run(task, episode_id="e")
    assert episode.left_out and "did not return the support of every token" in episode.failures[0].message
    assert (episode.failures[0].stage, episode.failures[0].blame) == ("generate", Blame.INFRASTRUCTURE)
