"""Failures provoked by the model's output are blamed on the policy: recorded as sampled, and scored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent import TurnLoop
from agentrl.errors import RequestRefused, ServingError, UserError
from agentrl.records import Blame, Episode, Score, Task
from agentrl.rollout import GroupRunner
from agentrl.testing import ScriptedPolicy
from tests.chats import chat_of

PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "print(3)"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {"answer": "3"}}</tool_call>'


async def judged(task: Task, episode: Episode) -> Score:
    return Score(value=float(episode.answer == "3"))


class Refusing(ScriptedPolicy):
    """A server that rejects the request of one turn."""

    refused: int
    error: Exception

    async def generate(self, *arguments: Any, request_id: str, timeout_s: float) -> Any:
        if request_id.endswith(f"-{self.refused}"):
            raise self.error
        return await super().generate(*arguments, request_id=request_id, timeout_s=timeout_s)


def refusing(tokenizer: Any, turn: int, error: Exception) -> Refusing:
    policy = Refusing.saying(tokenizer, PYTHON, SUBMIT)
    policy.refused, policy.error = turn, error
    return policy


async def scored(make_runner: Any, policy: Any, task: Task, chat: Any = None) -> Any:
    runner = make_runner(policy)
    if chat is not None:
        runner = replace(runner, agent=TurnLoop(chat=chat))
    groups = GroupRunner(runner=runner, scorer=judged, slots=asyncio.Semaphore(1), group_size=1, max_retries=0)
    (attempt,) = (await groups.run_group(0, task)).episodes
    return attempt


def check_blamed_on_policy(attempt: Any, *, turns: int) -> None:
    assert attempt.score.value == 0.0 and not attempt.episode.left_out
    assert {failure.blame for failure in attempt.episode.failures} == {Blame.POLICY}
    assert [bool(turn.completion_ids) for turn in attempt.episode.trajectories[0].turns] == [True] * turns


async def test_a_request_rejected_for_the_policys_text_is_blamed_on_the_policy(tokenizer: Any, task: Task, make_runner: Any) -> None:
    attempt = await scored(make_runner, refusing(tokenizer, 1, RequestRefused("status 400: no such token")), task)
    check_blamed_on_policy(attempt, turns=1)
    assert attempt.episode.trajectories[0].turns[0].tool_results


@pytest.mark.parametrize(
    ("turn", "error"),
    [(0, RequestRefused("status 400: unknown key")), (1, ServingError("status 500")), (1, ServingError("connection lost"))],
)
async def test_a_server_that_rejects_everything_or_fails_is_an_infrastructure_fault(
    tokenizer: Any, task: Task, make_runner: Any, turn: int, error: Exception
) -> None:
    attempt = await scored(make_runner, refusing(tokenizer, turn, error), task)
    assert attempt.score.value is None and attempt.episode.failures[-1].blame is Blame.INFRASTRUCTURE


ERRORS = (
    UserError("the chat template cannot render messages"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    RecursionError("too deep"),
    KeyError("arguments"),
    OverflowError("id out of range"),
    MemoryError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["parse", "tool_delta"])
async def test_a_failing_tokenizer_or_template_is_blamed_on_the_policys_text(
    tokenizer: Any, task: Task, make_runner: Any, error: Exception, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tokenizer)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(type(chat), method, fail)
    attempt = await scored(make_runner, ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), task, chat)
    check_blamed_on_policy(attempt, turns=1)
    assert attempt.episode.failures[-1].kind == "not_taken" and type(error).__name__ in attempt.episode.failures[-1].message


async def test_a_template_that_fails_on_the_task_is_not_blamed_on_the_policy(
    tokenizer: Any, task: Task, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tokenizer)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise KeyError("role")

    monkeypatch.setattr(type(chat), "opening", fail)
    attempt = await scored(make_runner, ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), task, chat)
    assert attempt.score.value is None and attempt.episode.failures[-1].blame is Blame.INFRASTRUCTURE
