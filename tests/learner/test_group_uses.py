"""What the ledger records of a step: how many tokens of each group were trained, or why none were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.learner.update_guard import SKIP, UpdateFailure
from agentrl.learner.worker import Worker
from agentrl.objective.samples import AssembledBatch
from agentrl.records import Batch, Group, GroupUse, Sample

GROUPS = tuple(Group(index=index, task_id="t", task_key="k", episodes=()) for index in range(3))


def sample(group: int) -> Sample:
    return Sample(
        episode_id=f"e{group}",
        group_index=group,
        token_ids=(1, 2, 3),
        loss_mask=(False, True, True),
        logprobs=(0.0, -0.5, -0.5),
        versions=(-1, 0, 0),
        advantages=(0.0, 1.0, 1.0),
    )


def failure(what: str, *groups: int) -> UpdateFailure:
    return UpdateFailure(step=0, action=SKIP, what=what, reasons=("r",), groups=groups, episodes=(), metrics={})


def uses(*failures: UpdateFailure, optimizer_steps: float) -> dict[int, GroupUse]:
    """The uses of a step: groups 0 and 1 have a sample, group 2 was dropped."""
    batch = Batch(step=0, samples=(sample(0), sample(1)), denominator=4, group_indices=(0, 1, 2))
    assembled = AssembledBatch(batch=batch, drop_reasons={2: "non_finite: score"})
    metrics = {"optimizer_steps": optimizer_steps, "weights_changed": optimizer_steps}
    worker: Any = object.__new__(Worker)
    worker.good, worker._update = 0, lambda step, groups, replayed: (assembled, metrics, failures)
    worker._groups_to_replay = lambda step: ()
    worker.updater = SimpleNamespace(guard=SimpleNamespace(start_weights_passed=True, rolling_back=False))
    _, _, used = Worker._train(worker, 0, GROUPS)
    assert used[2] == GroupUse(reason="non_finite: score")
    return {index: used[index] for index in (0, 1)}


@pytest.mark.parametrize("failures", [(), (failure("group", 2),), (failure("critic", 0, 1),)])
def test_no_token_is_trained_while_the_critic_warms_up(failures: tuple[UpdateFailure, ...]) -> None:
    assert uses(*failures, optimizer_steps=0.0) == dict.fromkeys((0, 1), GroupUse(reason="critic_warmup"))


def test_only_the_groups_of_a_skipped_optimizer_step_are_not_trained() -> None:
    trained, skipped = GroupUse(tokens_trained=2), GroupUse(reason="update_skipped")
    assert uses(failure("group", 2), optimizer_steps=1.0) == {0: trained, 1: trained}
    assert uses(failure("policy", 1), optimizer_steps=1.0) == {0: trained, 1: skipped}
    assert uses(failure("policy", 0), failure("policy", 1), optimizer_steps=0.0) == {0: skipped, 1: skipped}
