"""Measures `tasks.weighting`: episodes until the same success, with and without it.

    python benchmarks/curriculum.py
    python benchmarks/curriculum.py --target 0.55 --seeds 0 1 2 --steps 400

The policy of `benchmarks/small_loop.py` trains on kinds of tasks that it partly knows, has learned completely, or can never solve. As in a
run, `agentrl.task.GroupSchedule` chooses the tasks of a step, with the weights that `agentrl.task.TaskHistory` computes from the groups of
earlier steps (`MAX_STALENESS` steps later). Each seed has the same base policy and order of tasks with and without weighting. Prints a
Markdown table: episodes until the success rate on learnable tasks reaches the target (median of the seeds, minimum and maximum; inf: not
within `--steps`), and the share of groups whose attempts scored differently.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.learner.ranks import Ranks  # noqa: E402
from agentrl.records import Message, SandboxSpec, Split, Task  # noqa: E402
from agentrl.task import GroupOutcome, GroupSchedule, TaskHistory  # noqa: E402
from benchmarks.small_loop import COPY, IMPOSSIBLE, SUM, Prompt, SmallLoop, join_alone, make_base, make_recipe, prompts_of  # noqa: E402

GROUPS, SIZE, MAX_STALENESS = 16, 8, 1
EVERY = 2  # steps between two measurements of success
KINDS = {SUM: "learnable", COPY: "solved", IMPOSSIBLE: "impossible"}
FAMILIES = ((SUM,), (SUM, COPY), (SUM, COPY, IMPOSSIBLE))


class Sums:
    """A task family with all tasks of some kinds."""

    name = "sums"

    def __init__(self, kinds: Sequence[int]) -> None:
        self._prompts = [prompt for kind in kinds for prompt in prompts_of(kind)]

    def size(self, split: Split) -> int | None:
        """The number of tasks."""
        return len(self._prompts)

    def task(self, split: Split, index: int) -> Task:
        """Task `index`; its prompt is also in `data`."""
        prompt = self._prompts[index]
        return Task(
            id=f"{index}",
            family=self.name,
            prompt=(Message(role="user", content=str(prompt)),),
            tools=(),
            sandbox=SandboxSpec(image="none"),
            verifiers=(),
            data={"kind": KINDS[prompt[0]], "prompt": list(prompt)},
            split=split,
        )

    def gold(self, task: Task) -> str:
        """Unused."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    episodes: int | None  # until the target; None if the run ended before
    with_spread: float  # share of groups with different scores


def train(base: Path, ranks: Ranks, *, kinds: Sequence[int], weighting: bool, seed: int, steps: int, target: float) -> Result:
    """Trains until the target."""
    loop = SmallLoop(base, make_recipe(seed=seed, steps=steps, groups=GROUPS, size=SIZE, max_staleness=MAX_STALENESS), ranks)
    schedule, history = GroupSchedule(Sums(kinds), seed=seed), TaskHistory(min_group_size=2, by_task=True)
    weights = [history.weights()] * (MAX_STALENESS + 1)
    spread: list[bool] = []
    for step in range(steps):
        indices = range(step * GROUPS, (step + 1) * GROUPS)
        tasks = [schedule.task(index, weights[step] if weighting else None) for index in indices]
        groups = loop.sample_groups(indices[0], [_prompt(task) for task in tasks], max(step - MAX_STALENESS, 0), SIZE)
        groups = [replace(group, task_key=task.key) for task, group in zip(tasks, groups, strict=True)]
        loop.update(step, groups)
        outcomes = [GroupOutcome.from_group(task, group) for task, group in zip(tasks, groups, strict=True)]
        spread += [outcome.has_spread for outcome in outcomes]
        history.add(outcomes)
        weights.append(history.weights())
        if (step + 1) % EVERY == 0 and loop.success(prompts_of(SUM), step + 1) >= target:
            return Result(episodes=(step + 1) * GROUPS * SIZE, with_spread=statistics.fmean(spread))
    return Result(episodes=None, with_spread=statistics.fmean(spread))


def _prompt(task: Task) -> Prompt:
    kind, a, b = task.data["prompt"]  # type: ignore[misc, union-attr]
    return kind, a, b  # type: ignore[return-value]


def row(kinds: Sequence[int], weighting: bool, results: Sequence[Result]) -> str:
    """The table's row of one setting."""
    reached = sorted(math.inf if result.episodes is None else result.episodes for result in results)
    median, least, most = (format(count, ",.0f") for count in (statistics.median(reached), reached[0], reached[-1]))
    text = f"{median} [{least}, {most}]"
    share = statistics.fmean(result.with_spread for result in results)
    return f"| {', '.join(KINDS[kind] for kind in kinds)} | {'true' if weighting else 'false'} | {text} | {share:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", type=float, default=0.5)
    options = parser.parse_args(arguments)
    ranks = join_alone()
    results: dict[tuple[Sequence[int], bool], list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            base = Path(folder) / str(seed)
            make_base(base, seed=seed, taught=[(prompts_of(COPY), 0.99), (prompts_of(SUM), 0.3)])
            for kinds in FAMILIES:
                for weighting in (False, True):
                    result = train(base, ranks, kinds=kinds, weighting=weighting, seed=seed, steps=options.steps, target=options.target)
                    results.setdefault((kinds, weighting), []).append(result)
                    print(f"seed {seed}, {row(kinds, weighting, [result])}", file=sys.stderr, flush=True)
    print(f"| kinds | `tasks.weighting` | episodes until {options.target:g} | groups with different scores |\n| --- | --- | --- | --- |")
    for (kinds, weighting), runs in results.items():
        print(row(kinds, weighting, runs))


if __name__ == "__main__":
    main()
