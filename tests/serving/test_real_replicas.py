"""Two real vLLM servers as one policy: tokens and logprobs are the policy's through a swap and the death of one server."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.records import Completion, SamplingParams, VersionState, codec
from agentrl.serving.server_pool import ServerPool
from agentrl.testing.tiny_model import make_model, make_probe, token_logprobs, write_version
from agentrl.version import FolderRegistry
from tests.serving.conftest import RECIPE
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forked_servers")]

PROMPT = list(b"How many rows are there? " * 8)  # several blocks of the prefix cache


async def test_two_servers_are_one_policy_through_a_swap_and_a_death(tmp_path: Path) -> None:
    models = {number: make_model(seed=number) for number in (0, 1)}
    registry = FolderRegistry(tmp_path / "versions")
    for number, model in models.items():
        written = write_version(tmp_path, number, model)
        folder = (tmp_path / written.folder).rename(tmp_path / f"versions/{number:06d}")
        (folder / "probe.json").write_bytes(codec.to_json(make_probe(model)))
        registry.add(replace(written, folder=f"versions/{folder.name}"))
    base, newer = registry.get(0), registry.get(1)
    assert base is not None and newer is not None
    policy = ServerPool(RECIPE.but("serving.replicas=2"), tmp_path, registry)
    context: dict[str, list[int]] = {"e0": [*PROMPT], "e1": [*reversed(PROMPT)]}

    async def turn(episode: str, number: int, *, version: int) -> int:
        """Samples a turn of an episode and compares it with the learner's model; returns the replica."""
        ids = context[episode]
        params = SamplingParams(max_tokens=16)
        answer: Completion = await policy.generate(ids, params, request_id=f"{episode}-{number}", timeout_s=300.0)
        assert [span.version for span in answer.versions] == [version]
        expected = token_logprobs(models[version], (*ids, *answer.token_ids))[len(ids) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)
        context[episode] = [*ids, *answer.token_ids]
        replica = policy._routing._episodes[episode].replica
        assert replica is not None
        return replica

    await policy.start(base)
    registry.set_state(0, VersionState.SERVING)
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    try:
        with policy.episode("e0", "a task"), policy.episode("e1", "another"):
            assert [await turn(episode, 0, version=0) for episode in context] == [0, 1]
            assert [await turn(episode, 1, version=0) for episode in context] == [0, 1]
            for number in (0, 1):
                server = policy._replicas[number]._server
                assert server is not None and server.log_path == tmp_path / f"logs/server-{number}.log"
                assert (await server.control.metrics())["vllm:prefix_cache_hits_total"] >= len(PROMPT) // 32 * 32, "its context was cached"
            report = await policy.swap(newer)
            assert report.probe_max_abs_diff < 1e-3 and policy.version == 1
            assert [await turn(episode, 2, version=1) for episode in context] == [0, 1]
            server = policy._replicas[0]._server
            assert server is not None and server.pid is not None
            os.killpg(server.pid, signal.SIGKILL)
            await until(lambda: policy._ready() == [1])  # before the pool detects the death, a request may be lost
            assert await turn("e0", 3, version=1) == 1, "the other replica continues from the exact tokens, before the restart"
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()
