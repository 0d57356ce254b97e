"""Measures a model's success on each kind of reasoning problem, with and without the tool, to choose the kinds that a recipe trains on.

    python benchmarks/reasoning_kinds.py --model recipes/models/smollm2 --problems 24
    python benchmarks/reasoning_kinds.py --kinds chain_sum lcm --tools python --temperature 0.5

Starts one server for all kinds and uses held-out problems with the recipe's sandboxes and limits. Prints a Markdown table with one row per
kind: success with its 95% interval for each tool. Reinforcement learning cannot start from a kind whose success is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.cli.running import load_recipe, run_folder  # noqa: E402
from agentrl.evaluation.splits import evaluate_split  # noqa: E402
from agentrl.observe.stats import Rate  # noqa: E402
from agentrl.records import Split  # noqa: E402
from agentrl.records.sampling import Sampling  # noqa: E402
from agentrl.session.opening import Run, open_run  # noqa: E402
from agentrl.session.transcript import append_transcripts  # noqa: E402
from agentrl.task import open_family  # noqa: E402
from sandboxes.reasoning.worked import PROGRAMS  # noqa: E402

RECIPE = ROOT / "recipes" / "smollm2.py"


async def measure(run: Run, arguments: argparse.Namespace) -> dict[str, dict[str, Rate]]:
    """Success by tool and kind."""
    await run.start_serving(await run.base_version())
    runner = replace(run.groups, runner=replace(run.groups.runner, sampling=Sampling(temperature=arguments.temperature)))
    rates_by_tool: dict[str, dict[str, Rate]] = {}
    for tool in arguments.tools:
        options = run.recipe.tasks.family.options | {"datasets": ",".join(arguments.kinds), "heldout_kinds": "", "tool": tool}
        options |= {"examples": arguments.examples} if arguments.examples is not None else {}
        family = open_family(run.recipe.tasks.but({"family.options": options}), seed=run.recipe.seed, root=ROOT)
        count = arguments.problems * len(arguments.kinds)
        result = await evaluate_split(runner, family, Split.HELDOUT, count, phase=f"kinds-{tool}", step=0, on_done=run.tracker.evaluating)
        append_transcripts(run.folder / "episodes" / f"kinds-{tool}.jsonl", result.transcripts)
        rates_by_tool[tool] = result.by_kind
        if result.excluded:
            print(f"{tool}: {result.excluded} episodes excluded: {result.excluded_reasons}", file=sys.stderr)
    return rates_by_tool


def table(rates_by_tool: dict[str, dict[str, Rate]], kinds: list[str]) -> str:
    """A Markdown table of all kinds, the best first."""
    first = next(iter(rates_by_tool.values()))
    ordered = sorted(kinds, key=lambda kind: -first[kind].value if kind in first else 1.0)
    lines = [f"| kind | {' | '.join(rates_by_tool)} |", f"| --- |{' --- |' * len(rates_by_tool)}"]
    for kind in ordered:
        cells = [_cell(rates.get(kind)) for rates in rates_by_tool.values()]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rate: Rate | None) -> str:
    return "not scored" if rate is None else f"{rate.value:.2f} [{rate.ci_low:.2f}, {rate.ci_high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="", help="model folder; default: the recipe's")
    parser.add_argument("--kinds", nargs="+", default=sorted(PROGRAMS), help="datasets of reasoning-gym; default: those with a program")
    parser.add_argument("--tools", nargs="+", default=["python", "none"], choices=["python", "none"])
    parser.add_argument("--problems", type=int, default=24, help="problems of each kind")
    parser.add_argument("--examples", type=int, default=None, help="solved problems in the prompt; default: the recipe's")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--run-dir", type=Path, default=None, help="run folder of transcripts and logs; default: the first free folder in runs/"
    )
    arguments = parser.parse_args()
    root, written = load_recipe(RECIPE, [])
    overrides = ("name=reasoning-kinds", *([f"policy.model={Path(arguments.model).resolve()}"] if arguments.model else []))
    with run_folder(root, RECIPE, written, overrides, arguments.run_dir, verb="eval") as (start, recipe, checked):

        async def run_all() -> dict[str, dict[str, Rate]]:
            async with open_run(recipe, start, checked, root=root, console=False) as run:
                return await measure(run, arguments)

        print(table(asyncio.run(run_all()), arguments.kinds))


if __name__ == "__main__":
    main()
