from __future__ import annotations

import asyncio

import pytest

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.run.evaluate import evaluate
from agentrl.sampling import Sampling
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing


async def verdict(task: Task, episode: Episode) -> Score:
    scores = task.data["score"].split()
    return Score(value=float(scores[int(episode.id.split("-")[3]) if len(scores) > 1 else 0]))


class Family:
    """Tasks whose scores are as given."""

    name = "family"

    def __init__(self, *scores: str) -> None:
        self.scores = scores

    def size(self, split: Split) -> int | None:
        return len(self.scores)

    def task(self, split: Split, index: int) -> Task:
        return Task(
            id=f"{index}",
            family="family",
            prompt=(Message(role="user", content="q"),),
            tools=(),
            sandbox=SandboxSpec(image="none"),
            verifiers=(f"{__file__}:verdict",),
            data={"score": self.scores[index]},
            split=split,
        )

    def gold(self, task: Task) -> str:
        return ""


def runner() -> GroupRunner:
    tokenizer = byte_tokenizer()
    episodes = EpisodeRunner(
        policy=ScriptedPolicy.saying(tokenizer, "4"),
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=ChatFormat(tokenizer)),
        sampling=Sampling(),
        max_model_len=1000,
        request_timeout_s=60.0,
    )
    return GroupRunner(runner=episodes, score=TaskScorer(), slots=asyncio.Semaphore(4), group_size=1, max_retries=0)


async def test_a_score_that_is_not_finite_counts_in_no_rate() -> None:
    done = await evaluate(runner(), Family("1", "inf", "0", "-inf"), Split.HELDOUT, 4, phase="before", step=0)
    assert done.rate is not None
    assert (done.rate.value, done.rate.n, done.left_out) == (0.5, 2, 2) and len(done.transcripts) == 4


async def test_an_evaluation_without_a_finite_score_has_no_rate() -> None:
    done = await evaluate(runner(), Family("inf", "inf"), Split.HELDOUT, 2, phase="before", step=0)
    assert done.rate is None and done.left_out == 2


async def test_attempts_at_a_task_are_one_figure_of_it() -> None:
    family = Family("1 0 0 0", "1 1 inf 1", "0 0 0 0")
    done = await evaluate(runner(), family, Split.HELDOUT, 3, phase="before", step=0, attempts=4)
    assert done.rate is not None
    assert (done.rate.value, done.rate.n, done.attempts, done.episodes, done.left_out) == (pytest.approx(1.25 / 3), 3, 4, 12, 1)
    assert done.pass_at == {1: pytest.approx(1.25 / 3), 2: pytest.approx(1.5 / 3), 4: 0.5}, "pass@4 is of the tasks with four scores"
    assert done.tokens_mean == len(byte_tokenizer().encode("4")) + 1 and [line.attempts for line in done.compute] == [1, 2, 4]
