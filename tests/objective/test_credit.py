"""Credit modes on small trees, with answers worked out by hand, and the laws that all of them keep."""

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


def recipe(**objective: Any) -> Recipe:
    data = {"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "objective": {"normalize_std": False, **objective}}
    return build(data | ({"rollout": {"group": {"branches": 2}}} if objective.get("credit") == "siblings" else {}))


def turn() -> Turn:
    """One prompt token below 100 and one sampled token, its own."""
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
    name: str, score: float, *roles: str, turns: tuple[Turn, ...] = (), inherited: tuple[str, ...] = (), **said: Any
) -> ScoredEpisode:
    """A main trajectory of these turns (one of its own, if none are given), and trajectories of the roles, called in its first turn."""
    main = Trajectory(agent="main", turns=turns or (turn(),), inherited=inherited)
    others = (Trajectory(agent=role, turns=(turn(),), parent=Parent(trajectory=0, turn=0, call=at)) for at, role in enumerate(roles))
    episode = Record(id=name, task_id="t", task_key="k", trajectories=(main, *others))
    return ScoredEpisode(episode=episode, score=Score(value=score, **said))


def credit(made: Recipe, *episodes: ScoredEpisode) -> dict[str, list[list[float]]]:
    """Episode -> [trajectory][trained token], rounded."""
    group = Group(index=0, task_id="t", task_key="k", episodes=episodes)
    found: dict[str, list[list[float]]] = {}
    for sample in assemble(0, [group], made).batch.samples:
        values = [round(value, 9) for value, on in zip(sample.advantages, sample.loss_mask, strict=True) if on]
        found.setdefault(sample.episode_id, []).append(values)
    return found


TREES = (rollout("a", 1.0, "worker", "worker"), rollout("b", 0.0, "worker"), rollout("c", 0.5), rollout("d", 0.5, "summary"))


def test_episode_and_branches() -> None:
    """A = s - 0.5; a has three trajectories, b and d two."""
    assert credit(recipe(), *TREES) == {"a": [[0.5]] * 3, "b": [[-0.5]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}
    found = credit(recipe(credit="branches"), *TREES)
    assert found == {"a": [[round(0.5 / 3, 9)]] * 3, "b": [[-0.25]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}


def test_roles() -> None:
    """Workers: a and b have some, whose mean is 0.5, also with two in a. The one summary is its own baseline."""
    assert credit(recipe(credit="roles"), *TREES) == {"a": [[0.5]] * 3, "b": [[-0.5]] * 2, "c": [[0.0]], "d": [[0.0]] * 2}
    shifted = (*TREES[:3], rollout("d", 0.9, "worker"))  # main: mean 0.6; workers: (1 + 0 + 0.9) / 3
    workers = [round(score - 1.9 / 3, 9) for score in (1.0, 0.0, 0.9)]
    main = [0.4, -0.6, -0.1, 0.3]
    found = credit(recipe(credit="roles"), *shifted)
    assert found == {
        "a": [[main[0]], [workers[0]], [workers[0]]],
        "b": [[main[1]], [workers[1]]],
        "c": [[main[2]]],
        "d": [[main[3]], [workers[2]]],
    }
    left_out = credit(recipe(credit="roles", advantage="rloo"), *shifted)
    assert left_out["b"] == [[-0.8], [-0.95]], "against (1 + 0.5 + 0.9) / 3, and (1 + 0.9) / 2"


def test_credit_from_the_verifier() -> None:
    """a's workers were worth 1 and 0, b's 0.2: u = 0.5 and 0.2, mean 0.35. Those of which nothing is said have their episode's score."""
    said = (
        rollout("a", 1.0, "worker", "worker", branches=(None, 1.0, 0.0)),
        rollout("b", 0.0, "worker", branches=(None, 0.2)),
        rollout("c", 0.5),
    )
    found = credit(recipe(credit="verifier"), *said)
    assert found == {"a": [[0.5], [0.65], [-0.35]], "b": [[-0.5], [-0.15]], "c": [[0.0]]}
    assert credit(recipe(credit="verifier", advantage="rloo"), *said)["a"] == [[0.75], [0.8], [-0.2]]
    spread = (((1 - 0.35) ** 2 + 0.35**2) / 2 + 0.15**2) ** 0.5 + 1e-4
    assert credit(recipe(credit="verifier", normalize_std=True), *said)["a"][1] == [round(0.65 / spread, 9)]
    alike = [replace(one, score=replace(one.score, value=0.5)) for one in said]
    assert credit(recipe(credit="verifier"), *alike)["a"] == [[0.0], [0.65], [-0.35]], "equal scores teach where branches differ"


def test_counterfactual_credit() -> None:
    said = (
        rollout("a", 1.0, "worker", "worker", without=(None, 0.25, 1.0)),
        rollout("b", 0.0, "worker", without=(None, 0.5)),
        rollout("c", 0.5),
    )
    found = credit(recipe(credit="counterfactual"), *said)
    assert found == {"a": [[0.5], [0.75], [0.0]], "b": [[-0.5], [-0.5]], "c": [[0.0]]}
    scale = 0.5 + 1e-4
    assert credit(recipe(credit="counterfactual", normalize_std=True), *said)["a"] == [
        [round(0.5 / scale, 9)],
        [round(0.75 / scale, 9)],
        [0.0],
    ]


@pytest.mark.parametrize("mode", ["verifier", "counterfactual"])
def test_missing_branch_scores_raise(mode: str) -> None:
    with pytest.raises(RecipeError, match=r"episode a, which has several trajectories, has no (branches|without)\n.*fix: "):
        credit(recipe(credit=mode), *TREES)


def test_siblings_are_compared_at_their_branch_point() -> None:
    """a and b go on from stem s, whose own rest is s; c and d share t. Means: group 0.5, s a b 0.6, c d 0.35."""
    first, second, other = turn(), turn(), turn()
    tree = (
        rollout("s", 1.0, turns=(first, second, turn())),
        rollout("a", 0.6, turns=(first, second, turn()), inherited=("s", "s")),
        rollout("b", 0.2, turns=(first, turn(), turn()), inherited=("s",)),
        rollout("c", 0.4, turns=(other, turn())),
        rollout("d", 0.3, turns=(other,), inherited=("c",)),
    )
    found = credit(recipe(credit="siblings"), *tree)
    assert found == {"s": [[0.1, 0.2, 0.2]], "a": [[-0.2]], "b": [[-0.4, -0.4]], "c": [[-0.15, 0.05]]}
    left_out = credit(recipe(credit="siblings", advantage="rloo"), *tree)
    assert left_out == {"s": [[0.25, 0.6, 0.4]], "a": [[-0.4]], "b": [[-0.6, -0.6]], "c": [[-0.25, 0.1]]}
    assert credit(recipe(credit="siblings"), *TREES) == credit(recipe(), *TREES), "where nothing is shared it is the group's mean"


@settings(max_examples=examples(40))
@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=5),
    advantage=st.sampled_from(["grpo", "rloo"]),
    normalize=st.booleans(),
    copies=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_credit_counts_rollouts_not_trajectories(scores: list[float], advantage: str, normalize: bool, copies: list[int]) -> None:
    """Without branches all modes are the estimator; and how many workers a rollout has changes no baseline of others."""
    plain = [rollout(str(number), score) for number, score in enumerate(scores)]
    expected = credit(recipe(advantage=advantage, normalize_std=normalize), *plain)
    for mode in ("branches", "roles", "verifier", "counterfactual", "siblings"):
        assert credit(recipe(credit=mode, advantage=advantage, normalize_std=normalize), *plain) == expected, mode
    cut = [
        rollout(str(number), score, *["worker"] * (1 + more), branches=(None, *[score] * (1 + more)))
        for number, (score, more) in enumerate(zip(scores, copies, strict=False))
    ]
    for mode in ("roles", "verifier"):
        found = credit(recipe(credit=mode, advantage=advantage, normalize_std=normalize), *cut)
        assert {name: {value for line in lines for value in line} for name, lines in found.items()} == {
            name: set(lines[0]) for name, lines in expected.items()
        }
    total = {name: sum(value for line in lines for value in line) for name, lines in credit(recipe(credit="branches"), *cut).items()}
    assert total == pytest.approx({name: lines[0][0] for name, lines in credit(recipe(), *plain).items()}, abs=1e-8)


def test_two_trajectories_without_scores_raise() -> None:
    group = (rollout("a", 1.0, "worker"), rollout("b", 0.0))
    with pytest.raises(RecipeError, match="episode a, which has several trajectories, has no branches"):
        credit(recipe(credit="verifier"), *group)


def unsampled() -> Turn:
    return replace(turn(), completion_ids=(), logprobs=(), versions=())


def with_turns(one: ScoredEpisode, line: int, *turns: Turn) -> ScoredEpisode:
    lines = list(one.episode.trajectories)
    lines[line] = replace(lines[line], turns=turns)
    return replace(one, episode=replace(one.episode, trajectories=tuple(lines)))


def test_trajectories_without_a_sampled_token_are_ignored() -> None:
    """A worker that was called and never sampled: not a share of its rollout, and no difference between equal ones."""
    halved = with_turns(rollout("a", 1.0, "worker"), 1, turn(), unsampled())
    whole = with_turns(rollout("b", 0.0, "worker"), 1, unsampled())
    assert credit(recipe(credit="branches"), halved, whole) == {"a": [[0.25], [0.25]], "b": [[-0.5]]}
    equal = [with_turns(rollout(name, 0.5, "worker"), 1, unsampled()) for name in "ab"]
    for mode in ("roles", "verifier"):
        said = [replace(one, score=replace(one.score, branches=(None, None))) for one in equal]
        assert assemble(0, [Group(index=0, task_id="t", task_key="k", episodes=tuple(said))], recipe(credit=mode)).drop_reasons == {
            0: "all_equal"
        }


def test_an_entropy_bonus_trains_groups_with_equal_scores() -> None:
    equal = (rollout("a", 0.5), rollout("b", 0.5))
    assert credit(recipe(entropy_coef=0.1), *equal) == {"a": [[0.0]], "b": [[0.0]]}
    groups = [Group(index=0, task_id="t", task_key="k", episodes=equal)]
    assert assemble(0, groups, recipe(entropy_coef=0.0)).drop_reasons == {0: "all_equal"}


def test_scores_of_a_role_that_are_equal_up_to_rounding_give_zero() -> None:
    said = (rollout("a", 1.0, "worker", branches=(None, 0.1 + 0.2)), rollout("b", 0.0, "worker", branches=(None, 0.3)))
    group = Group(index=0, task_id="t", task_key="k", episodes=said)
    samples = assemble(0, [group], recipe(credit="verifier", normalize_std=True)).batch.samples
    advantages = [max(sample.advantages, key=abs) for sample in samples]
    assert advantages[0] > 0 and advantages[2] < 0 and advantages[1] == advantages[3] == 0.0


def test_a_role_of_one_rollout_is_compared_with_its_mean() -> None:
    said = (rollout("a", 1.0, "worker", "worker", branches=(None, 1.0, 0.0)), rollout("b", 0.0))
    for advantage in ("grpo", "rloo"):
        assert credit(recipe(credit="verifier", advantage=advantage), *said)["a"][1:] == [[0.5], [-0.5]]


def test_overflowing_scores_exclude_their_group() -> None:
    """1e200 cannot be squared; three of 1.7e308 cannot be added up."""
    for scores in ((1e200, 0.0, 0.0), (1.7e308, 1.7e308, 1.6e308)):
        group = Group(index=0, task_id="t", task_key="k", episodes=tuple(rollout(n, s, "w") for n, s in zip("abc", scores, strict=True)))
        assert assemble(0, [group], recipe(credit="roles")).drop_reasons == {0: "non_finite_advantage"}


def test_penalties_reduce_branch_scores() -> None:
    group = Group(index=0, task_id="t", task_key="k", episodes=(rollout("a", 1.0, "worker"), rollout("b", 1.0, "worker")))
    samples = assemble(0, [group], recipe(credit="roles"), penalties={"a": 0.5}).batch.samples
    assert [max(sample.advantages, key=abs) for sample in samples] == [-0.25, -0.25, 0.25, 0.25]
    said = (rollout("a", 1.0, "worker", without=(None, 0.25)), rollout("b", 0.25))
    group = Group(index=0, task_id="t", task_key="k", episodes=said)
    samples = assemble(0, [group], recipe(credit="counterfactual", normalize_std=True), penalties={"a": 0.25}).batch.samples
    scale = (2 * 0.25**2) ** 0.5 + 1e-4  # of 0.75 and 0.25
    assert samples[1].advantages[1] == pytest.approx(0.75 / scale)


def test_a_turn_shared_by_all_gets_no_credit() -> None:
    stem = turn()
    tree = (rollout("a", 1.0, turns=(stem, turn())), rollout("b", 0.0, turns=(stem, turn()), inherited=("a",)))
    for advantage, gap in (("grpo", 0.5), ("rloo", 1.0)):
        assert credit(recipe(credit="siblings", advantage=advantage), *tree) == {"a": [[0.0, gap]], "b": [[-gap]]}
