"""Runs the episodes with agentrl: groups of the turn loop with exact tokens and a record of every turn, over the token client.

    python -m benchmarks.load.ours --port PORT turns --episodes 64 --at-once 16
    python -m benchmarks.load.ours --port PORT crowd --episodes 4000 --delay 10 30 --ramp 20 --window 30
    python -m benchmarks.load.ours --port PORT idle --episodes 500 1000 2000 4000 --after 4

Prints JSON. `turns`: CPU time of this process per turn while several episodes run, and the latency of a turn while one runs. The first
episodes, which load and compile code, are excluded. `crowd`: latency of turns while `--episodes` are in flight. `idle`: memory of this
process while `--episodes` wait for the model.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat, TurnLoop, tool
from agentrl.agent.typed import typed_tool
from agentrl.base.processes import rare_collections
from agentrl.records import Completion, Episode, Limits, Message, SamplingParams, SandboxSpec, Score, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.serving import TokenClient
from agentrl.serving.weight_state import WeightState
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from benchmarks.load.script import Script, tokenizer
from benchmarks.load.server import delay_of

WARM = 4


@tool
async def look(at: str) -> str:
    """Look at something.

    Args:
        at: what to look at
    """
    return _SHOWN


_SHOWN = ""


def schema() -> dict[str, Any]:
    return dict(typed_tool(look).schema)


async def judged(task: Task, episode: Episode) -> Score:
    return Score(value=1.0)


def task_of(script: Script, *, wall_s: float = 600.0) -> Task:
    global _SHOWN
    _SHOWN = script.shown
    return Task(
        id="t",
        family="f",
        prompt=(Message(role="user", content=script.prompt),),
        tools=("benchmarks.load.ours:look",),
        sandbox=SandboxSpec(image="-"),
        verifiers=(),
        data={},
        split=Split.TRAIN,
        limits=Limits(turns=script.turns, turn_tokens=512, episode_tokens=100_000, wall_s=wall_s),
    )


def runner_of(policy: Any, *, at_once: int, request_timeout_s: float = 120.0) -> GroupRunner:
    """Creates groups of one episode, because only episodes are measured."""
    runner = EpisodeRunner(
        agent=TurnLoop(chat=ChatFormat(tokenizer())),
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),  # never opened, because the tool runs on the host
        sampling=Sampling(),
        max_model_len=100_000,
        request_timeout_s=request_timeout_s,
    )
    runner.pace.set_idle_token_s(
        1.0
    )  # seconds a token, as a server's start measures it: no first request is cut off, which this server cannot do
    return GroupRunner(runner=runner, scorer=judged, slots=asyncio.Semaphore(at_once), group_size=1, max_retries=0)


def check_episode(scored: ScoredEpisode, script: Script) -> None:
    """Raises `RuntimeError` if an episode did not follow the script."""
    episode = scored.episode
    if episode.failures or len(episode.trajectories[0].turns) != script.turns or scored.score.value != 1.0:
        raise RuntimeError(f"an episode failed: {episode.failures} after {len(episode.trajectories[0].turns)} turns")


async def turns(url: str, script: Script, args: argparse.Namespace) -> dict[str, Any]:
    client = TokenClient(url, weights=WeightState(0))
    groups, task = runner_of(client, at_once=args.at_once), task_of(script)

    async def play(first: int, count: int) -> None:
        for group in await asyncio.gather(*(groups.run_group(index, task) for index in range(first, first + count))):
            check_episode(group.episodes[0], script)

    await play(0, WARM)
    gc.collect()
    cpu = time.process_time()
    await play(WARM, args.episodes)
    cpu_s, wall = time.process_time() - cpu, time.perf_counter()
    for index in range(args.alone):
        await play(WARM + args.episodes + index, 1)
    wall_s = time.perf_counter() - wall
    await client.close()
    return {"cpu_ms": 1000 * cpu_s / (args.episodes * script.turns), "alone_ms": 1000 * wall_s / (args.alone * script.turns)}


class Timed:
    """A policy that records the duration of each turn, from the previous completion to its own, and without the server's time."""

    def __init__(self, policy: Any, delay_s: tuple[float, float]) -> None:
        self.took: list[tuple[float, float]] = []  # seconds of a turn, in total and without the server
        self.waiting = 0
        self.ended = False
        self._policy, self._delay_s = policy, delay_s
        self._last: dict[str, float] = {}

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        episode = request_id.rpartition("-")[0]
        began = self._last.get(episode, time.perf_counter())
        self.waiting += 1
        try:
            completion: Completion = await self._policy.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        finally:
            self.waiting -= 1
        self._last[episode] = ended = time.perf_counter()
        self.took.append((ended - began, ended - began - delay_of(request_id.encode(), self._delay_s)))
        if self.ended:  # later turns are not measured
            await asyncio.Event().wait()
        return completion


async def crowd(url: str, script: Script, args: argparse.Namespace) -> dict[str, Any]:
    """Runs `episodes` concurrently, started over `ramp` seconds. Measures the turns that end within the following `window` seconds.

    As in a run, full garbage collections are rare (`agentrl.base.processes.rare_collections`): one is timed after the window.
    """
    async with rare_collections():
        return await _crowd(url, script, args)


async def _crowd(url: str, script: Script, args: argparse.Namespace) -> dict[str, Any]:
    client = TokenClient(url, weights=WeightState(0))
    policy = Timed(client, tuple(args.delay))
    groups, task = runner_of(policy, at_once=args.episodes[0], request_timeout_s=300.0), task_of(script, wall_s=3600.0)
    running = []
    for index in range(args.episodes[0]):
        running.append(asyncio.create_task(groups.run_episode(task, name=f"e{index}")))
        await asyncio.sleep(args.ramp / args.episodes[0])
    await asyncio.sleep(args.delay[1])  # by then every first turn is over
    policy.took.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(args.window)
    took, waited = policy.took, policy.waiting
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    began = time.perf_counter()
    gc.collect()
    collection_s = time.perf_counter() - began
    policy.ended = True
    ended_jobs = [job for job in running if job.done()]
    for job in running:
        job.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.close()
    for job in ended_jobs:
        check_episode(job.result(), script)
    turn, added = (sorted(values) for values in zip(*took, strict=True))
    stats = {"episodes": args.episodes[0], "in_flight": waited, "turns": len(took), "cpu_share": cpu_share, "collection_s": collection_s}
    return stats | {f"{name}_{at}_s": quantile(values, at / 100) for name, values in (("turn", turn), ("added", added)) for at in (50, 99)}


async def idle(url: str, script: Script, args: argparse.Namespace) -> dict[str, Any]:
    """Measures memory while episodes that completed `after` turns wait for a completion that never arrives."""
    client = TokenClient(url, weights=WeightState(0))
    policy = Timed(client, (0.0, 0.0))
    groups, task = runner_of(policy, at_once=max(args.episodes), request_timeout_s=3600.0), task_of(script, wall_s=3600.0)
    running: list[asyncio.Task[Any]] = []
    kib = []
    for count in sorted(args.episodes):
        while len(running) < count:
            indices = range(len(running), min(count, len(running) + 50))
            running += [asyncio.create_task(groups.run_episode(task, name=f"e{index}")) for index in indices]
            while len(policy.took) < len(running) * args.after or policy.waiting < len(running):
                if broken := next((job for job in running if job.done()), None):
                    check_episode(broken.result(), script)
                await asyncio.sleep(0.01)
        gc.collect()
        kib.append(_rss_kib())
    for job in running:
        job.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.close()
    return {"episodes": sorted(args.episodes), "rss_kib": kib}


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _rss_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("turns", "crowd", "idle"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, nargs="+", default=[64])
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--alone", type=int, default=8, help="sequential episodes that measure the latency of a turn")
    parser.add_argument("--delay", type=float, nargs=2, default=(0.0, 0.0))
    parser.add_argument("--ramp", type=float, default=20.0)
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--after", type=int, default=4)
    parser.add_argument("--core", type=int, help="core to which this process is pinned")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # so that its time is this process's, on one thread
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    if args.kind == "turns":
        [args.episodes] = args.episodes
    measure = {"turns": turns, "crowd": crowd, "idle": idle}[args.kind]
    print(json.dumps(asyncio.run(measure(f"http://127.0.0.1:{args.port}", Script.of(args.turns), args))))


if __name__ == "__main__":
    main()
