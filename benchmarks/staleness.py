"""Compares the presets of `objective.off_policy` on stale episodes: success after the same number of episodes, and collapses.

    python benchmarks/staleness.py
    python benchmarks/staleness.py --staleness 4 16 --methods none second_moment --seeds 0 --steps 40 --lr 3e-3

Each run trains the policy of `benchmarks/small_loop.py` from the same base policy of its seed. Step s trains on episodes that version
s - staleness sampled (version 0 in the first steps). The learner's code computes losses and updates; one optimizer step per batch, so
`auto` is `behaviour`. Without staleness all presets compute the same update, up to rounding, so only `auto` is run. Prints a Markdown
table of the success rate over all tasks after the last step (median of the seeds, minimum and maximum). A run has collapsed at the first
step whose success is below half of the best one before; the table has the number of such runs and the median of their steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.learner.ranks import Ranks  # noqa: E402
from benchmarks.small_loop import SUM, Prompt, SmallLoop, join_alone, make_base, make_recipe, prompts_of  # noqa: E402

TASKS = prompts_of(SUM)
METHODS = ("none", "auto", "truncate", "truncate_sequence", "mask", "mask_sequence", "second_moment")
GROUPS, SIZE = 16, 8
EVERY = 10  # steps between two measurements of success
BASE_SUCCESS = 0.3


@dataclass(kw_only=True)
class Run:
    """Success by step, and the smallest effective sample size."""

    success: dict[int, float] = field(default_factory=dict)
    least_ess: float = 1.0
    low_ess_step: int | None = None  # first step with an effective sample size below a half

    @property
    def collapse(self) -> int | None:
        """The step at which success has fallen below half of its best value; None if it never has."""
        best = 0.0
        for step, value in self.success.items():
            if value < best / 2:
                return step
            best = max(best, value)
        return None


def train(base: Path, ranks: Ranks, *, method: str, staleness: int, seed: int, steps: int, lr: float) -> Run:
    """Trains once."""
    keys = {"objective.off_policy.preset": method, "learner.lr": lr}
    loop = SmallLoop(base, make_recipe(seed=seed, steps=steps, groups=GROUPS, size=SIZE, max_staleness=staleness, **keys), ranks)
    run, rng, waiting = Run(), random.Random(seed), list[Prompt]()
    run.success[0] = loop.success(TASKS, 0)
    for step in range(steps):
        if len(waiting) < GROUPS:
            waiting += rng.sample(TASKS, len(TASKS))
        prompts, waiting = waiting[:GROUPS], waiting[GROUPS:]
        metrics = loop.update(step, loop.sample_groups(step * GROUPS, prompts, max(step - staleness, 0), SIZE))
        if metrics.get("ess", 1.0) < run.least_ess:
            run.least_ess = metrics["ess"]
        if metrics.get("ess", 1.0) < 0.5 and run.low_ess_step is None:
            run.low_ess_step = step + 1
        if (step + 1) % EVERY == 0:
            run.success[step + 1] = loop.success(TASKS, step + 1)
    return run


def cell(runs: Sequence[Run]) -> str:
    """The table's text for the runs of one method and staleness."""
    last = [list(run.success.values())[-1] for run in runs]
    text = f"{statistics.median(last):.2f} [{min(last):.2f}, {max(last):.2f}]"
    collapses = [run.collapse for run in runs if run.collapse is not None]
    return f"{text}, {len(collapses)} collapsed (step {statistics.median(collapses):.0f})" if collapses else text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    ranks = join_alone()
    runs: dict[tuple[str, int], list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            base = Path(folder) / str(seed)
            make_base(base, seed=seed, taught=[(TASKS, BASE_SUCCESS)])
            for staleness in options.staleness:
                for method in options.methods if staleness else ["auto"]:
                    run = train(base, ranks, method=method, staleness=staleness, seed=seed, steps=options.steps, lr=options.lr)
                    runs.setdefault((method, staleness), []).append(run)
                    curve = " ".join(f"{value:.2f}" for value in run.success.values())
                    ess = f"least ess {run.least_ess:.2f}, below 0.5 from step {run.low_ess_step}"
                    print(f"seed {seed}, staleness {staleness}, {method}: {curve}; {ess}", file=sys.stderr, flush=True)
    print(f"| preset | {' | '.join(f'staleness {staleness}' for staleness in options.staleness)} |")
    print(f"| --- |{' --- |' * len(options.staleness)}")
    for method in options.methods:
        cells = [
            cell(runs[key]) if (key := (method if staleness else "auto", staleness)) in runs else "" for staleness in options.staleness
        ]
        print(f"| `{method}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
