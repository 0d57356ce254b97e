"""The family `pages`: the results of scripted strategies with the agent of its recipe, and its verifier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import ChatFormat
from agentrl.cli.running import load_recipe
from agentrl.errors import UserError
from agentrl.objective import assemble
from agentrl.plugins import parts
from agentrl.records import Episode, Group, ScoredEpisode, Split
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from rewards.pages import correct_number
from sandboxes.pages import Pages
from sandboxes.pages.scripted import NOWHERE, alone, noting, splitting
from tests.agent.trees import call, user_prompt

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["policy.max_model_len=1080", "rollout.compaction=0.6"]
FAMILY = Pages(pages=5, entries=12, turn_tokens=700, episode_tokens=1080)


@pytest.fixture(scope="module")
def make_runner() -> Callable[..., EpisodeRunner]:
    _, recipe = load_recipe(ROOT / "recipes" / "pages.py", SHORT)
    tokenizer = byte_tokenizer()

    def make(strategy: Any) -> EpisodeRunner:
        chat = ChatFormat(tokenizer)
        return EpisodeRunner(
            agent=parts.make_part(parts.AGENT, recipe.rollout.agent, chat=chat, **recipe.rollout.agent_settings),
            policy=ReadingPolicy(tokenizer, strategy),
            sandboxes=ScriptedSandboxes(printing("")),
            sampling=Sampling(),
            max_model_len=recipe.policy.max_model_len,
            request_timeout_s=60.0,
        )

    return make


async def attempts(runner: EpisodeRunner, count: int) -> list[tuple[Episode, float]]:
    results = []
    for index in range(count):
        task = FAMILY.task(Split.TRAIN, index)
        episode = await runner.run(task, episode_id=f"e{index}")
        score = await correct_number(task, episode)
        assert not episode.left_out and score.value is not None
        results.append((episode, score.value))
    return results


async def test_splitting_and_noting_solve_tasks_that_exceed_one_context(make_runner: Callable[..., EpisodeRunner]) -> None:
    split = await attempts(make_runner(splitting), 6)
    assert [value for _, value in split] == [1.0] * 6 and all(len(episode.trajectories) == 6 for episode, _ in split)
    noted = await attempts(make_runner(noting), 6)
    assert [value for _, value in noted] == [1.0] * 6 and any(len(episode.trajectories) > 1 for episode, _ in noted)
    forgetful = await attempts(make_runner(alone), 6)
    pages = [int(FAMILY.task(Split.TRAIN, index).data["page"]) for index in range(6)]
    assert [value for _, value in forgetful] == [float(page <= 2) for page in pages], "two pages fit, and no notes are taken"
    assert 0.0 < sum(value for _, value in forgetful) < 6.0


async def test_verifier_scores_each_sub_agent(make_runner: Callable[..., EpisodeRunner]) -> None:
    task = FAMILY.task(Split.TRAIN, 1)
    page = int(task.data["page"])

    def saying(answer: str, number: int) -> Callable[[str], str]:
        """Returns a strategy whose sub-agent of one page answers without reading it."""
        return lambda context: (
            call("submit", answer=answer) if user_prompt(context).endswith(f"Read page {number}.") else splitting(context)
        )

    scored = []
    for name, strategy in (("good", splitting), ("lazy", saying("777", page % 5 + 1)), ("blind", saying(NOWHERE, page))):
        episode = await make_runner(strategy).run(task, episode_id=name)
        scored.append(ScoredEpisode(episode=episode, score=await correct_number(task, episode)))
    good, wrong, missed = (attempt.score for attempt in scored)
    assert good.branches == (None, *[1.0] * 5) and good.without == (None, *[0.0 if at == page else 1.0 for at in range(1, 6)])
    assert wrong.branches == (None, *[0.0 if at == page % 5 + 1 else 1.0 for at in range(1, 6)])
    assert missed.branches == (None, *[0.0 if at == page else 1.0 for at in range(1, 6)])
    assert (good.value, missed.value) == (1.0, 0.0)
    group = Group(index=0, task_id=task.id, task_key=task.key, episodes=tuple(scored))
    samples = assemble(0, [group], load_recipe(ROOT / "recipes" / "pages.py", SHORT)[1]).batch.samples
    credit = {(sample.episode_id, number % 6): max(sample.advantages, key=abs) for number, sample in enumerate(samples)}
    assert credit["blind", page] < 0 < credit["blind", page % 5 + 1], "only the sub-agent that missed it is blamed"


def test_tasks_are_pure_and_splits_share_no_name() -> None:
    assert Pages(seed=3).task(Split.TRAIN, 7) == Pages(seed=3).task(Split.TRAIN, 7) != Pages(seed=4).task(Split.TRAIN, 7)
    task = Pages().task(Split.TRAIN, 0)
    lines = [line for text in task.files.values() for line in text.split("\n")]
    assert len(lines) == len(set(lines)) == 100 and lines.count(f"{task.data['name']}: {task.data['answer']}") == 1
    assert f"{task.data['name']}: {task.data['answer']}" in task.files[f"page{task.data['page']}.txt"].split("\n")
    tables = [Pages().task(split, 0).files.values() for split in (Split.TRAIN, Split.HELDOUT)]
    names = [{line.partition(":")[0] for text in texts for line in text.split("\n")} for texts in tables]
    assert not names[0] & names[1]
    for wrong in (lambda: Pages(pages=1), lambda: Pages().task(Split.TRAIN, -1), lambda: Pages().task(Split.HELDOUT_REAL, 0)):
        with pytest.raises(UserError):
            wrong()
