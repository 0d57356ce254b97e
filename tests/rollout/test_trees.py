"""Episodes with several trajectories: recorded, captured, stored, rendered, and turned into samples as one rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import GroupConfig, ObjectiveConfig, PolicyConfig, Recipe, RolloutConfig, TasksConfig
from agentrl.experience import SqliteStore
from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.objective import assemble, counted_samples
from agentrl.objective.losses import Segments, loss_denominator, token_weights
from agentrl.observe import write_report
from agentrl.protocols import LiveEpisode
from agentrl.records import Episode, EpisodeState, Group, Limits, Message, Parent, Score, ScoredEpisode, Task, Trajectory, codec
from agentrl.records.sampling import Sampling
from agentrl.rollout import CaptureState, EpisodeRunner
from agentrl.session.transcript import append_transcripts, transcript
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of
from tests.rollout.delegating import Delegating


def asking(*questions: str) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': 'ask', 'arguments': {'question': question}})}</tool_call>" for question in questions)


# In sampling order: the main agent asks two sub-agents at once, and the first of them asks another.
RESPONSES = (asking("width?", "height?"), asking("unit?"), "cm", "3 cm", "4 cm", "12 cm2")
PARENTS = [None, Parent(trajectory=0, turn=0, call=0), Parent(trajectory=1, turn=0, call=0), Parent(trajectory=0, turn=0, call=1)]


@pytest.fixture
def tree(task: Task) -> Task:
    return replace(task, tools=(), limits=Limits(turns=8, turn_tokens=400, episode_tokens=4000))


@pytest.fixture
def delegating(tokenizer: Any) -> Callable[..., EpisodeRunner]:
    def make_runner(policy: Any) -> EpisodeRunner:
        return EpisodeRunner(
            agent=Delegating(chat=chat_of(tokenizer)),
            policy=policy,
            sandboxes=ScriptedSandboxes(printing("")),
            sampling=Sampling(),
            max_model_len=4096,
            request_timeout_s=60.0,
        )

    return make_runner


def contents(trajectory: Trajectory) -> list[str]:
    return [turn.message.content or "calls" for turn in trajectory.turns]


async def test_a_sub_agent_has_its_own_trajectory_and_context(tokenizer: Any, tree: Task, delegating: Any) -> None:
    policy = ScriptedPolicy.saying(tokenizer, *RESPONSES)
    episode: Episode = await delegating(policy).run(tree, episode_id="e")
    assert [trajectory.parent for trajectory in episode.trajectories] == PARENTS
    assert [trajectory.agent for trajectory in episode.trajectories] == ["main", "helper", "helper", "helper"]
    assert [contents(trajectory) for trajectory in episode.trajectories] == [["calls", "12 cm2"], ["calls", "3 cm"], ["cm"], ["4 cm"]]
    assert [trajectory.prompt[0].content for trajectory in episode.trajectories[1:]] == ["width?", "unit?", "height?"]
    assert [trajectory.stop_reason for trajectory in episode.trajectories] == ["answered"] * 4 and episode.answer == "12 cm2"
    assert [result.output for result in episode.trajectories[0].turns[0].tool_results] == ["3 cm", "4 cm"]
    sampled = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    assert len(policy.prompts) == len(sampled) == len(RESPONSES)
    for trajectory in episode.trajectories:
        context: tuple[int, ...] = ()
        for turn in trajectory.turns:
            assert context + turn.prompt_ids in policy.prompts, "each turn was sampled from its trajectory's tokens"
            context += turn.prompt_ids + turn.completion_ids
    assert "height?" not in tokenizer.decode([*policy.prompts[1]]) and "unit?" not in tokenizer.decode([*policy.prompts[5]])


async def test_limits_apply_to_the_episode_and_to_each_context(tokenizer: Any, tree: Task, delegating: Any) -> None:
    for turns in range(1, len(RESPONSES)):
        policy = ScriptedPolicy.saying(tokenizer, *RESPONSES)
        short = replace(tree, limits=replace(tree.limits, turns=turns))
        episode = await delegating(policy).run(short, episode_id="e")
        assert len(policy.prompts) == turns and episode.answer is None and not episode.left_out
        assert episode.trajectories[0].stop_reason == "turn_limit"
    endless = ScriptedPolicy(tokenizer, lambda turn, _: asking("x" * 300) if turn == 0 else "y" * 300)
    tight = replace(tree, limits=replace(tree.limits, episode_tokens=900))
    episode = await delegating(endless).run(tight, episode_id="e")
    assert all(sum(len(u.prompt_ids) + len(u.completion_ids) for u in trajectory.turns) <= 900 for trajectory in episode.trajectories)
    assert not episode.left_out


class States:
    """An `on_turn` that stores every state in its serialized form."""

    def __init__(self) -> None:
        self.seen: list[EpisodeState] = []

    async def __call__(self, turns: int, capture: CaptureState) -> None:
        state = await capture()
        assert state is not None and state.turn_count == turns
        self.seen.append(codec.from_json(EpisodeState, codec.to_json(state)))


async def test_a_tree_resumes_from_any_boundary_including_within_a_sub_agent(tokenizer: Any, tree: Task, delegating: Any) -> None:
    states = States()
    uninterrupted = await delegating(ScriptedPolicy.saying(tokenizer, *RESPONSES)).run(tree, episode_id="e", on_turn=states)
    assert [state.turn_count for state in states.seen] == [3, 5]
    assert [trajectory.stop_reason for trajectory in states.seen[0].trajectories] == ["", "", "answered"]
    for state in states.seen:
        policy = ScriptedPolicy.saying(tokenizer, *RESPONSES)
        resumed = await delegating(policy).run(tree, episode_id="e", start=state)
        assert untimed(resumed) == untimed(uninterrupted) and len(policy.prompts) == len(RESPONSES) - state.turn_count
        branch = await delegating(ScriptedPolicy.saying(tokenizer, *RESPONSES)).run(tree, episode_id="b", start=state)
        inherited = [len(trajectory.turns) for trajectory in state.trajectories] + [0] * (4 - len(state.trajectories))
        assert [trajectory.inherited for trajectory in branch.trajectories] == [("e",) * count for count in inherited]
        assert branch.completion_tokens == sum(len(turn.completion_ids) for each in branch.trajectories for turn in each.own_turns)


def untimed(episode: Episode) -> list[Any]:
    no_times: dict[str, Any] = {"generate_s": 0.0, "tool_s": 0.0, "ended_at": 0.0}
    return [replace(trajectory, turns=tuple(replace(turn, **no_times) for turn in trajectory.turns)) for trajectory in episode.trajectories]


async def test_a_tree_is_stored_and_rendered(tokenizer: Any, tree: Task, delegating: Any, tmp_path: Path) -> None:
    episode = await delegating(ScriptedPolicy.saying(tokenizer, *RESPONSES)).run(tree, episode_id="e")
    scored = ScoredEpisode(episode=episode, score=Score(value=1.0, turn_rewards=((0.0, 1.0), (0.0, 1.0), (1.0,), (1.0,))))
    group = Group(index=0, task_id=tree.id, task_key=tree.key, episodes=(scored,))
    store = SqliteStore(tmp_path / "experience.sqlite")
    try:
        assert store.put(group) and store.groups([0]) == (group,)
    finally:
        store.close()
    line = transcript(tree, scored, phase="train", step=0)
    assert [message["content"] for message in line["messages"]] == ["How many?", "", "3 cm", "4 cm", "12 cm2"]
    assert line["stop_reason"] == "answered" and line["versions"] == [0]
    first, inner, second = line["trajectories"]
    assert [message["content"] for message in first["messages"]] == ["width?", "", "cm", "3 cm"]
    assert (inner["agent"], inner["parent"], inner["stop_reason"]) == ("helper", {"trajectory": 1, "turn": 0, "call": 0}, "answered")
    assert [message["content"] for message in second["messages"]] == ["height?", "4 cm"]
    append_transcripts(tmp_path / "episodes" / "train.jsonl", [line])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(text in page for text in ("width?", "unit?", "height?", "12 cm2"))


class Misbehaving:
    """An agent that misbehaves in one of several ways."""

    def __init__(self, misbehave: Callable[[Any], Any]) -> None:
        self.misbehave = misbehave

    async def act(self, episode: Any) -> Any:
        return self.misbehave(episode)


@pytest.mark.parametrize(
    "misbehave",
    [
        lambda episode: None,
        lambda episode: "",
        lambda episode: "\ud800",
        lambda episode: episode.trajectories[0].end(3),
        lambda episode: episode.trajectories[0].add_results((), wall_s=0.0),
        lambda episode: episode.open("helper", parent=Parent(trajectory=0, turn=0)),
        lambda episode: episode.open("helper", parent=Parent(trajectory=1, turn=0)),
        lambda episode: setattr(episode, "answer", 3) or "answered",
    ],
)
async def test_a_misbehaving_agent_fails_its_episode_and_raises_nothing(misbehave: Any, tree: Task, delegating: Any) -> None:
    episode = await replace(delegating(None), agent=Misbehaving(misbehave)).run(tree, episode_id="e")
    assert episode.left_out and episode.trajectories[0].stop_reason == "failed" and episode.answer is None


async def test_an_agent_cannot_sample_past_a_limit(tokenizer: Any, tree: Task, delegating: Any) -> None:
    class Greedy:
        async def act(self, episode: LiveEpisode) -> str:
            trajectory = episode.trajectories[0]
            trajectory.add_prompt((1, 2, 3))
            while True:
                completion = await trajectory.sample(stop_token_ids=())
                trajectory.add_turn(completion, Message(role="assistant", content=""))

    policy = ScriptedPolicy(tokenizer, lambda turn, _: "more")
    episode = await replace(delegating(policy), agent=Greedy()).run(tree, episode_id="e")
    assert len(policy.prompts) == tree.limits.turns and episode.left_out
    assert "cannot have another turn: turn_limit" in episode.failures[0].message


RECIPE = Recipe(name="r", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="f:F"), rollout=RolloutConfig(group=GroupConfig(size=3)))


def scored(episode: Episode, value: float) -> ScoredEpisode:
    return ScoredEpisode(episode=episode, score=Score(value=value))


async def trees(tokenizer: Any, tree: Task, delegating: Any) -> tuple[Group, Group]:
    """Returns three attempts, the first with three sub-agents, and three attempts with the same scores and no sub-agents."""
    delegated = await delegating(ScriptedPolicy.saying(tokenizer, *RESPONSES)).run(tree, episode_id="e0")
    plain = [await delegating(ScriptedPolicy.saying(tokenizer, f"{n} cm2")).run(tree, episode_id=f"e{n}") for n in range(3)]
    groups = [
        Group(index=0, task_id="t", task_key="k", episodes=tuple(map(scored, episodes, (1.0, 0.0, 0.5))))
        for episodes in ((delegated, plain[1], plain[2]), plain)
    ]
    return groups[0], groups[1]


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++", "reinforce++-baseline"])
async def test_credit_and_baseline_count_rollouts_not_trajectories(tokenizer: Any, tree: Task, delegating: Any, advantage: Any) -> None:
    recipe = replace_objective(advantage=advantage)
    delegated, plain = [assemble(0, [group], recipe).batch.samples for group in await trees(tokenizer, tree, delegating)]
    assert [sample.episode_id for sample in delegated] == ["e0"] * 4 + ["e1", "e2"]
    advantages = {(s.episode_id, value) for s in delegated for value, trained in zip(s.advantages, s.loss_mask, strict=True) if trained}
    expected = {(s.episode_id, value) for s in plain for value, trained in zip(s.advantages, s.loss_mask, strict=True) if trained}
    assert advantages == expected and len(advantages) == 3, "an attempt's advantage does not depend on how many trajectories it has"


@pytest.mark.parametrize(("aggregation", "counted"), [("sequence_mean", 3.0), ("constant", 300.0)])
async def test_aggregations_count_rollouts_not_trajectories(
    tokenizer: Any, tree: Task, delegating: Any, aggregation: Any, counted: float
) -> None:
    delegated, plain = [assemble(0, [group], RECIPE).batch.samples for group in await trees(tokenizer, tree, delegating)]
    assert loss_denominator(delegated, aggregation, length=100) == loss_denominator(plain, aggregation, length=100) == counted
    assert [sample.rollout_tokens for sample in plain] == [None] * 3
    weights: dict[str, float] = {}
    for sample in delegated:
        (row,) = plan_micro_batches([sample], rank=0, ranks=1, max_tokens=10_000)
        packed = build_micro_batch(row, torch.device("cpu"))
        c = token_weights("sequence_mean", Segments.of(packed.sequence), torch.float64, rollout_tokens=packed.rollout_tokens)
        weights[sample.episode_id] = weights.get(sample.episode_id, 0.0) + float(c.sum())
    assert weights == pytest.approx({"e0": 1.0, "e1": 1.0, "e2": 1.0}), "all rollouts have the same weight, each in its own micro-batch"


async def test_every_sampled_token_of_a_tree_is_trained_once_in_its_own_context(tokenizer: Any, tree: Task, delegating: Any) -> None:
    group, _ = await trees(tokenizer, tree, delegating)
    samples = assemble(0, [group], RECIPE).batch.samples
    trajectories = [trajectory for attempt in group.episodes for trajectory in attempt.episode.trajectories]
    assert len(samples) == len(trajectories) and samples[0].token_ids != samples[1].token_ids
    for sample, trajectory in zip(samples, trajectories, strict=True):
        assert sample.token_ids == tuple(token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids))
        trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
        assert trained == [token for turn in trajectory.turns for token in turn.completion_ids]
    assert [sample.episode_id for sample in counted_samples([group])] == [sample.episode_id for sample in samples]


async def test_branches_of_a_tree_train_shared_turns_once(tokenizer: Any, tree: Task, delegating: Any) -> None:
    states = States()
    stem = await delegating(ScriptedPolicy.saying(tokenizer, *RESPONSES)).run(tree, episode_id="e", on_turn=states)
    others = (*RESPONSES[:3], "5 cm", "6 cm", "30 cm2")
    branch = await delegating(ScriptedPolicy.saying(tokenizer, *others)).run(tree, episode_id="b", start=states.seen[0])
    group = Group(index=0, task_id="t", task_key="k", episodes=(scored(stem, 1.0), scored(branch, 0.0)))
    samples = assemble(0, [group], RECIPE).batch.samples
    assert sum(sum(sample.loss_mask) for sample in samples) == stem.completion_tokens + branch.completion_tokens
    assert [(sample.episode_id, any(sample.loss_mask)) for sample in samples] == [("e", True)] * 4 + [("b", True)] * 3


def replace_objective(**settings: Any) -> Recipe:
    return RECIPE.model_copy(update={"objective": ObjectiveConfig(**settings)})
