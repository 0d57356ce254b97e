"""One real server for all tests that need one, because starting a server is slow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.records import Completion, PolicyVersion, Probe, SamplingParams, SwapReport
from agentrl.serving import FileWeightChannel, TokenClient, VLLMServer, judge_server, server
from agentrl.serving.process import server_environment
from tests.e2e.forked import forked_server
from tests.learner import preloaded

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

RECIPE = Recipe(
    name="serving-tests",
    device="cpu",
    policy=PolicyConfig(model="unused", max_model_len=1024),
    tasks=TasksConfig(family="unused:unused"),
    serving=ServingConfig(threads=1, max_num_seqs=64, kv_cache_gb=0.25, startup_timeout_s=400),
)


@dataclass
class Served:
    """A running server, its client and channel, and the models that its versions were written from."""

    server: VLLMServer
    client: TokenClient
    channel: FileWeightChannel
    models: dict[int, Qwen3ForCausalLM]
    versions: dict[int, PolicyVersion]
    probes: dict[int, Probe] = field(default_factory=dict)

    async def generate(self, prompt_ids: list[int], *, timeout_s: float = 300.0, **params: object) -> Completion:
        self._requests = getattr(self, "_requests", 0) + 1
        return await self.client.generate(
            prompt_ids,
            SamplingParams(**params),  # type: ignore[arg-type]
            request_id=f"test-{self._requests}",
            timeout_s=timeout_s,
        )

    async def swap(self, number: int, *, probe: int | None = None) -> SwapReport:
        folder = self.server.run_dir / self.versions[number].folder
        probe = number if probe is None else probe
        return await self.channel.swap(self.versions[number], folder, self.probes[probe], max_abs_diff=1e-3, timeout_s=300)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    from agentrl.testing.tiny_model import make_model, make_probe, write_version

    run_dir: Path = tmp_path_factory.mktemp("run")
    models = {number: make_model(seed=number) for number in (0, 1, 2)}
    versions = {number: write_version(run_dir, number, model) for number, model in models.items()}
    server = VLLMServer(recipe=RECIPE, model=run_dir / versions[0].folder, version=0, run_dir=run_dir)
    await server.start()
    client = TokenClient.for_server(server)
    channel = FileWeightChannel(server, registry_folder=run_dir / "versions")
    probes = {number: make_probe(model) for number, model in models.items()}
    yield Served(server=server, client=client, channel=channel, models=models, versions=versions, probes=probes)
    await channel.close()
    await client.close()
    await server.stop()


@pytest.fixture(scope="package")
def server_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address of a process that has imported the modules that servers need."""
    folder = tmp_path_factory.mktemp("servers")
    with preloaded.hosting(folder, "servers", server_environment(str(folder), cpu_threads=1)) as host:
        yield host


@pytest.fixture
def forked_servers(server_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks servers from `server_host`, for tests that start several and do not test how they start."""
    for module in (server, judge_server):
        monkeypatch.setattr(module, "launch_command", forked_server(server_host, module.launch_command))
