"""What a model's own output provokes further down the line is the policy's: kept as it was sampled, and scored."""

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
    """A server that refuses the request of one turn."""

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
    (one,) = (await groups.run_group(0, task)).episodes
    return one


def is_scored_as_the_policys(one: Any, *, turns: int) -> None:
    assert one.score.value == 0.0 and not one.episode.left_out
    assert {failure.blame for failure in one.episode.failures} == {Blame.POLICY}
    assert [bool(turn.completion_ids) for turn in one.episode.trajectories[0].turns] == [True] * turns


async def test_a_server_that_refuses_what_the_policy_said(tokenizer: Any, task: Task, make_runner: Any) -> None:
    one = await scored(make_runner, refusing(tokenizer, 1, RequestRefused("status 400: no such token")), task)
    is_scored_as_the_policys(one, turns=1)
    assert one.episode.trajectories[0].turns[0].tool_results


@pytest.mark.parametrize(
    ("turn", "error"),
    [(0, RequestRefused("status 400: unknown key")), (1, ServingError("status 500")), (1, ServingError("connection lost"))],
)
async def test_a_server_that_refuses_anything_or_fails_is_the_machines(
    tokenizer: Any, task: Task, make_runner: Any, turn: int, error: Exception
) -> None:
    one = await scored(make_runner, refusing(tokenizer, turn, error), task)
    assert one.score.value is None and one.episode.failures[-1].blame is Blame.INFRASTRUCTURE


ERRORS = (
    UserError("the chat template cannot render messages"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    RecursionError("too deep"),
    KeyError("arguments"),
    OverflowError("id out of range"),
    MemoryError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["parse", "tool_delta"])
async def test_a_tokenizer_or_template_that_cannot_take_what_the_policy_said(
    tokenizer: Any, task: Task, make_runner: Any, error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tokenizer)

    def choke(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(type(chat), where, choke)
    one = await scored(make_runner, ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), task, chat)
    is_scored_as_the_policys(one, turns=1)
    assert one.episode.failures[-1].kind == "not_taken" and type(error).__name__ in one.episode.failures[-1].message


async def test_a_template_that_cannot_take_the_task_is_not_the_policys(
    tokenizer: Any, task: Task, make_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(tokenizer)

    def choke(*arguments: Any, **options: Any) -> Any:
        raise KeyError("role")

    monkeypatch.setattr(type(chat), "opening", choke)
    one = await scored(make_runner, ScriptedPolicy.saying(tokenizer, PYTHON, SUBMIT), task, chat)
    assert one.score.value is None and one.episode.failures[-1].blame is Blame.INFRASTRUCTURE
