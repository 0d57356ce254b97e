"""Measures the hot swap on this machine: start-up, throughput, stall and agreement, compared with vLLM's reload and a server restart.

    python benchmarks/swap.py [--threads 1 2] [--swaps 10] [--hidden 128]

The policy is a random Qwen3-shaped model (hidden 128, 4 layers: 0.7M parameters); 64 requests are in flight during every swap.
Contenders: agentrl's swap; `reload_weights`, which vLLM has without agentrl's weight-transfer engine; and a restart of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.errors import ServingError
from agentrl.records import PolicyVersion, Probe, SamplingParams
from agentrl.serving import FileWeightChannel, TokenClient, VLLMServer
from agentrl.serving.probe import max_logprob_difference
from agentrl.testing.tiny_model import make_model, make_probe, write_version

IN_FLIGHT = 64
PROMPT_TOKENS = 200
COMPLETION_TOKENS = 128


class Bench:
    def __init__(self, run_dir: Path, *, threads: int, hidden: int) -> None:
        self.recipe = Recipe(
            name="swap-benchmark",
            policy=PolicyConfig(model="made here"),
            tasks=TasksConfig(family="none:none"),
            serving=ServingConfig(threads=threads),
        )
        models = [make_model(seed, hidden=hidden) for seed in range(2)]
        self.run_dir = run_dir
        self.versions: list[PolicyVersion] = [write_version(run_dir, number, model) for number, model in enumerate(models)]
        self.probes: list[Probe] = [make_probe(model) for model in models]
        self._ids = itertools.count()

    async def start(self) -> tuple[VLLMServer, float]:
        began = time.perf_counter()
        server = VLLMServer(recipe=self.recipe, model=self.run_dir / self.versions[0].folder, version=0, run_dir=self.run_dir)
        await server.start()
        return server, time.perf_counter() - began

    async def request(self, client: TokenClient, tokens: int = COMPLETION_TOKENS) -> int:
        number = next(self._ids)
        prompt = [(number * 31 + position) % 256 for position in range(PROMPT_TOKENS)]
        completion = await client.generate(prompt, SamplingParams(max_tokens=tokens), request_id=f"bench-{number}", timeout_s=300)
        return len(completion.token_ids)

    async def throughput(self, client: TokenClient) -> float:
        """Completion tokens per second with 64 requests at once, the better of two rounds."""
        rates = []
        for _ in range(2):
            began = time.perf_counter()
            tokens = sum(await asyncio.gather(*(self.request(client) for _ in range(IN_FLIGHT))))
            rates.append(tokens / (time.perf_counter() - began))
        return max(rates)

    @asynccontextmanager
    async def load(self, client: TokenClient) -> AsyncIterator[None]:
        """Keeps 64 requests in flight."""

        async def one_after_another() -> None:
            while True:
                await self.request(client)

        tasks = [asyncio.create_task(one_after_another()) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(1)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_swaps(bench: Bench, server: VLLMServer, client: TokenClient, swaps: int) -> None:
    channel = FileWeightChannel(server, registry_folder=bench.run_dir / "versions")
    reports = []
    async with bench.load(client):
        for number in (turn % 2 for turn in range(1, swaps + 1)):
            version = bench.versions[number]
            folder = bench.run_dir / version.folder
            reports.append(await channel.swap(version, folder, bench.probes[number], max_abs_diff=1e-3, timeout_s=60))
            await asyncio.sleep(0.3)
    stalls = sorted(report.stall_ms for report in reports)
    report_row("agentrl hot swap", stalls, max(report.probe_max_abs_diff for report in reports))


async def measure_reload(bench: Bench, server: VLLMServer, client: TokenClient, swaps: int) -> None:
    stalls, diffs = [], []
    async with bench.load(client):
        for number in (turn % 2 for turn in range(1, swaps + 1)):
            began = time.perf_counter()
            await server.control.pause()
            await server.control.reload(str(bench.run_dir / bench.versions[number].folder), number)
            await server.control.resume()
            stalls.append(1000 * (time.perf_counter() - began))
            diffs.append(await max_logprob_difference(server, number, bench.probes[number]))
            await asyncio.sleep(0.3)
    report_row("vLLM reload_weights", sorted(stalls), max(diffs))


def report_row(name: str, stalls_ms: list[float], diff: float) -> None:
    p90 = stalls_ms[int(0.9 * (len(stalls_ms) - 1))]
    print(f"  {name:22} stall ms p50 {statistics.median(stalls_ms):8.0f}  p90 {p90:8.0f}   probe max |diff| {diff:.2g} nats", flush=True)


async def idle_cpu(server: VLLMServer, seconds: float = 5.0) -> float:
    """Returns the share of one core that server and engine use while they are idle."""

    def used() -> float:
        pids = subprocess.run(["pgrep", "-g", str(server.pid)], capture_output=True, text=True, check=True).stdout.split()
        ticks = 0
        for pid in pids:
            with suppress(FileNotFoundError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before = used()
    await asyncio.sleep(seconds)
    return (used() - before) / seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), threads=threads, hidden=options.hidden)
            server, start_s = await bench.start()
            client = TokenClient.for_server(server)
            try:
                rate = await bench.throughput(client)
                idle = await idle_cpu(server)
                print(f"{threads} engine thread(s), load average {os.getloadavg()[0]:.1f}")
                print(f"  start {start_s:.1f} s   {rate:.0f} tok/s at {IN_FLIGHT} concurrent   idle CPU {100 * idle:.1f}%", flush=True)
                await measure_swaps(bench, server, client, options.swaps)
                await measure_reload(bench, server, client, options.swaps)
            except ServingError as error:
                print(f"  failed: {error}")
                raise
            finally:
                await client.close()
                await server.stop()
            print(f"  {'server restart':22} stall ms     {1000 * start_s:8.0f}   every request in flight is lost", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
