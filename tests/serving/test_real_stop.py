"""A real vLLM server whose engine is stopped behind healthy routes is replaced; a busy one is not. Other weights on disk never serve."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.base.liveness import Liveness
from agentrl.errors import ServingError
from agentrl.records import Completion, SamplingParams, VersionState, codec
from agentrl.serving.supervisor import SupervisedServer
from agentrl.testing.tiny_model import make_model, make_probe, token_logprobs, write_version
from agentrl.version import FolderRegistry
from tests.serving.conftest import RECIPE
from tests.serving.test_supervisor import group_members
from tests.waiting import until

pytestmark = pytest.mark.vllm
PROMPT = list(b"How many rows are there? ")
SHORT_S = 12.0  # instead of a minute; long enough for two checks of a server's tokens


async def test_a_stopped_engine_is_replaced_and_weights_that_disagree_never_serve(tmp_path: Path) -> None:
    models = {number: make_model(seed=number) for number in (0, 1)}
    registry = FolderRegistry(tmp_path / "versions")
    written = write_version(tmp_path, 0, models[0])
    folder = (tmp_path / written.folder).rename(tmp_path / "versions/000000")
    (folder / "probe.json").write_bytes(codec.to_json(make_probe(models[0])))
    registry.add(replace(written, folder="versions/000000"))
    base = registry.get(0)
    assert base is not None
    alerts: list[str] = []
    policy = SupervisedServer(RECIPE, tmp_path, registry, alert=alerts.append)

    async def ask(number: int, tokens: int) -> Completion:
        return await policy.generate(PROMPT, SamplingParams(max_tokens=tokens), request_id=f"e{number}-0", timeout_s=300.0)

    await policy.start(base)
    registry.set_state(0, VersionState.SERVING)
    server = policy._server
    assert server is not None and server.pid is not None
    server.liveness = Liveness("the inference server", first_s=120.0, least_s=SHORT_S)
    server.liveness.begin("computing tokens")
    server.stopped.least_s = 1e9  # a stopped process simulates a hanging engine
    watcher = asyncio.create_task(policy.watch(on_loss=policy.close))
    try:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(ask(number, 900) for number in range(3 * RECIPE.serving.max_num_seqs)))
        busy_s = asyncio.get_running_loop().time() - started
        await asyncio.sleep(max(0.0, 12.0 - busy_s))
        assert policy.restarts == 0 and not alerts, "three times as many long requests as slots"

        engine = max(set(group_members(server.pid)) - {server.pid}, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))
        os.kill(engine, signal.SIGSTOP)
        lost = asyncio.create_task(ask(1000, 8))
        assert await server.control.health(timeout_s=15.0) == "answers", "its routes do not detect the stop"
        await until(lambda: policy.restarts == 1, 300.0)
        await until(lambda: policy.accepts_requests, 400.0)
        assert "has made no progress for" in alerts[0] and "restart 1 of at most 5" in alerts[0]
        await asyncio.gather(lost, return_exceptions=True)
        answer = await ask(1001, 8)
        expected = token_logprobs(models[0], (*PROMPT, *answer.token_ids))[len(PROMPT) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)

        other = write_version(tmp_path, 1, models[1])
        (tmp_path / other.folder / "probe.json").write_bytes(codec.to_json(make_probe(models[1])))
        await policy.load_version(other)
        await policy.fall_back(base)
        assert policy.version == 0 and policy.restarts == 1, "version 0 is swapped in like later versions"
        answer = await ask(1002, 8)
        expected = token_logprobs(models[0], (*PROMPT, *answer.token_ids))[len(PROMPT) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-3)

        shutil.copyfile(tmp_path / other.folder / "model.safetensors", folder / "model.safetensors")
        server = policy._server
        assert server is not None and server.pid is not None
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(ServingError, match=r"started with version 0, but its logprobs differ by .* nats from .*probe.json"):
            await asyncio.wait_for(asyncio.shield(watcher), 400)
        assert not policy.accepts_requests
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await policy.close()
        registry.close()
