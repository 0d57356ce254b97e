"""Measures the prompt tokens that a vLLM server takes from its prefix cache, for groups of episodes with turns and sub-agents.

The agent ignores the text of the model. It samples, appends a tool's output, and at some turns starts two concurrent workers with the same
instruction, each in a separate trajectory. So its trees have the same shape as those of a run, with any model. The server has the flags,
block size and salts of a run.

Only complete blocks are shared, so each prompt loses half a block on average. The share of this loss depends on the length of the prompts,
so there are two workloads: one of the quickstart's size and one of a small coding agent's.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import LearnerConfig, PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Completion, Limits, Message, Parent, SamplingParams, SandboxSpec, Score, Split, Task, ToolCall
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.serving import TokenClient, VLLMServer
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing

MODEL = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tables-base"
VOCABULARY = range(100, 600)
GROUPS, SIZE, TURNS = 4, 8, 8
WORKERS_AT, WORKERS, WORKERS_TURNS = (2, 5), 2, 4
BLOCK = 32  # tokens, of the server's cache (`agentrl.serving.server`)
LONGEST = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a workload in tokens: prompts, and the texts that sub-agents get (`told`), sample (`said`) and tools print (`shown`)."""

    prompt: int
    instruction: int
    told: int
    said: int
    shown: int


WORKLOADS = {
    "short": Sizes(prompt=160, instruction=96, told=24, said=24, shown=48),
    "longer": Sizes(prompt=1024, instruction=256, told=64, said=64, shown=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """An `agentrl.protocols.Agent`: a main trajectory, and workers that it starts."""

    sizes: Sizes

    async def act(self, episode: LiveEpisode) -> str:
        main = episode.trajectories[0]
        main.add_prompt(_tokens(f"prompt of {episode.task.id}", self.sizes.prompt))
        await self._turns(episode, main, TURNS, WORKERS_AT)
        return "answered"

    async def _turns(self, episode: LiveEpisode, line: LiveTrajectory, count: int, workers_at: Sequence[int] = ()) -> None:
        for turn in range(count):
            calls = (ToolCall(name="delegate", arguments={}),) * (WORKERS if turn in workers_at else 0)
            completion = await line.sample(stop_token_ids=(), max_tokens=self.sizes.said)
            line.add_turn(completion, Message(role="assistant", content="", tool_calls=calls))
            parents = [Parent(trajectory=line.index, turn=turn, call=number) for number in range(len(calls))]
            await asyncio.gather(*(self._worker(episode, parent) for parent in parents))
            line.add_prompt(_tokens(f"shown to {episode.id} in {line.index} after {turn}", self.sizes.shown))

    async def _worker(self, episode: LiveEpisode, parent: Parent) -> None:
        line = episode.open("worker", parent=parent)
        line.add_prompt(_tokens(f"instruction of {self.sizes}", self.sizes.instruction))
        line.add_prompt(_tokens(f"told in {episode.id} at {parent.turn}.{parent.call}", self.sizes.told))
        await self._turns(episode, line, WORKERS_TURNS)
        line.end("answered")


@dataclass(slots=True)
class PrefixCounter:
    """A policy that records which prompt tokens are new: nodes of the prefix tree that the server did not sample."""

    policy: TokenClient
    prompt_tokens: int = 0
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # (node, token) -> node after it
    prompt_nodes: set[int] = field(default_factory=set)  # nodes in a prompt
    sampled: set[int] = field(default_factory=set)  # nodes whose keys and values the server computed while it sampled

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        completion = await self.policy.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self.prompt_tokens += len(prompt_ids)
        at = 0
        for token in prompt_ids:
            at = self._after(at, token)
            self.prompt_nodes.add(at)
        for token in completion.token_ids[:-1]:
            at = self._after(at, token)
            self.sampled.add(at)
        return completion

    def _after(self, at: int, token: int) -> int:
        return self.nodes.setdefault((at, token), len(self.nodes) + 1)

    @property
    def unique_tokens(self) -> int:
        return len(self.prompt_nodes - self.sampled)


def measure(folder: Path) -> dict[str, Any]:
    """Starts the server and runs the groups. Raises `InfrastructureError` or `UserError` if the server does not start."""
    return asyncio.run(_measure(folder))


async def _measure(folder: Path) -> dict[str, Any]:
    model = _long_model(folder / "model")
    recipe = Recipe(
        name="prefix",
        policy=PolicyConfig(model=str(model), dtype="float32", max_model_len=LONGEST),
        tasks=TasksConfig(family="unused:unused"),
        serving=ServingConfig(threads=1, max_num_seqs=64, kv_cache_gb=2, startup_timeout_s=1800.0),
        learner=LearnerConfig(max_tokens_per_microbatch=LONGEST),
    )
    server = VLLMServer(recipe=recipe, model=model, version=0, run_dir=folder)
    await server.start()
    try:
        client = TokenClient.for_server(server)
        rows = {name: await _measure_workload(server, client, sizes) for name, sizes in WORKLOADS.items()}
        await client.close()
    finally:
        await server.stop()
    workers = len(WORKERS_AT) * WORKERS
    workload = (
        f"{GROUPS} groups of {SIZE} episodes at once on vLLM: {TURNS} turns of the main agent, and {workers} sub-agents of"
        f" {WORKERS_TURNS} turns in each, {WORKERS} at a time. First seen are tokens that were in no prompt before and that the server did"
        f" not sample itself. It shares only whole blocks of {BLOCK} tokens, the smallest size that vLLM supports on a CPU."
    )
    return {"rows": rows, "workload": workload}


def _long_model(folder: Path) -> Path:
    """Returns the quickstart's model with a longer context. Its text at such lengths is noise, which does not matter here."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    return folder


async def _measure_workload(server: VLLMServer, client: TokenClient, sizes: Sizes) -> dict[str, Any]:
    before, seen = await _counters(server), PrefixCounter(client)
    await _play(seen, sizes)
    after = await _counters(server)
    queries, hits = (after[name] - before[name] for name in ("queries", "hits"))
    if queries != seen.prompt_tokens:
        raise RuntimeError(f"the server counted {queries:.0f} prompt tokens, {seen.prompt_tokens} were sent")
    return {"sizes": asdict(sizes), "prompt_tokens": seen.prompt_tokens, "unique_tokens": seen.unique_tokens, "hit_tokens": int(hits)}


async def _play(policy: PrefixCounter, sizes: Sizes) -> None:
    runner = EpisodeRunner(
        agent=Tree(sizes=sizes),
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=LONGEST,
        request_timeout_s=1800.0,
    )

    async def judged(task: Task, episode: object) -> Score:
        return Score(value=1.0)

    groups = GroupRunner(runner=runner, scorer=judged, slots=asyncio.Semaphore(GROUPS * SIZE), group_size=SIZE, max_retries=0)
    for group in await asyncio.gather(*(groups.run_group(index, _task(index, sizes)) for index in range(GROUPS))):
        if any(scored.score.value is None for scored in group.episodes):
            raise RuntimeError(f"an episode failed: {[scored.episode.failures for scored in group.episodes]}")


def _task(index: int, sizes: Sizes) -> Task:
    return Task(
        id=f"t{index} of {sizes.prompt}",
        family="f",
        prompt=(Message(role="user", content="-"),),
        tools=(),
        sandbox=SandboxSpec(image="-"),
        verifiers=(),
        data={},
        split=Split.TRAIN,
        limits=Limits(turns=100, turn_tokens=sizes.said, episode_tokens=LONGEST, wall_s=3600.0),
    )


async def _counters(server: VLLMServer) -> dict[str, float]:
    metrics = await server.control.metrics()
    return {name: metrics[f"vllm:prefix_cache_{name}_total"] for name in ("queries", "hits")}


def _tokens(what: str, count: int) -> list[int]:
    return random.Random(what).choices(VOCABULARY, k=count)
