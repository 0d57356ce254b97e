"""Late score parts that are applied after their group was trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import build
from agentrl.errors import StoreError, UserError
from agentrl.experience import GroupOrder, SqliteStore
from agentrl.experience.audit import count, verify
from agentrl.experience.residuals import split_group, why_no_residuals
from agentrl.learner.packing import split_minibatches
from agentrl.objective import assemble, scale_for_residuals
from agentrl.objective.advantages import batch_advantages
from agentrl.objective.losses import loss_denominator
from agentrl.protocols import ExperienceStore
from agentrl.records import Group, GroupUse, LateScore, PendingPart, Score, sampled_tokens
from agentrl.run.late import check_late
from tests.driving import make_recipe
from tests.late import late_group
from tests.thirdparty.fieldkit.store import FolderStore

LINEAR = {"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": {"normalize_std": False}}
PART = PendingPart(name="human", weight=0.5, low=-9.0, high=9.0, residual=True)
values = st.floats(-4, 4, allow_nan=False)


def waiting(index: int, *partial: float) -> Group:
    """Returns a group whose attempts have these partial scores and wait for another part."""
    group = late_group(index, PART, size=len(partial))
    episodes = tuple(replace(each, score=replace(each.score, partial=value)) for each, value in zip(group.episodes, partial, strict=True))
    return replace(group, episodes=episodes)


@pytest.fixture(params=[SqliteStore, FolderStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ExperienceStore]:
    folder = request.param is FolderStore
    opened: ExperienceStore = FolderStore(tmp_path, make_recipe()) if folder else SqliteStore(tmp_path / "experience.sqlite")
    yield opened
    opened.close()


def send(store: ExperienceStore, episode: str, value: float) -> int:
    late = LateScore(episode_id=episode, part="human", value=value, scored_by="ann", key=episode)
    return store.add_score(late, now=time.time()).remaining


@given(st.lists(st.tuples(values, values), min_size=2, max_size=6), st.sampled_from(["grpo", "rloo"]))
def test_the_advantages_of_both_parts_add_up_to_those_of_the_complete_score(parts: list[tuple[float, float]], estimator: str) -> None:
    objective = build(LINEAR | {"objective": {"advantage": estimator, "normalize_std": False}}).objective
    early, residual = split_group(waiting(0, *(first for first, _ in parts)))
    arrived = {(scored.episode.id, "human"): late for scored, (_, late) in zip(residual.episodes, parts, strict=True)}
    complete = waiting(0, *(first for first, _ in parts)).with_parts(arrived)
    groups = (early, residual.with_parts(arrived), complete)
    first, later, total = ([value or 0.0 for value in batch_advantages([group], objective, min_group_size=2)[0].values] for group in groups)
    assert [a + b for a, b in zip(first, later, strict=True)] == pytest.approx(total, abs=1e-6)


def test_a_group_is_ready_at_once_and_its_residual_waits(store: ExperienceStore) -> None:
    assert store.put(waiting(0, 0.25, 0.75)) and not store.put(waiting(0, 0.0, 0.0))
    residual, early = store.entries()
    assert (early.index, early.state, early.late_parts, early.has_spread) == (0, "ready", 0, True)
    assert (residual.index, residual.state, residual.pending, store.parked()) == (-1, "parked", 2, (-1,))
    assert [scored.score.value for scored in store.groups([0])[0].episodes] == [0.25, 0.75]
    assert [entry.index for entry in store.entries(first=1)] == [-1], "an open residual is always returned"
    assert send(store, "g0-0", 1.0) == 1 and send(store, "g0-1", -1.0) == 0
    assert [scored.score.value for scored in store.groups([0])[0].episodes] == [0.25, 0.75], "the group never changes"
    assert [scored.score.value for scored in store.groups([-1])[0].episodes] == [0.5, -0.5]
    assert [entry.state for entry in store.entries()] == ["ready", "ready"]


def test_each_sampled_token_counts_once_and_those_of_residuals_separately(store: ExperienceStore, tmp_path: Path) -> None:
    group = waiting(0, 0.0, 1.0)
    tokens = sampled_tokens(group.episodes)
    store.put(group)
    assert (count(store.entries()).tokens_open, count(store.entries()).parts_pending) == (tokens, 2)
    store.commit(0, {0: GroupUse(tokens_trained=tokens)}, "c")
    for episode in ("g0-0", "g0-1"):
        send(store, episode, float(episode == "g0-0"))
    store.assign(1, [-1])
    store.commit(1, {-1: GroupUse(tokens_trained=tokens)}, "c")
    counts = count(store.entries())
    assert counts.tokens == {"sampled": tokens, "trained": tokens, "excluded": 0, "open": 0}
    assert (counts.residuals, counts.tokens_residual, sum(counts.groups.values())) == (1, tokens, 1)
    assert list(verify(tmp_path, store)) == [] and [entry.index for entry in store.entries(first=0)] == [0]
    store.reconcile({0: {0: GroupUse(tokens_trained=tokens)}})  # the checkpoint of step 1 is damaged
    assert [(entry.index, entry.step, entry.state) for entry in store.entries(step=1)] == [(-1, 1, "assigned")]


def test_an_attempt_whose_part_has_expired_counts_in_no_mean(store: ExperienceStore) -> None:
    group = late_group(0, replace(PART, expires_at=100.0), size=3)
    store.put(group)
    for episode, value in (("g0-0", 4.0), ("g0-1", 2.0)):
        store.add_score(LateScore(episode_id=episode, part="human", value=value, scored_by="ann", key=episode), now=1.0)
    assert store.expire_scores(now=100.0) == (-1,)
    (residual,) = store.groups([-1])
    assert [scored.score.value for scored in residual.episodes] == [2.0, 1.0, None]
    (advantages,) = batch_advantages([residual], build(LINEAR).objective, min_group_size=2)
    assert advantages.values == (0.5, -0.5, None)
    assert [scored.score.value for scored in store.groups([0])[0].episodes] == [0.0, 0.0, 0.0], "the early part stays"


def test_a_step_also_selects_residuals_of_trained_groups_and_repeats_them_after_a_crash(tmp_path: Path) -> None:
    order, store = GroupOrder(per_step=2), SqliteStore(tmp_path / "experience.sqlite")
    for index in range(6):
        store.put(waiting(index, 0.0, 1.0))
        for attempt in range(2):
            send(store, f"g{index}-{attempt}", float(attempt))

    def step(number: int) -> tuple[int, ...] | None:
        chosen = order.select(number, store.entries())
        if chosen is not None:
            store.assign(number, chosen)
        return chosen

    def complete(number: int, chosen: tuple[int, ...]) -> None:
        store.commit(number, {index: GroupUse(tokens_trained=4) for index in chosen}, "c")

    assert step(0) == (0, 1), "the first step has no trained group"
    complete(0, (0, 1))
    assert step(1) == (-2, -1, 2, 3)
    store.put(waiting(9, 0.0, 1.0))  # the learner dies, and another group arrives
    assert step(1) == (-2, -1, 2, 3)
    complete(1, (-2, -1, 2, 3))
    assert step(2) == (-4, -3, 4, 5) and order.first_open_block(store.entries(), before=2) == 2
    store.close()


def test_a_group_waits_if_one_of_its_parts_is_not_residual(tmp_path: Path) -> None:
    group = late_group(0, PART, PendingPart(name="style"))
    assert split_group(group) == (group,)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_residuals_do_not_dilute_the_other_groups_of_their_step(aggregation: str) -> None:
    recipe = build(LINEAR).but({"objective.aggregation": aggregation})
    residual = split_group(waiting(0, 0.0, 1.0))[1]
    late = residual.with_parts({(scored.episode.id, "human"): float(n) for n, scored in enumerate(residual.episodes)})
    others = [split_group(waiting(index, 0.0, 1.0))[0] for index in (1, 2)]

    def weights(*groups: Group, minibatches: int = 1) -> dict[int, float]:
        largest = dict[int, float]()
        for part in split_minibatches(assemble(1, groups, recipe).batch, minibatches):
            samples = scale_for_residuals(part, recipe).samples
            denominator = loss_denominator(samples, recipe.objective.aggregation, length=recipe.policy.max_model_len)
            largest |= {sample.group_index: max(sample.advantages) / denominator for sample in samples}
        return largest

    assert weights(others[0], late) == pytest.approx(weights(others[0]) | weights(late)), "each has the same weight as in a separate step"
    expected = weights(others[0]) | weights(late) | weights(others[1])
    assert weights(late, others[1], others[0], minibatches=2) == pytest.approx(expected), "also if a minibatch has no residual"


@pytest.mark.parametrize(
    "changes",
    [
        {"objective.normalize_std": True},
        {"objective.advantage": "reinforce++"},
        {"objective.turn_coef": 0.5},
        {"objective.credit": "branches"},
        {"objective.kl": "k1_reward", "objective.kl_coef": 0.1},
        {"rollout.extra_groups": 2},
        {"tasks.weighting": True},
    ],
    ids=str,
)
def test_settings_under_which_the_parts_do_not_add_up_are_reported(changes: dict[str, object]) -> None:
    """They include settings that choose groups or tasks by score, which would see only the early part."""
    assert not why_no_residuals(build(LINEAR))
    recipe = build(LINEAR).but(changes)
    assert next(iter(changes)).rpartition(".")[2] in why_no_residuals(recipe)
    order = GroupOrder.from_recipe(recipe)
    with pytest.raises(UserError, match="residual scores cannot be applied with"):
        check_late(order, [], ["verifier v"])
    check_late(order, [], [])


def test_a_complete_score_has_no_residual() -> None:
    group = waiting(0, 0.0, 0.0)
    mixed = replace(group, episodes=(replace(group.episodes[0], score=Score(value=1.0)), group.episodes[1]))
    early, residual = split_group(mixed)
    assert [scored.score.value for scored in early.episodes] == [1.0, 0.0]
    assert residual.episodes[0].score.is_absent and residual.episodes[1].score.pending


def test_two_groups_with_the_same_episode_id_are_reported_with_a_fix(tmp_path: Path) -> None:
    store, first, second = SqliteStore(tmp_path / "experience.sqlite"), waiting(0, 0.0), waiting(1, 0.0)
    store.put(first)
    (scored,) = second.episodes
    copy = replace(scored, episode=replace(scored.episode, id=first.episodes[0].episode.id))
    with pytest.raises(StoreError, match=r"two groups have the same episode id\n  fix: stop the worker"):
        store.put(replace(second, episodes=(copy,)))
    store.close()
