"""Measures environments: steps per second of CartPole, sessions at an OpenEnv server, the effect of notes, and transfer.

    python benchmarks/environments.py                # all sections
    python benchmarks/environments.py cartpole

Each section is a function in `SECTIONS` that returns rows of Markdown. Times are CPU seconds of all processes, so that other programs on
the machine matter less; the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments, open_environment
from agentrl.plugins.parts import Part
from agentrl.records import EnvironmentSpec, Split
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.task import open_family
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.policies import ReadingPolicy, byte_tokenizer
from agentrl.testing.sandboxes import printing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.knowledge import memory, transfer
from benchmarks.remote_sessions import openenv

EPISODES, AT_ONCE = 256, 64
TURN_EPISODES = 32
TARGET_STEPS, TARGET_US = 20_000, 50


@dataclass(frozen=True, slots=True)
class Cost:
    """Steps, and the seconds that they took."""

    steps: int
    wall_s: float
    driver_s: float
    children_s: float

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU per step."""
        return (self.driver_s + self.children_s) / self.steps * 1e6

    def row(self, name: str) -> str:
        """Returns a row of the table."""
        per_core = 1e6 / self.cpu_us
        parts = (f"{self.steps:,}", f"{self.steps / self.wall_s:,.0f}", f"{per_core:,.0f}", f"{self.cpu_us:.1f}")
        return f"| {name} | {' | '.join(parts)} | {self.driver_s / self.steps * 1e6:.1f} | {self.children_s / self.steps * 1e6:.1f} |"


class Clock:
    """Measures CPU seconds of this process and of the children that have ended."""

    def __init__(self) -> None:
        self.wall, self.driver, self.children = time.perf_counter(), time.process_time(), _children_s()

    def cost(self, steps: int) -> Cost:
        """Returns the cost since the start."""
        return Cost(steps, time.perf_counter() - self.wall, time.process_time() - self.driver, _children_s() - self.children)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def balance(observation: Sequence[float]) -> str:
    """Returns the action of a scripted policy that balances the pole."""
    return "right" if observation[2] + 0.3 * observation[3] + 0.05 * observation[1] > 0 else "left"


def numbers_of(text: str) -> list[float]:
    """Returns the numbers of the default text of CartPole's observation."""
    return [float(part.rsplit(" ", 1)[1]) for part in text.split(", ")]


def bare() -> Cost:
    """Plays CartPole without agentrl."""
    import gymnasium

    clock, steps = Clock(), 0
    for seed in range(EPISODES):
        environment = gymnasium.make("CartPole-v1", disable_env_checker=True)
        observation, _ = environment.reset(seed=seed)
        done = False
        while not done:
            observation, _, terminated, truncated, _ = environment.step(int(balance(observation) == "right"))
            done, steps = terminated or truncated, steps + 1
        environment.close()
    return clock.cost(steps)


async def pooled() -> Cost:
    """Plays the same episodes in a process of the pool, with texts as observations and actions."""
    steps, seeds = 0, iter(range(EPISODES))
    warm = await open_environment(EnvironmentSpec(ref="gymnasium:CartPole-v1"))  # starts the process
    clock = Clock()

    async def play_all() -> None:
        nonlocal steps
        for seed in seeds:
            environment = await open_environment(EnvironmentSpec(ref="gymnasium:CartPole-v1", seed=seed))
            text, done = (await environment.reset()).text, False
            while not done:
                step = await environment.step(balance(numbers_of(text)))
                text, done, steps = step.observation.text, step.done, steps + 1
            await environment.close()

    await asyncio.gather(*(play_all() for _ in range(AT_ONCE)))
    await warm.close()
    await close_environments()
    return clock.cost(steps)


async def turns() -> Cost:
    """Plays episodes with the turn loop: each step is a turn in exact tokens, which a scripted policy samples."""
    tokenizer = byte_tokenizer()
    options: dict[str, Any] = {
        "context_turns": 1,
        "instructions": "",
        "limits": {"turns": 500, "wall_s": 3600.0, "episode_output_chars": 1 << 20},
    }
    family = open_family(TasksConfig(family=Part("gymnasium:CartPole-v1", options)), seed=0)
    policy = ReadingPolicy(tokenizer, lambda context: balance(numbers_of(context.split("user\n")[1].split("<|im_end|>")[0])))
    runner = EpisodeRunner(
        policy=policy,
        sandboxes=ScriptedSandboxes(printing("")),
        agent=TurnLoop(chat=ChatFormat(tokenizer)),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=600.0,
    )
    clock = Clock()
    played = (runner.run(family.task(Split.TRAIN, index), episode_id=f"e{index}") for index in range(TURN_EPISODES))
    episodes = await asyncio.gather(*played)
    await close_environments()
    return clock.cost(sum(len(trajectory.turns) for episode in episodes for trajectory in episode.trajectories))


def cartpole() -> list[str]:
    """CartPole: bare, in the pool, and as turns of episodes."""
    warnings.simplefilter("ignore")
    plain, ours, loop = bare(), asyncio.run(pooled()), asyncio.run(turns())
    more = ours.cpu_us - plain.cpu_us
    per_core = 1e6 / ours.cpu_us
    return [
        "| CartPole | steps | steps/s | steps/s per core | CPU us per step | driver | processes |",
        "|---|---|---|---|---|---|---|",
        plain.row("bare Gymnasium, scripted policy"),
        ours.row(f"agentrl's environment, {AT_ONCE} episodes at once"),
        loop.row("agentrl's turn loop, recorded in exact tokens"),
        f"- {per_core:,.0f} steps/s per core (goal {TARGET_STEPS:,}): {'reached' if per_core >= TARGET_STEPS else 'missed'}",
        f"- {more:.1f} us more than bare Gymnasium (goal {TARGET_US}): {'reached' if more <= TARGET_US else 'missed'}",
    ]


SECTIONS: dict[str, Callable[[], list[str]]] = {"cartpole": cartpole, "openenv": openenv, "memory": memory, "transfer": transfer}


def main() -> None:
    """Prints the chosen sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"sections to measure: {', '.join(SECTIONS)}; default: all")
    for name in parser.parse_args().sections or SECTIONS:
        print(f"## {name} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)\n")
        print("\n".join(SECTIONS[name]()), flush=True)


if __name__ == "__main__":
    main()
