"""The rollout function: turns of all episodes in one batch, concurrent calls, and the tokens that TRL trains on."""

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
    """Samples the completions of a script, batch by batch."""

    def __init__(self, *turns: list[str]) -> None:
        self.tokenizer = byte_tokenizer()
        self._turns = list(turns)
        self.requests: list[list[list[int]]] = []

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, fields: Any, generations: int
    ) -> tuple[list[list[int]], None]:
        self.requests.append(prompt_ids)
        texts = self._turns.pop(0)
        assert len(texts) == len(prompt_ids), "one batch per turn"
        return [self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts], None


def call(name: str, argument: str, value: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "{value}"}}}}</tool_call>'


class BarrierSandboxes(ScriptedSandboxes):
    """Its programs end only when `count` of them run at once."""

    def __init__(self, count: int) -> None:
        super().__init__(lambda code: ExecResult(exit_code=0, stdout="7\n", stderr="", wall_s=0.0))
        self._barrier = asyncio.Barrier(count)

    async def open(self, *arguments: Any, **options: Any) -> Any:
        sandbox = await super().open(*arguments, **options)
        run_python = sandbox.python

        async def python(code: str, **limits: Any) -> ExecResult:
            async with asyncio.timeout(5):
                await self._barrier.wait()
            return await run_python(code, **limits)

        assert isinstance(sandbox, ScriptedSandbox)
        sandbox.python = python  # type: ignore[method-assign]
        return sandbox


def test_calls_of_a_turn_run_concurrently_and_the_mask_marks_sampled_tokens() -> None:
    host = Host(RECIPE, FAMILY, chat_of(shared_tokenizer()), BarrierSandboxes(2))
    truth = str(FAMILY.task(Split.TRAIN, 0).data["answer"])
    program, submission = call("python", "code", "print(7)"), call("submit", "answer", truth)
    trainer = Trainer([program, program, submission], [submission, call("submit", "answer", "wrong")])
    try:
        batch_rows = Together(host)([[{"role": "user", "content": "", "group": 0}]] * 3, trainer)
    finally:
        host.close()
    assert sorted(batch_rows["score"]) == [0.0, 1.0, 1.0] and batch_rows["score"][2] == 1.0
    assert [len(batch) for batch in trainer.requests] == [3, 2]
    tokenizer, first = trainer.tokenizer, batch_rows["score"].index(1.0)  # of the episodes that ran a program
    ids, mask = batch_rows["completion_ids"][first], batch_rows["env_mask"][first]
    assert tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own]) == f"{program}<|im_end|>{submission}<|im_end|>"
    tool_text = tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if not own])
    assert "<tool_response>\n7\n</tool_response>" in tool_text
    context = batch_rows["prompt_ids"][first] + ids
    assert any(context[: len(prompt)] == prompt for prompt in trainer.requests[1]), "sampled tokens are in the context unchanged"
    assert batch_rows["env_mask"][2] == [1] * len(batch_rows["completion_ids"][2])
    assert batch_rows["logprobs"] is None


async def test_a_batch_is_handed_over_when_all_running_episodes_have_requested_a_completion() -> None:
    policy = Waiting(3)
    params = SamplingParams(max_tokens=4, temperature=1.0, stop_token_ids=(0,))
    asking = [asyncio.create_task(policy.generate([n], params, request_id=str(n), timeout_s=1.0)) for n in range(2)]
    await asyncio.sleep(0)
    assert policy.batches.empty()
    policy.over()
    assert [request.prompt_ids for request in policy.batches.get(timeout=1)] == [(0,), (1,)]
    policy.over()
    policy.over()
    assert policy.batches.get(timeout=1) == [], "the last episode is over"
    for task in asking:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
