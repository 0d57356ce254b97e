from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.config import EvalConfig
from agentrl.errors import RecipeError, UserError
from agentrl.evaluation.splits import AttemptTotals, evaluate_split
from agentrl.observe.report_data import read_run
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.reward import TaskScorer
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.session import measure
from agentrl.session.preflight import check_thinking
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer
from tests.failure.traces import python, scored, turn


async def verdict(task: Task, episode: Episode) -> Score:
    scores = task.data["score"].split()
    return Score(value=float(scores[int(episode.id.split("-")[3]) if len(scores) > 1 else 0]))


class Family:
    """Tasks with given scores."""

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


def runner(policy: ScriptedPolicy | None = None) -> GroupRunner:
    tokenizer = policy.tokenizer if policy is not None else shared_tokenizer()
    episodes = EpisodeRunner(
        policy=policy or ScriptedPolicy.saying(tokenizer, "4"),
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=chat_of(tokenizer)),
        sampling=Sampling(),
        max_model_len=1000,
        request_timeout_s=60.0,
    )
    return GroupRunner(runner=episodes, scorer=TaskScorer(), slots=asyncio.Semaphore(4), group_size=1, max_retries=0)


async def test_a_score_that_is_not_finite_counts_in_no_rate() -> None:
    evaluation = await evaluate_split(runner(), Family("1", "inf", "0", "-inf"), Split.HELDOUT, 4, phase="before", step=0)
    assert evaluation.rate is not None
    assert (evaluation.rate.value, evaluation.rate.n, evaluation.excluded) == (0.5, 2, 2) and len(evaluation.transcripts) == 4


async def test_an_evaluation_without_a_finite_score_has_no_rate() -> None:
    evaluation = await evaluate_split(runner(), Family("inf", "inf"), Split.HELDOUT, 2, phase="before", step=0)
    assert evaluation.rate is None and evaluation.excluded == 2


async def test_the_attempts_at_a_task_count_as_one_mean() -> None:
    family = Family("1 0 0 0", "1 1 inf 1", "0 0 0 0")
    split = await evaluate_split(runner(), family, Split.HELDOUT, 3, phase="before", step=0, attempts=4)
    assert split.rate is not None
    assert (split.rate.value, split.rate.n, split.attempts, split.episodes, split.excluded) == (pytest.approx(1.25 / 3), 3, 4, 12, 1)
    assert split.pass_at == {1: pytest.approx(1.25 / 3), 2: pytest.approx(1.5 / 3), 4: 0.5}, "pass@4 covers the tasks with four scores"
    assert split.tokens_mean == len(byte_tokenizer().encode("4")) + 1 and [line.attempts for line in split.compute] == [1, 2, 4]


def test_pass_at_k_uses_the_threshold_of_the_task() -> None:
    attempts = [scored(turn(python("print(4)", "4")), value=value) for value in (1.0, 300.0, 480.0)]
    for threshold, shares in ((475.0, {1: pytest.approx(1 / 3), 2: pytest.approx(2 / 3), 3: 1.0}), (None, {})):
        totals = AttemptTotals()
        totals.add("t", attempts, threshold=threshold)
        evaluation = totals.evaluation({}, attempts=3)
        assert evaluation.pass_at == shares and bool(evaluation.compute) == bool(shares)
        assert evaluation.rate is not None and evaluation.rate.value == pytest.approx(781 / 3)


async def score_finished_thinking(task: Task, episode: Episode) -> Score:
    return Score(value=float("so 4" in episode.trajectories[0].turns[0].message.content))


async def test_success_against_thinking_is_measured_written_and_drawn(tmp_path: Path) -> None:
    """Unbounded thinking solves the task; a bound cuts it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m.content }}{% for", "{{ m.reasoning_content }}</think>{{ m.content }}{% for"
    )
    long_answer = "<think>\n" + "hm " * 10 + "so 4\n</think>\n\n4"
    policy = ScriptedPolicy(tokenizer, lambda turn, name: "4" if name.endswith(".answer") else long_answer)
    group_runner = runner(policy)
    family, chat = Family("0", "0"), ChatFormat(tokenizer)
    object.__setattr__(group_runner, "scorer", score_finished_thinking)
    unbounded = await evaluate_split(group_runner, family, Split.HELDOUT, 2, phase="eval", step=0, attempts=2)
    bounded = await evaluate_split(group_runner, family, Split.HELDOUT, 2, phase="eval_think20", step=0, attempts=2, thinking_tokens=20)
    assert unbounded.rate is not None and bounded.rate is not None and (unbounded.rate.value, bounded.rate.value) == (1.0, 0.0)
    assert bounded.tokens_mean == 20 + len("4") + 1, "the mark is not a sampled token"
    measure.save_evaluation(tmp_path, "eval", {Split.HELDOUT: unbounded}, {Split.HELDOUT: {20: bounded}})
    (thinking,) = json.loads((tmp_path / "evaluations.json").read_text())["eval"]["heldout"]["thinking"]
    assert (thinking["thinking_tokens"], thinking["value"], thinking["pass_at"]) == (20, 0.0, {"1": 0.0, "2": 0.0})
    assert measure.read_evaluation(tmp_path, "eval")["heldout"]["thinking"] == [thinking]
    assert unbounded.tokens_mean is not None
    assert read_run(tmp_path).thinking == (
        ("heldout", 1, ((22.0, 0.0), (unbounded.tokens_mean, 1.0))),
        ("heldout", 2, ((44.0, 0.0), (2 * unbounded.tokens_mean, 1.0))),
    )
    check_thinking(chat, family, EvalConfig(thinking_tokens=(20,)))
    with pytest.raises(RecipeError, match="leaves no tokens for an answer"):
        check_thinking(chat, family, EvalConfig(thinking_tokens=(20, 256)))
    with pytest.raises(UserError, match="no <think> and </think>"):
        check_thinking(chat_of(shared_tokenizer()), family, EvalConfig(thinking_tokens=(20,)))
