"""Credit modes on small trees, with results computed by hand, and properties that hold for all modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Recipe, build
from agentrl.errors import RecipeError
from agentrl.objective import assemble
from agentrl.records import Episode as Record
from agentrl.records import Group, Message, Parent, Score, ScoredEpisode, ToolCall, Trajectory, Turn, VersionSpan
from tests.strategies import examples

CALLS = Message(role="assistant", content="", tool_calls=(ToolCall(name="delegate", arguments={}),) * 9)
_numbers = iter(range(100, 10**9))


def build_recipe(**objective: Any) -> Recipe:
    data = {"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": {"normalize_std": False, **objective}}
    return build(data | ({"rollout": {"group": {"branches": 2}}} if objective.get("credit") == "siblings" else {}))


def turn() -> Turn:
    """One prompt token below 100 and one sampled token with a distinct id."""
    token = next(_numbers)
    return Turn(
        prompt_ids=(1,),
        completion_ids=(token,),
        logprobs=(-float(token),),
        versions=(VersionSpan(version=0, start=0, end=1),),
        message=CALLS,
        finish_reason="stop",
    )


def rollout(
    name: str, score: float, *roles: str, turns: tuple[Turn, ...] = (), inherited: tuple[str, ...] = (), **score_fields: Any
) -> ScoredEpisode:
    """A main trajectory of these turns (default: one new turn), and one trajectory per role, called in its first turn."""
    main = Trajectory(agent="main", turns=turns or (turn(),), inherited=inherited)
    others = (Trajectory(agent=role, turns=(turn(),), parent=Parent(trajectory=0, turn=0, call=at)) for at, role in enumerate(roles))
    episode = Record(id=name, task_id="t", task_key="k", trajectories=(main, *others))
    return ScoredEpisode(episode=episode, score=Score(value=score, **score_fields))


def credit(recipe: Recipe, *episodes: ScoredEpisode) -> dict[str, list[list[float]]]:
    """Episode -> [trajectory][trained token], rounded."""
    group = Group(index=0, task_id="t", task_key="k", episodes=episodes)
    advantages: dict[str, list[list[float]]] = {}
    for sample in assemble(0, [group], recipe).batch.samples:
        values = [round(value, 9) for value, on in zip(sample.advantages, sample.loss_mask, strict=True) if on]
        advantages.setdefault(sample.episode_id, []).append(values)
    return advantages


TREES = (rollout("a", 1.0, "worker", "worker"), rollout("b", 0.0, "worker"), rollout("c", 0.5), rollout("d", 0.5, "summary"))


def test_episode_and_branches_credit() -> None:
    """A = s - 0.5; a has three trajectories, b and d two."""
    assert credit(build_recipe(), *TREES) == {"a": [[0.5]] * 3, "b": [[-0.5]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}
    advantages = credit(build_recipe(credit="branches"), *TREES)
    assert advantages == {"a": [[round(0.5 / 3, 9)]] * 3, "b": [[-0.25]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}


def test_roles_are_compared_with_the_same_role() -> None:
    """The workers of a and b have the mean 0.5, although a has two. The only summary is its own baseline."""
    assert credit(build_recipe(credit="roles"), *TREES) == {"a": [[0.5]] * 3, "b": [[-0.5]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}
    shifted = (*TREES[:3], rollout("d", 0.9, "worker"))  # main: mean 0.6; workers: (1 + 0 + 0.9) / 3
    workers = [round(score - 1.9 / 3, 9) for score in (1.0, 0.0, 0.9)]
    main = [0.4, -0.6, -0.1, 0.3]
    advantages = credit(build_recipe(credit="roles"), *shifted)
    assert advantages == {
        "a": [[main[0]], [workers[0]], [workers[0]]],
        "b": [[main[1]], [workers[1]]],
        "c": [[main[2]]],
        "d": [[main[3]], [workers[2]]],
    }
    leave_one_out = credit(build_recipe(credit="roles", advantage="rloo"), *shifted)
    assert leave_one_out["b"] == [[-0.8], [-0.95]], "against (1 + 0.5 + 0.9) / 3, and (1 + 0.9) / 2"


def test_verifier_credit_uses_branch_scores() -> None:
    """a's workers were worth 1 and 0, b's 0.2: u = 0.5 and 0.2, mean 0.35. Trajectories without a score have their episode's score."""
    rollouts = (
        rollout("a", 1.0, "worker", "worker", branches=(None, 1.0, 0.0)),
        rollout("b", 0.0, "worker", branches=(None, 0.2)),
        rollout("c", 0.5),
    )
    advantages = credit(build_recipe(credit="verifier"), *rollouts)
    assert advantages == {"a": [[0.5], [0.65], [-0.35]], "b": [[-0.5], [-0.15]], "c": [[0.0]]}
    assert credit(build_recipe(credit="verifier", advantage="rloo"), *rollouts)["a"] == [[0.75], [0.8], [-0.2]]
    spread = (((1 - 0.35) ** 2 + 0.35**2) / 2 + 0.15**2) ** 0.5 + 1e-4
    assert credit(build_recipe(credit="verifier", normalize_std=True), *rollouts)["a"][1] == [round(0.65 / spread, 9)]
    equal = [replace(scored, score=replace(scored.score, value=0.5)) for scored in rollouts]
    assert credit(build_recipe(credit="verifier"), *equal)["a"] == [[0.0], [0.65], [-0.35]], "equal scores are trained if branches differ"


def test_counterfactual_credit_uses_scores_without_a_branch() -> None:
    rollouts = (
        rollout("a", 1.0, "worker", "worker", without=(None, 0.25, 1.0)),
        rollout("b", 0.0, "worker", without=(None, 0.5)),
        rollout("c", 0.5),
    )
    advantages = credit(build_recipe(credit="counterfactual"), *rollouts)
    assert advantages == {"a": [[0.5], [0.75], [0.0]], "b": [[-0.5], [-0.5]], "c": [[0.0]]}
    scale = 0.5 + 1e-4
    assert credit(build_recipe(credit="counterfactual", normalize_std=True), *rollouts)["a"] == [
        [round(0.5 / scale, 9)],
        [round(0.75 / scale, 9)],
        [0.0],
    ]


@pytest.mark.parametrize("mode", ["verifier", "counterfactual"])
def test_missing_branch_scores_raise(mode: str) -> None:
    with pytest.raises(RecipeError, match=r"episode a has no (branches|without), but the episode has several trajectories\n.*fix: "):
        credit(build_recipe(credit=mode), *TREES)


def test_siblings_are_compared_at_their_branch_point() -> None:
    """a and b branch off from s; c and d share a first turn. Means: group 0.5, s a b 0.6, c d 0.35."""
    first, second, other = turn(), turn(), turn()
    tree = (
        rollout("s", 1.0, turns=(first, second, turn())),
        rollout("a", 0.6, turns=(first, second, turn()), inherited=("s", "s")),
        rollout("b", 0.2, turns=(first, turn(), turn()), inherited=("s",)),
        rollout("c", 0.4, turns=(other, turn())),
        rollout("d", 0.3, turns=(other,), inherited=("c",)),
    )
    advantages = credit(build_recipe(credit="siblings"), *tree)
    assert advantages == {"s": [[0.1, 0.2, 0.2]], "a": [[-0.2]], "b": [[-0.4, -0.4]], "c": [[-0.15, 0.05]]}
    leave_one_out = credit(build_recipe(credit="siblings", advantage="rloo"), *tree)
    assert leave_one_out == {"s": [[0.25, 0.6, 0.4]], "a": [[-0.4]], "b": [[-0.6, -0.6]], "c": [[-0.25, 0.1]]}
    assert credit(build_recipe(credit="siblings"), *TREES) == credit(build_recipe(), *TREES), "without shared turns it is the group's mean"


@settings(max_examples=examples(40))
@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=5),
    advantage=st.sampled_from(["grpo", "rloo"]),
    normalize=st.booleans(),
    copies=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_credit_counts_rollouts_not_trajectories(scores: list[float], advantage: str, normalize: bool, copies: list[int]) -> None:
    """Without branches all modes equal the estimator, and the number of workers of a rollout changes no baseline of another one."""
    plain = [rollout(str(number), score) for number, score in enumerate(scores)]
    expected = credit(build_recipe(advantage=advantage, normalize_std=normalize), *plain)
    for mode in ("branches", "roles", "verifier", "counterfactual", "siblings"):
        assert credit(build_recipe(credit=mode, advantage=advantage, normalize_std=normalize), *plain) == expected, mode
    workers = [
        rollout(str(number), score, *["worker"] * (1 + more), branches=(None, *[score] * (1 + more)))
        for number, (score, more) in enumerate(zip(scores, copies, strict=False))
    ]
    for mode in ("roles", "verifier"):
        advantages = credit(build_recipe(credit=mode, advantage=advantage, normalize_std=normalize), *workers)
        assert {name: {value for row in rows for value in row} for name, rows in advantages.items()} == {
            name: set(rows[0]) for name, rows in expected.items()
        }
    total = {name: sum(value for row in rows for value in row) for name, rows in credit(build_recipe(credit="branches"), *workers).items()}
    assert total == pytest.approx({name: rows[0][0] for name, rows in credit(build_recipe(), *plain).items()}, abs=1e-8)


def test_two_trajectories_without_scores_raise() -> None:
    group = (rollout("a", 1.0, "worker"), rollout("b", 0.0))
    with pytest.raises(RecipeError, match="episode a has no branches, but the episode has several trajectories"):
        credit(build_recipe(credit="verifier"), *group)


def unsampled() -> Turn:
    return replace(turn(), completion_ids=(), logprobs=(), versions=())


def with_turns(scored: ScoredEpisode, number: int, *turns: Turn) -> ScoredEpisode:
    trajectories = list(scored.episode.trajectories)
    trajectories[number] = replace(trajectories[number], turns=turns)
    return replace(scored, episode=replace(scored.episode, trajectories=tuple(trajectories)))


def test_trajectories_without_a_sampled_token_are_ignored() -> None:
    """A worker that never sampled a token gets no share of its rollout, and does not make equal scores different."""
    halved = with_turns(rollout("a", 1.0, "worker"), 1, turn(), unsampled())
    single = with_turns(rollout("b", 0.0, "worker"), 1, unsampled())
    assert credit(build_recipe(credit="branches"), halved, single) == {"a": [[0.25], [0.25]], "b": [[-0.5]]}
    equal = [with_turns(rollout(name, 0.5, "worker"), 1, unsampled()) for name in "ab"]
    for mode in ("roles", "verifier"):
        tree = [replace(scored, score=replace(scored.score, branches=(None, None))) for scored in equal]
        assert assemble(0, [Group(index=0, task_id="t", task_key="k", episodes=tuple(tree))], build_recipe(credit=mode)).drop_reasons == {
            0: "all_equal"
        }


def test_an_entropy_bonus_trains_groups_with_equal_scores() -> None:
    equal = (rollout("a", 0.5), rollout("b", 0.5))
    assert credit(build_recipe(entropy_coef=0.1), *equal) == {"a": [[0.0]], "b": [[0.0]]}
    groups = [Group(index=0, task_id="t", task_key="k", episodes=equal)]
    assert assemble(0, groups, build_recipe(entropy_coef=0.0)).drop_reasons == {0: "all_equal"}


def test_scores_of_a_role_that_are_equal_up_to_rounding_give_zero() -> None:
    rollouts = (rollout("a", 1.0, "worker", branches=(None, 0.1 + 0.2)), rollout("b", 0.0, "worker", branches=(None, 0.3)))
    group = Group(index=0, task_id="t", task_key="k", episodes=rollouts)
    samples = assemble(0, [group], build_recipe(credit="verifier", normalize_std=True)).batch.samples
    advantages = [max(sample.advantages, key=abs) for sample in samples]
    assert advantages[0] > 0 and advantages[2] < 0 and advantages[1] == advantages[3] == 0.0


def test_a_role_of_one_rollout_is_compared_with_its_mean() -> None:
    rollouts = (rollout("a", 1.0, "worker", "worker", branches=(None, 1.0, 0.0)), rollout("b", 0.0))
    for advantage in ("grpo", "rloo"):
        assert credit(build_recipe(credit="verifier", advantage=advantage), *rollouts)["a"][1:] == [[0.5], [-0.5]]


def test_overflowing_scores_exclude_their_group() -> None:
    """1e200 cannot be squared; three of 1.7e308 cannot be added up."""
    for scores in ((1e200, 0.0, 0.0), (1.7e308, 1.7e308, 1.6e308)):
        group = Group(index=0, task_id="t", task_key="k", episodes=tuple(rollout(n, s, "w") for n, s in zip("abc", scores, strict=True)))
        assert assemble(0, [group], build_recipe(credit="roles")).drop_reasons == {0: "non_finite_advantage"}


def test_penalties_reduce_branch_scores() -> None:
    group = Group(index=0, task_id="t", task_key="k", episodes=(rollout("a", 1.0, "worker"), rollout("b", 1.0, "worker")))
    samples = assemble(0, [group], build_recipe(credit="roles"), penalties={"a": 0.5}).batch.samples
    assert [max(sample.advantages, key=abs) for sample in samples] == [-0.25, -0.25, 0.25, 0.25]
    rollouts = (rollout("a", 1.0, "worker", without=(None, 0.25)), rollout("b", 0.25))
    group = Group(index=0, task_id="t", task_key="k", episodes=rollouts)
    samples = assemble(0, [group], build_recipe(credit="counterfactual", normalize_std=True), penalties={"a": 0.25}).batch.samples
    scale = (2 * 0.25**2) ** 0.5 + 1e-4  # std of 0.75 and 0.25
    assert samples[1].advantages[1] == pytest.approx(0.75 / scale)


def test_a_turn_shared_by_all_gets_no_credit() -> None:
    stem = turn()
    tree = (rollout("a", 1.0, turns=(stem, turn())), rollout("b", 0.0, turns=(stem, turn()), inherited=("a",)))
    for advantage, gap in (("grpo", 0.5), ("rloo", 1.0)):
        assert credit(build_recipe(credit="siblings", advantage=advantage), *tree) == {"a": [[0.0, gap]], "b": [[-gap]]}
