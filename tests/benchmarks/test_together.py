"""The rollout function: turns of all episodes in one batch, calls side by side, and the tokens that TRL trains on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.config import PolicyConfig, Recipe, TasksConfig
from agentrl.records import ExecResult, SamplingParams, Split
from agentrl.testing import ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import ScriptedSandbox
from benchmarks.contest.environment import Host
from benchmarks.contest.together import Together, Waiting
from sandboxes.tables import Tables
from tests.chats import chat_of, shared_tokenizer

RECIPE = Recipe(name="peers", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="sandboxes.tables:Tables"))
FAMILY = Tables(seed=0, episode_tokens=4000)
RECIPE = RECIPE.but("policy.max_model_len=4000")


class Trainer:
    """Samples what a script says: of each batch, in order."""

    def __init__(self, *turns: list[str]) -> None:
        self.tokenizer = byte_tokenizer()
        self._turns = list(turns)
        self.asked: list[list[list[int]]] = []

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, generations: int
    ) -> tuple[list[list[int]], None]:
        self.asked.append(prompt_ids)
        texts = self._turns.pop(0)
        assert len(texts) == len(prompt_ids), "one batch a turn"
        return [self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts], None


def call(name: str, argument: str, value: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}</tool_call>'


class Meeting(ScriptedSandboxes):
    """Its programs end when `count` of them run at once, and never before."""

    def __init__(self, count: int) -> None:
        super().__init__(lambda code: ExecResult(exit_code=0, stdout="7\n", stderr="", wall_s=0.0))
        self._barrier = asyncio.Barrier(count)

    async def open(self, *arguments: Any, **named: Any) -> Any:
        sandbox = await super().open(*arguments, **named)
        plain = sandbox.python

        async def python(code: str, **limits: Any) -> ExecResult:
            async with asyncio.timeout(5):
                await self._barrier.wait()
            return await plain(code, **limits)

        assert isinstance(sandbox, ScriptedSandbox)
        sandbox.python = python  # type: ignore[method-assign]
        return sandbox


def test_calls_of_a_turn_run_at_once_and_every_token_is_told_who_wrote_it() -> None:
    host = Host(RECIPE, FAMILY, chat_of(shared_tokenizer()), Meeting(2))
    right = str(FAMILY.task(Split.TRAIN, 0).data["answer"])
    program, done = call("python", "code", "print(7)"), call("submit", "answer", right)
    trainer = Trainer([program, program, done], [done, call("submit", "answer", "wrong")])
    try:
        made = Together(host)([[{"role": "user", "content": "", "group": 0}]] * 3, trainer)
    finally:
        host.close()
    assert sorted(made["score"]) == [0.0, 1.0, 1.0] and made["score"][2] == 1.0
    assert [len(batch) for batch in trainer.asked] == [3, 2]
    tokenizer, first = trainer.tokenizer, made["score"].index(1.0)  # of those that ran a program
    ids, mask = made["completion_ids"][first], made["env_mask"][first]
    assert tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own]) == f"{program}<|im_end|>{done}<|im_end|>"
    told = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if not own])
    assert "<tool_response>\n7\n</tool_response>" in told
    whole = made["prompt_ids"][first] + ids
    assert any(whole[: len(asked)] == asked for asked in trainer.asked[1]), "what was sampled is in the context as it was sampled"
    assert made["env_mask"][2] == [1] * len(made["completion_ids"][2])
    assert made["logprobs"] is None


async def test_a_batch_is_handed_over_when_all_that_still_play_have_asked() -> None:
    policy = Waiting(3)
    params = SamplingParams(max_tokens=4, temperature=1.0, stop_token_ids=(0,))
    asking = [asyncio.create_task(policy.generate([n], params, request_id=str(n), timeout_s=1.0)) for n in range(2)]
    await asyncio.sleep(0)
    assert policy.batches.empty()
    policy.over()
    assert [request.prompt_ids for request in policy.batches.get(timeout=1)] == [(0,), (1,)]
    policy.over()
    policy.over()
    assert policy.batches.get(timeout=1) == [], "the last one is over"
    for task in asking:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
