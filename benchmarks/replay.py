"""Measures the server's time for the requests of one step of a run, with several server settings in alternation.

    python benchmarks/replay.py runs/smollm2                      # all settings
    python benchmarks/replay.py runs/smollm2 --step 3 --repeat 3 --only "as it is"

All episodes of the step are replayed concurrently, turn by turn: the same contexts, the same number of sampled tokens, and the recipe's
sampling settings. No sandbox or learner runs. Each setting has a fresh server, and each repetition starts with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as the command line does: a recipe may name parts of the project

from agentrl.config import Recipe  # noqa: E402
from agentrl.config import recipe as recipes  # noqa: E402
from agentrl.experience import open_store  # noqa: E402
from agentrl.plugins import references  # noqa: E402
from agentrl.records import Episode  # noqa: E402
from agentrl.serving import VLLMServer  # noqa: E402
from agentrl.serving.client import sampling_parameters  # noqa: E402

SLEEPING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
CONTENDERS: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "as it is": ({}, {}),
    "blocks of 128 tokens": ({"--block-size": "128"}, {}),
    "threads sleep at once": ({}, SLEEPING),
    "both": ({"--block-size": "128"}, SLEEPING),
}
"""Name -> arguments and environment variables that differ from those of a run's server."""


class ChangedServer(VLLMServer):
    """A server with other arguments and another environment."""

    arguments: Mapping[str, str]
    variables: Mapping[str, str]

    def _command(self) -> list[str]:
        arguments = super()._command()
        for name, value in self.arguments.items():
            arguments[arguments.index(name) + 1] = value
        return arguments

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self.variables}


async def play(server: VLLMServer, recipe: Recipe, episode: Episode, salt: str) -> None:
    """Replays one episode: its trajectories one after the other, each as a growing context."""
    for trajectory in episode.trajectories:
        context: list[int] = []
        for turn in trajectory.turns:
            context += turn.prompt_ids
            sampling = {**sampling_parameters(recipe.rollout.distribution), "max_tokens": len(turn.completion_ids), "ignore_eos": True}
            options = {"logprobs": max(recipe.rollout.sampling.top_k, 0), "detokenize": False}
            body = {"token_ids": list(context), "sampling_params": sampling | options, "cache_salt": salt}
            await server.control.generate(body, timeout_s=600.0)
            context += turn.completion_ids


async def seconds(recipe: Recipe, model: Path, episodes: list[Episode], name: str, repeat: int) -> list[float]:
    """Returns the wall seconds of each repetition on one server."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "versions").mkdir()
        server = ChangedServer(recipe=recipe, model=model, version=0, run_dir=Path(folder))
        server.arguments, server.variables = CONTENDERS[name]
        await server.start()
        try:
            spent = []
            for number in range(repeat):
                began = time.perf_counter()
                await asyncio.gather(*(play(server, recipe, episode, f"{name}-{number}") for episode in episodes))
                spent.append(time.perf_counter() - began)
            return spent
        finally:
            await server.stop()


async def main(args: argparse.Namespace) -> None:
    references.add_project_root(ROOT)
    recipe = recipes.load(args.run / "recipe.json")
    store = open_store(args.run, recipe)
    size = recipe.rollout.groups_per_step
    groups = store.groups(range(args.step * size, (args.step + 1) * size))
    store.close()
    episodes = [scored.episode for group in groups for scored in group.episodes if not scored.episode.left_out]
    tokens = sum(len(turn.completion_ids) for episode in episodes for trajectory in episode.trajectories for turn in trajectory.turns)
    model = args.run / "versions" / "000000"
    print(f"{len(episodes)} episodes, {tokens} sampled tokens", file=sys.stderr)
    names = args.only or list(CONTENDERS)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            spent[name] += await seconds(recipe, model, episodes, name, args.repeat)
            print(f"{name}: {', '.join(f'{value:.1f}' for value in spent[name])} s", file=sys.stderr)
    first = statistics.median(spent[names[0]])
    print("| server | seconds, median (range) | tokens/s | times the first |\n| --- | --- | --- | --- |")
    for name, values in spent.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.1f} ({min(values):.1f} to {max(values):.1f}) | {tokens / median:.0f} | {median / first:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder that still has the weights of version 0")
    parser.add_argument("--step", type=int, default=0, help="step whose episodes are replayed (default 0)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions on each server (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="servers started per contender, in alternation (default 2)")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), help="run only these contenders")
    asyncio.run(main(parser.parse_args()))
