"""Measures the effect of a run's memory: scripted policies solve tasks of the archive with notes and without.

    python benchmarks/memory.py [--seeds 3] [--steps 8]

Groups, versions of the memory, experience store and evaluations are those of a run. The policy is `sandboxes.archive.scripted`; there is no
server and no learner. The policy does not learn: only the contents of the notes change from step to step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.config import MemoryConfig
from agentrl.evaluation.splits import evaluate_split
from agentrl.experience import BlockStarts, DriverStore, GroupOrder, SqliteStore
from agentrl.memory.run_memory import EvaluationNotes, RunMemory
from agentrl.records import Group, GroupUse, Split
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing
from rewards.tables import exact_answer
from sandboxes.archive import Archive
from sandboxes.archive.scripted import alone, noting

PROJECTS, GROUPS, SIZE, STALENESS, HELDOUT = 4, 16, 1, 1, 64
CONFIG = MemoryConfig(scope="project", notes=3, heldout_rounds=8)


def runner(says: Callable[[str], str]) -> GroupRunner:
    tokenizer = byte_tokenizer()
    episodes = EpisodeRunner(
        agent=TurnLoop(chat=ChatFormat(tokenizer)),
        policy=ReadingPolicy(tokenizer, says),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=4096,
        request_timeout_s=600.0,
    )
    return GroupRunner(runner=episodes, scorer=exact_answer, slots=asyncio.Semaphore(8), group_size=SIZE, max_retries=0)


async def trained(family: Archive, says: Callable[[str], str], folder: Path, *, steps: int, memory: bool) -> list[Group]:
    """Runs the groups of `steps` steps. Each step reads the notes of all steps before the previous one."""
    groups, blocks = runner(says), GroupOrder(per_step=GROUPS, depth=STALENESS + 1)
    with closing(SqliteStore(folder / "experience.sqlite")) as store:
        notes = RunMemory(CONFIG, folder, DriverStore(lambda: store), blocks, BlockStarts(blocks))
        with closing(notes):
            for step in range(steps):
                await notes.prepare_block(step)
                playing = replace(groups, memory=notes if memory else None)
                for index in blocks.block(step):
                    store.put(await playing.run_group(index, family.task(Split.TRAIN, index)))
                store.commit(step, dict.fromkeys(blocks.block(step), GroupUse()), "")
        return list(store.groups(range(steps * GROUPS)))


async def heldout(family: Archive, says: Callable[[str], str], *, memory: bool) -> float:
    """Returns the share of held-out tasks that is solved, in the recipe's number of rounds."""
    with closing(EvaluationNotes(CONFIG)) as notes:
        result = await evaluate_split(runner(says), family, Split.HELDOUT, HELDOUT, phase="after", step=0, notes=notes if memory else None)
    assert result.rate is not None
    return result.rate.value


def solved(groups: Sequence[Group], step: int) -> float:
    scores = [scored.score.value for group in groups[step * GROUPS : (step + 1) * GROUPS] for scored in group.scored]
    return statistics.fmean(value for value in scores if value is not None)


async def measure(seed: int, *, steps: int) -> dict[str, list[float]]:
    """Way -> the share solved in each step, and in the evaluation at the end."""
    family, rates = Archive(seed, projects=PROJECTS), {}
    for way, says, memory in (("alone", alone, False), ("with notes", noting, True)):
        with tempfile.TemporaryDirectory() as folder:
            groups = await trained(family, says, Path(folder), steps=steps, memory=memory)
        rates[way] = [*(solved(groups, step) for step in range(steps)), await heldout(family, says, memory=memory)]
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    measured = [asyncio.run(measure(seed, steps=args.steps)) for seed in range(args.seeds)]
    print(f"| way | {' | '.join(f'step {step}' for step in range(args.steps))} | held-out |")
    print(f"| --- |{' --- |' * (args.steps + 1)}")
    for way in measured[0]:
        shares = [statistics.fmean(rates[way][at] for rates in measured) for at in range(args.steps + 1)]
        print(f"| {way} | {' | '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main()
