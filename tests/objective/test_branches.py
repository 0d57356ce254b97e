"""Turns that several episodes share are trained once, with the mean of their advantages, and packed once."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Recipe, build
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.objective import assemble, counted_samples
from agentrl.objective.branches import captured_tokens
from agentrl.records import Blame, Episode, Failure, Group, Message, Sample, Score, ScoredEpisode, Trajectory, Turn, VersionSpan

GONE = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="gone", message="")


def build_recipe(**objective: object) -> Recipe:
    critic = {"critic": {}} if objective.get("advantage") == "gae" else {}
    return build(
        {"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": {"normalize_std": False, **objective}, **critic}
    )


def turn(first: int, *, version: int = 0) -> Turn:
    """Two prompt tokens below 100 and three sampled ones, each with a distinct id and logprob."""
    sampled = tuple(range(first, first + 3))
    return Turn(
        prompt_ids=(first % 7, first % 5),
        completion_ids=sampled,
        logprobs=tuple(-float(token) for token in sampled),
        versions=(VersionSpan(version=version, start=0, end=3),),
        message=Message(role="assistant", content=""),
        finish_reason="stop",
    )


def scored(name: str, score: float, *turns: Turn, inherited: tuple[str, ...] = (), failures: tuple[Failure, ...] = ()) -> ScoredEpisode:
    trajectory = Trajectory(agent="main", turns=turns, inherited=inherited)
    episode = Episode(id=name, task_id="t", task_key="k", trajectories=(trajectory,), failures=failures)
    return ScoredEpisode(episode=episode, score=Score(value=score))


def group(*episodes: ScoredEpisode) -> Group:
    return Group(index=0, task_id="t", task_key="k", episodes=episodes)


def advantages_by_token(samples: tuple[Sample, ...]) -> dict[str, dict[int, float]]:
    """Episode -> trained token -> advantage, or reward with a critic."""
    return {
        sample.episode_id: {
            token: value
            for token, on, value in zip(sample.token_ids, sample.loss_mask, sample.advantages or sample.rewards, strict=True)
            if on
        }
        for sample in samples
    }


STEM = turn(100)
TREE = group(
    scored("stem", 1.0, STEM, turn(110)),
    scored("twig", 0.0, STEM, turn(120), inherited=("stem",)),
    scored("other", 0.0, turn(130), turn(140)),
    scored("fourth", 0.0, turn(130), turn(150), inherited=("other",)),
)


def test_a_group_is_dropped_if_the_mean_over_a_shared_turn_overflows() -> None:
    huge = group(
        scored("stem", 1e308, STEM, turn(110)),
        scored("other", -1e308, turn(130)),
        scored("twig", 0.9e308, STEM, turn(120), inherited=("stem",)),
        scored("fourth", -0.9e308, turn(140)),
    )
    assert assemble(0, [huge], build_recipe()).drop_reasons == {0: "non_finite_advantage"}


def test_shared_turns_are_trained_in_the_first_episode_with_the_mean_advantage() -> None:
    batch = assemble(0, [TREE], build_recipe()).batch
    advantages = advantages_by_token(batch.samples)
    assert advantages["stem"] == {**dict.fromkeys((100, 101, 102), 0.25), **dict.fromkeys((110, 111, 112), 0.75)}
    assert advantages["twig"] == dict.fromkeys((120, 121, 122), -0.25)
    assert advantages["other"] == dict.fromkeys((130, 131, 132, 140, 141, 142), -0.25)
    assert advantages["fourth"] == dict.fromkeys((150, 151, 152), -0.25)
    twig = batch.samples[1]
    assert twig.token_ids[:5] == batch.samples[0].token_ids[:5], "the inherited turn is context, token by token"
    assert (twig.loss_mask[:7], twig.loss_mask[7:]) == ((False,) * 7, (True,) * 3)
    assert twig.logprobs == (0.0,) * 7 + (-120.0, -121.0, -122.0) and twig.versions == (-1,) * 7 + (0,) * 3
    assert batch.denominator == captured_tokens([TREE], ()) == 6 * 3 and captured_tokens([TREE], {TREE.index: "why"}) == 0


def test_without_a_counted_stem_the_first_counted_branch_trains_its_turns() -> None:
    lost = scored("stem", 1.0, STEM, turn(110), failures=(GONE,))
    tree = group(lost, *TREE.episodes[1:], scored("good", 1.0, STEM, turn(160), inherited=("stem",)))
    advantages = advantages_by_token(assemble(0, [tree], build_recipe()).batch.samples)
    assert set(advantages) == {"twig", "other", "fourth", "good"}
    assert set(advantages["twig"]) == {100, 101, 102, 120, 121, 122} and set(advantages["good"]) == {160, 161, 162}
    assert advantages["twig"][100] == pytest.approx(fmean((advantages["twig"][120], advantages["good"][160])))


def test_a_group_from_one_state_gives_its_shared_turns_no_credit() -> None:
    """All attempts share the stem, so none shows whether it was good; only the turns that differ are credited."""
    siblings = group(*(scored(f"b{n}", float(n == 0), STEM, turn(110 + 10 * n), inherited=("s",)) for n in range(4)))
    advantages = advantages_by_token(assemble(0, [siblings], build_recipe()).batch.samples)
    assert [advantages["b0"][token] for token in (100, 101, 102)] == [0.0] * 3
    assert (advantages["b0"][110], advantages["b1"][120]) == (0.75, -0.25)


def test_turns_that_agree_by_chance_are_not_shared() -> None:
    """A confident policy can sample the same turn twice; each is a separate sample."""
    twins = group(scored("a", 1.0, STEM, turn(110)), scored("b", 0.0, STEM, turn(120)))
    assert [sum(sample.loss_mask) for sample in assemble(0, [twins], build_recipe()).batch.samples] == [6, 6]
    assert captured_tokens([twins], ()) == 12
    restarted = group(  # the episode "stem" ran twice; the branch comes from the run that was lost
        scored("stem", 1.0, turn(170), turn(110)), scored("twig", 0.0, STEM, turn(120), inherited=("stem",))
    )
    assert [sum(sample.loss_mask) for sample in assemble(0, [restarted], build_recipe()).batch.samples] == [6, 6]


def test_turns_of_nested_branches_are_trained_once() -> None:
    second = turn(110)
    deep = group(
        scored("a", 1.0, STEM, second, turn(120)),
        scored("b", 0.0, STEM, turn(130), inherited=("a",)),
        scored("c", 0.0, STEM, second, turn(140), inherited=("a", "a")),
        scored("d", 0.0, STEM, second, inherited=("a", "a")),
    )
    batch = assemble(0, [deep], build_recipe()).batch
    advantages = advantages_by_token(batch.samples)
    assert {name: len(tokens) for name, tokens in advantages.items()} == {"a": 9, "b": 3, "c": 3}, "d sampled no token itself"
    assert (advantages["a"][100], advantages["a"][110], advantages["a"][120]) == pytest.approx((0.0, (0.75 - 0.25 - 0.25) / 3, 0.75))


def test_turn_rewards_act_on_shared_turns_once() -> None:
    rewards = ((0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    with_rewards = group(
        *(replace(old, score=Score(value=old.score.value, turn_rewards=(row,))) for old, row in zip(TREE.episodes, rewards, strict=True))
    )
    plain, credited = (advantages_by_token(assemble(2, [with_rewards], build_recipe(turn_coef=coef)).batch.samples) for coef in (0.0, 1.0))
    mean = fmean(value for row in rewards for value in row)
    parts = [[sum(value - mean for value in row[start:]) for start in (0, 1)] for row in rewards]
    assert credited["stem"][100] - plain["stem"][100] == pytest.approx((parts[0][0] + parts[1][0]) / 2)
    assert credited["twig"][120] - plain["twig"][120] == pytest.approx(parts[1][1])


def test_with_a_critic_shared_turns_keep_the_rewards_of_the_episode_that_trains_them() -> None:
    rewards = advantages_by_token(assemble(0, [TREE], build_recipe(advantage="gae")).batch.samples)
    assert rewards["stem"] == {**dict.fromkeys((100, 101, 102, 110, 111), 0.0), 112: 1.0}
    assert set(rewards["twig"]) == {120, 121, 122}


def test_a_score_penalty_covers_the_episode() -> None:
    assert [sum(sample.loss_mask) for sample in counted_samples([TREE])] == [6, 6, 6, 6]


def test_a_group_of_a_broken_task_has_no_samples() -> None:
    fault = replace(GONE, blame=Blame.TASK)
    broken = group(*(scored(str(n), 1.0, failures=(fault,)) for n in range(4)))
    assembled = assemble(0, [broken], build_recipe())
    assert (assembled.batch.samples, assembled.batch.group_indices, assembled.drop_reasons) == ((), (0,), {0: "broken_task"})


@settings(deadline=None)
@given(
    stems=st.integers(1, 3),
    branches=st.integers(1, 4),
    shared=st.integers(1, 3),
    seed=st.integers(0, 999),
    lost=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_each_counted_token_is_trained_and_packed_once(stems: int, branches: int, shared: int, seed: int, lost: float) -> None:
    rng = random.Random(seed)
    fresh = iter(range(100, 100_000, 3))
    episodes = []
    for stem in range(stems):
        trunk = [turn(next(fresh)) for _ in range(shared)]
        for branch in range(branches):
            own = [turn(next(fresh)) for _ in range(rng.randint(0 if branch else 1, 2))]
            inherited = (f"s{stem}-b0",) * shared if branch else ()
            failures = (GONE,) if rng.random() < lost else ()
            episodes.append(scored(f"s{stem}-b{branch}", rng.random(), *trunk, *own, inherited=inherited, failures=failures))
    tree = group(*episodes)
    batch = assemble(0, [tree], build_recipe()).batch
    if not batch.samples:
        assert len(tree.scored) < 2
        return
    counted = {token for rollout in tree.scored for u in rollout.episode.trajectories[0].turns for token in u.completion_ids}
    trained = [token for sample in batch.samples for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert sorted(trained) == sorted(counted) and batch.denominator == len(counted)

    (rows,) = plan_micro_batches(batch.samples, rank=0, ranks=1, max_tokens=100_000)
    packed = build_micro_batch(rows, torch.device("cpu"))
    distinct = {u.completion_ids for sample in batch.samples for rollout in tree.scored if rollout.episode.id == sample.episode_id
                for u in rollout.episode.trajectories[0].turns}  # fmt: skip
    sampled = [token for token in packed.input_ids[0].tolist() if token >= 100]
    assert sorted(sampled) == sorted(token for completion in distinct for token in completion), "an inherited prefix is packed once"
    assert len(packed.expand) == len(counted)


def probability(p: float, outcomes: tuple[int, ...]) -> float:
    return math.prod(p if outcome else 1.0 - p for outcome in outcomes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stems", "branches"), [(1, 2), (2, 2), (3, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_the_expected_gradient_equals_an_enumeration(stems: int, branches: int, advantage: str) -> None:
    """A stem takes action s, each continuation c, and the score depends on both. The test enumerates every outcome of a group with its
    probability, so the expectation of score function times advantage is exact.

    Stems get the true gradient times 1 - 1/stems (GRPO) or (N - B)/(N - 1) (RLOO), continuations times 1 - 1/N or 1, and the mean of
    the branches has less variance than the first branch alone.
    """
    p, q, rewards, n = 0.3, (0.6, 0.2), ((0.1, 1.0), (0.4, -0.5)), stems * branches
    recipe = build_recipe(advantage=advantage)
    stem_gradient, twig_gradient, second, second_of_first = 0.0, [0.0, 0.0], 0.0, 0.0
    for actions in itertools.product((0, 1), repeat=stems):
        for twigs in itertools.product((0, 1), repeat=n):
            states = [actions[member // branches] for member in range(n)]
            chance = probability(p, actions) * math.prod(probability(q[s], (c,)) for s, c in zip(states, twigs, strict=True))
            episodes = [
                scored(
                    str(member),
                    rewards[s][c],
                    turn(100 + 10 * (member // branches) + 3 * s),
                    turn(500 + 10 * member + 3 * c),
                    inherited=(str(member - member % branches),) if member % branches else (),
                )
                for member, (s, c) in enumerate(zip(states, twigs, strict=True))
            ]
            by_episode = advantages_by_token(assemble(0, [group(*episodes)], recipe).batch.samples)
            advantages = {token: value for tokens in by_episode.values() for token, value in tokens.items()}
            at_stems = [advantages.get(100 + 10 * number + 3 * s, 0.0) for number, s in enumerate(actions)]
            at_twigs = [advantages.get(500 + 10 * member + 3 * c, 0.0) for member, c in enumerate(twigs)]
            estimate = sum(a * (s - p) for a, s in zip(at_stems, actions, strict=True))
            of_first = sum(at_twigs[number * branches] * (s - p) for number, s in enumerate(actions))
            stem_gradient += chance * estimate
            second, second_of_first = second + chance * estimate**2, second_of_first + chance * of_first**2
            for a, s, c in zip(at_twigs, states, twigs, strict=True):
                twig_gradient[s] += chance * a * (c - q[s])
    values = [(1 - q[s]) * rewards[s][0] + q[s] * rewards[s][1] for s in (0, 1)]
    shrink = 1 - 1 / stems if advantage == "grpo" else (n - branches) / (n - 1)
    assert stem_gradient == pytest.approx(stems * shrink * p * (1 - p) * (values[1] - values[0]), abs=1e-12)
    for s, weight in ((0, 1 - p), (1, p)):
        true = weight * q[s] * (1 - q[s]) * (rewards[s][1] - rewards[s][0])
        assert twig_gradient[s] == pytest.approx(n * (1 - 1 / n if advantage == "grpo" else 1.0) * true, abs=1e-12)
    assert second < second_of_first or branches == 1
