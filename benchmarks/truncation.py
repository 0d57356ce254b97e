"""Measures the cost of truncated sampling: the server's rate, the learner's output head, and stored bytes, at a vocabulary of 49,152.

    python benchmarks/truncation.py [--threads 2] [--repeat 3]

The policy is a random Qwen3-shaped model of SmolLM2-135M's width and vocabulary. It has only 2 layers, so that the output head dominates.
32 requests of 64 tokens run at a time. Settings alternate, and the best of all rounds counts. The learner scores the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zstandard

from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.learner.packing import MicroBatch, build_micro_batch
from agentrl.learner.token_scorer import LogprobHead
from agentrl.records import Completion, Sample, SamplingParams, codec
from agentrl.records.sampling import Supports
from agentrl.serving import TokenClient, VLLMServer
from agentrl.testing.tiny_model import make_model, write_version

VOCABULARY, WIDTH, REQUESTS, TOKENS, PROMPT = 49_152, 576, 32, 64, 20
TEMPERATURE = 0.7
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "top_k=20": {"top_k": 20},
    "top_k=20 min_p=0.05": {"top_k": 20, "min_p": 0.05},
    "top_k=20 top_p=0.95": {"top_k": 20, "top_p": 0.95},
    "top_k=64": {"top_k": 64},
    "top_k=64 min_p=0.05": {"top_k": 64, "min_p": 0.05},
}


async def sample(folder: Path, threads: int, repeat: int) -> tuple[dict[str, float], dict[str, list[Completion]]]:
    """Returns the tokens per second of each setting, and its last completions."""
    version = write_version(folder, 0, make_model(0, hidden=WIDTH, layers=2, vocabulary=VOCABULARY))
    recipe = Recipe(
        name="truncation-benchmark",
        policy=PolicyConfig(model="made here"),
        tasks=TasksConfig(family="none:none"),
        serving=ServingConfig(threads=threads),
    )
    server = VLLMServer(recipe=recipe, model=folder / version.folder, version=0, run_dir=folder)
    await server.start()
    client, numbers = TokenClient.for_server(server), itertools.count()
    rates: dict[str, float] = defaultdict(float)
    completions: dict[str, list[Completion]] = {}
    for turn, (name, setting) in enumerate([*SETTINGS.items()] * (1 + repeat)):  # the first round warms up
        params = SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, supports=bool(setting), **setting)
        prompts = [[(31 * number + place) % 256 for place in range(PROMPT)] for number in range(REQUESTS)]
        began = time.perf_counter()
        answers = (client.generate(prompt, params, request_id=f"bench-{next(numbers)}", timeout_s=300) for prompt in prompts)
        completions[name] = list(await asyncio.gather(*answers))
        rate = sum(len(completion.token_ids) for completion in completions[name]) / (time.perf_counter() - began)
        rates[name] = max(rates[name], rate if turn >= len(SETTINGS) else 0.0)
    await client.close()
    await server.stop()
    return rates, completions


def as_batch(completions: list[Completion]) -> MicroBatch:
    """The completions' tokens as the learner gets them; nothing is shared."""
    rows = []
    for number, completion in enumerate(completions):
        size = len(completion.token_ids)
        rows.append(
            Sample(
                episode_id=str(number),
                group_index=0,
                token_ids=(number, *completion.token_ids),
                loss_mask=(False, *(True,) * size),
                logprobs=(0.0, *completion.logprobs),
                versions=(-1, *(0,) * size),
                advantages=(0.0,) * (1 + size),
                supports=Supports.join([1, completion.supports or size]),
            )
        )
    return build_micro_batch(tuple(rows), torch.device("cpu"))


def score(completions: list[Completion], repeat: int) -> float:
    """Milliseconds of the output head for 1,000 tokens, forward and backward."""
    batch = as_batch(completions)
    torch.manual_seed(0)
    linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    head, hidden = LogprobHead(linear, 2**25), torch.randn(len(batch.targets), WIDTH, requires_grad=True)
    spent = []
    for _ in range(1 + repeat):
        linear.zero_grad(set_to_none=True)
        began = time.perf_counter()
        logprobs, entropy = head(hidden, batch.targets, TEMPERATURE, batch.supports)
        (logprobs.sum() + entropy.sum()).backward()
        spent.append(time.perf_counter() - began)
    return 1e6 * min(spent[1:]) / len(batch.targets)


def stored(completions: list[Completion]) -> float:
    """Returns the stored bytes per token that supports add."""
    bare = [Completion(**{**fields(completion), "supports": None}) for completion in completions]
    more, less = (len(zstandard.ZstdCompressor(level=3).compress(b"".join(map(codec.to_json, some)))) for some in (completions, bare))
    return (more - less) / sum(len(completion.token_ids) for completion in completions)


def fields(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in ("token_ids", "logprobs", "versions", "finish_reason")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rates, completions_by_setting = asyncio.run(sample(Path(folder), options.threads, options.repeat))
    print("| truncation | tokens in a support | server, tokens/s | output head, ms per 1,000 trained tokens | stored, bytes a token |")
    print("| --- | --- | --- | --- | --- |")
    for name, completions in completions_by_setting.items():
        sizes = [len(row) for completion in completions if completion.supports for row in completion.supports.rows]
        mean = f"{sum(sizes) / len(sizes):.1f}" if sizes else "49,152"
        print(f"| {name} | {mean} | {rates[name]:.0f} | {score(completions, options.repeat):.0f} | {stored(completions):.0f} |")


if __name__ == "__main__":
    main()
