"""Measures `order=replay`: sampled episodes until the same success, with and without training each group a second time.

    python benchmarks/second_training.py
    python benchmarks/second_training.py --groups 8 --staleness 4 --seeds 0 1 2 3 4 --episodes 30000

Each run trains the policy of `benchmarks/small_loop.py` from the same base policy of its seed, with the learner's code. With replay, a step
also trains the groups of the step before that have a preference, as in a run. Prints a Markdown table: sampled episodes until the success
rate over all tasks reaches the targets (median of the seeds, minimum and maximum; inf: not within `--episodes`), and the trained tokens per
sampled token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.experience import new_entry  # noqa: E402
from agentrl.learner.ranks import Ranks  # noqa: E402
from agentrl.records import Group  # noqa: E402
from benchmarks.small_loop import LENGTH, SUM, Prompt, SmallLoop, join_alone, make_base, make_recipe, prompts_of  # noqa: E402

TASKS = prompts_of(SUM)
SIZE = 8
EVERY = 256  # episodes between two measurements of success
TARGETS = (0.5, 0.6)
BASE_SUCCESS = 0.3


@dataclass(kw_only=True)
class Run:
    """Episodes until each target, and the trained tokens per sampled token."""

    reached: dict[float, float] = field(default_factory=lambda: dict.fromkeys(TARGETS, math.inf))
    trained: float = 0.0


def train(base: Path, ranks: Ranks, *, groups: int, replay: bool, staleness: int, seed: int, episodes: int) -> Run:
    """Trains until the last target."""
    steps = episodes // (groups * SIZE)
    loop = SmallLoop(base, make_recipe(seed=seed, steps=steps, groups=groups, size=SIZE, max_staleness=staleness), ranks)
    run, rng, waiting, before, tokens = Run(), random.Random(seed), list[Prompt](), list[Group](), 0.0
    for step in range(steps):
        if len(waiting) < groups:
            waiting += rng.sample(TASKS, len(TASKS))
        prompts, waiting = waiting[:groups], waiting[groups:]
        fresh = loop.sample_groups(step * groups, prompts, max(step - staleness, 0), SIZE)
        tokens += loop.update(step, [*fresh, *before] if replay else fresh)["tokens_trained"]
        before = [group for group in fresh if new_entry(group).has_spread]
        sampled = (step + 1) * groups * SIZE
        run.trained = tokens / (sampled * LENGTH)
        if sampled % EVERY == 0:
            success = loop.success(TASKS, step + 1)
            run.reached |= {target: sampled for target, at in run.reached.items() if at == math.inf and success >= target}
            if run.reached[TARGETS[-1]] < math.inf:
                break
    return run


def row(groups: int, staleness: int, replay: bool, runs: Sequence[Run]) -> str:
    """The table's row of one setting."""
    cells = [f"{groups}", f"{staleness}", f"`{'replay' if replay else 'oldest_first'}`"]
    for target in TARGETS:
        reached = [run.reached[target] for run in runs]
        cells.append(f"{statistics.median(reached):,.0f} [{min(reached):,.0f}, {max(reached):,.0f}]")
    return f"| {' | '.join(cells)} | {statistics.fmean(run.trained for run in runs):.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 16], help="new groups per step (default 8 16)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=20_480)
    options = parser.parse_args(arguments)
    ranks = join_alone()
    runs: dict[tuple[int, int, bool], list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            base = Path(folder) / str(seed)
            make_base(base, seed=seed, taught=[(TASKS, BASE_SUCCESS)])
            for groups, staleness, replay in itertools.product(options.groups, options.staleness, (False, True)):
                run = train(base, ranks, groups=groups, replay=replay, staleness=staleness, seed=seed, episodes=options.episodes)
                runs.setdefault((groups, staleness, replay), []).append(run)
                print(f"seed {seed}, {row(groups, staleness, replay, [run])}", file=sys.stderr, flush=True)
    targets = " | ".join(f"episodes until {target:g}" for target in TARGETS)
    print(f"| groups | staleness | `order` | {targets} | trained per sampled token |\n| --- | --- | --- |{' --- |' * len(TARGETS)} --- |")
    for setting, results in runs.items():
        print(row(*setting, results))


if __name__ == "__main__":
    main()
