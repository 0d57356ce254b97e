"""Credit across the contexts of an episode in an environment, also if the environment truncated it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config import CriticConfig, Recipe, build
from agentrl.learner.packing import MicroBatch, build_micro_batch
from agentrl.learner.update import PreparedMicroBatch, Updater
from agentrl.objective import assemble
from agentrl.objective.credit import turn_advantages
from agentrl.objective.values import gae
from agentrl.records import Group, Parent, Sample, Score, ScoredEpisode, ToolResult, Trajectory, Turn
from agentrl.records.trajectory import CONTINUED, TRUNCATED
from tests.learner.building import episode, turn
from tests.objective.test_gae import rewarded

GAMMA, LAM = 0.9, 0.7


def env_turn(prompt: Sequence[int], completion: Sequence[int], reward: float) -> Turn:
    sampled = turn(list(prompt), list(completion), [-1.0] * len(completion))
    return replace(sampled, tool_results=(ToolResult(name="user", output="", ok=True, reward=reward),))


def played_episode(*, truncated: bool) -> ScoredEpisode:
    """Three contexts of 2, 1 and 1 turns with the rewards 1, 2, 3 and 4."""
    contexts = [[env_turn([1], [2, 3], 1.0), env_turn([4], [5], 2.0)], [env_turn([6], [7], 3.0)], [env_turn([8, 9], [10, 11], 4.0)]]
    ends = [CONTINUED, CONTINUED, TRUNCATED if truncated else "terminated"]
    parents = [None, Parent(trajectory=0, turn=1), Parent(trajectory=1, turn=0)]
    state = (8, 9, 10, 11, 12) if truncated else ()
    trajectories = tuple(
        Trajectory(agent="main", turns=tuple(turns), parent=parent, stop_reason=end, last_state=state if end == TRUNCATED else ())
        for turns, parent, end in zip(contexts, parents, ends, strict=True)
    )
    rewards = ((1.0, 2.0), (3.0,), (4.0,))
    return ScoredEpisode(episode=replace(episode("e", []), trajectories=trajectories), score=Score(value=10.0, turn_rewards=rewards))


def build_recipe(**objective: object) -> Recipe:
    critic = {"critic": {"gamma": GAMMA, "lam": LAM}} if objective.get("advantage") == "gae" else {}
    sections = {"objective": objective, "rollout": {"group": {"size": 1 if critic else 2}}, **critic}
    return build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, **sections})


def samples(*, truncated: bool) -> tuple[Sample, ...]:
    group = Group(index=0, task_id="t", task_key="k", episodes=(played_episode(truncated=truncated),))
    return assemble(0, [group], build_recipe(advantage="gae")).batch.samples


def test_rewards_stay_at_their_turns_and_contexts_are_linked() -> None:
    first, second, third = samples(truncated=True)
    assert first.rewards == (0.0, 0.0, 1.0, 0.0, 2.0) and second.rewards == (0.0, 3.0) and third.rewards == (0.0, 0.0, 0.0, 4.0)
    assert [sample.continued_in for sample in (first, second, third)] == [1, 2, None]
    assert [len(sample.last_state) for sample in (first, second, third)] == [0, 0, 5]


def test_a_score_that_is_not_the_sum_of_rewards_counts_at_the_end() -> None:
    scored = played_episode(truncated=False)
    group = Group(index=0, task_id="t", task_key="k", episodes=(replace(scored, score=replace(scored.score, value=6.0)),))
    assert sum(sum(sample.rewards) for sample in assemble(0, [group], build_recipe(advantage="gae")).batch.samples) == 6.0


@pytest.mark.parametrize("truncated", [False, True])
def test_advantages_of_linked_contexts_equal_those_of_one_row(truncated: bool) -> None:
    rows = samples(truncated=truncated)
    values = [[0.5, -1.0, 2.0], [0.25], [3.0, 1.0]]
    last = {2: 7.0} if truncated else {}
    advantages, returns = gae(rows, values, last, gamma=GAMMA, lam=LAM)
    rewards = (0.0, 1.0, 2.0, 3.0, 0.0, 4.0 + (GAMMA * 7.0 if truncated else 0.0))
    row, row_returns = gae([rewarded((0.0, *rewards), (False, *[True] * 6))], [list(chain(*values))], {}, gamma=GAMMA, lam=LAM)
    assert list(chain(*advantages)) == pytest.approx(row[0])
    assert list(chain(*returns)) == pytest.approx(row_returns[0])


class _KnownCritic:
    """A critic whose value of a state is the sum of its tokens."""

    config = CriticConfig(gamma=GAMMA, lam=LAM)

    def values(self, batch: MicroBatch) -> torch.Tensor:
        ids, forest = batch.input_ids[0].tolist(), batch.layout
        sums = [float(sum(ids[at] for at in _path(forest, position))) for position in batch.positions.tolist()]
        return torch.tensor(sums)[batch.expand]


def _path(layout: Any, position: int) -> list[int]:
    """Indices of the tokens up to a position, in a forest of one path."""
    return list(range(position + 1))


def test_the_learner_bootstraps_with_the_value_of_the_last_state() -> None:
    """Each sample has its own micro-batch, so that each forest is one path."""
    linked = samples(truncated=True)
    updater, critic = Updater.__new__(Updater), _KnownCritic()
    ranks = SimpleNamespace(sum=lambda values: values, report_progress=lambda *_: None)
    updater.engine = SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
    cpu = torch.device("cpu")

    def one_batch_per_sample(rows: Sequence[Sample]) -> list[MicroBatch]:
        return [build_micro_batch((row,), cpu, [number]) for number, row in enumerate(rows)]

    updater._micro_batches = one_batch_per_sample  # type: ignore[method-assign]
    common = {"samples": linked, "critic_step": 0, "critic_tokens": 6, "proximal": None, "reference": None}
    micros = [PreparedMicroBatch(batch=batch, values=critic.values(batch), **common) for batch in one_batch_per_sample(linked)]  # type: ignore[arg-type]
    estimated = updater._estimated(micros, critic)  # type: ignore[arg-type]
    values = [[1.0, 3.0, 10.0], [6.0], [17.0, 27.0]]  # sums of the tokens before each sampled one
    expected, returns = gae(linked, values, {2: 8.0 + 9 + 10 + 11 + 12}, gamma=GAMMA, lam=LAM)
    assert [micro.batch.advantages.tolist() for micro in estimated] == [pytest.approx(row, abs=1e-4) for row in expected]
    assert [micro.returns.tolist() for micro in estimated if micro.returns is not None] == [pytest.approx(row, abs=1e-4) for row in returns]


def test_a_rank_without_samples_takes_part_in_the_sums() -> None:
    """The last micro-batch of a rank may be empty. The samples are unlinked and not truncated."""
    rows = [replace(sample, continued_in=None) for sample in samples(truncated=False)]
    sums: list[int] = []

    def add(values: torch.Tensor) -> torch.Tensor:
        sums.append(len(values))
        return values

    updater, critic = Updater.__new__(Updater), _KnownCritic()
    updater.engine = SimpleNamespace(ranks=SimpleNamespace(sum=add))  # type: ignore[assignment]
    batch = build_micro_batch((), torch.device("cpu"), [])
    common = {"samples": rows, "critic_step": 0, "critic_tokens": 6, "proximal": None, "reference": None}
    [estimated] = updater._estimated([PreparedMicroBatch(batch=batch, values=critic.values(batch), **common)], critic)  # type: ignore[arg-type]
    assert estimated.returns is not None and len(estimated.returns) == len(estimated.batch.advantages) == 0
    assert sums == [6], "a rank with samples adds their values in the same collective"


def test_turn_level_credit_continues_in_the_next_context() -> None:
    first, second = turn_advantages([[[1.0, 2.0], [3.0]], [[2.0, 2.0], [2.0]]], normalize_std=False, following=[[1, None], [1, None]])
    assert first == [[0.0, 1.0], [1.0]] and second == [[0.0, 0.0], [0.0]]
    unlinked, _ = turn_advantages([[[1.0, 2.0], [3.0]], [[2.0, 2.0], [2.0]]], normalize_std=False)
    assert unlinked == [[-1.0, 0.0], [1.0]]
