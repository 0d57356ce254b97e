"""`agentrl practice`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.user_code import printable
from agentrl.cli.options import JsonFlag
from agentrl.cli.recipes import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.failure.case import Suite, load_suite
from agentrl.failure.overlap import WithheldTasks, load_withheld
from agentrl.failure.practice import save_practice
from agentrl.session.ending import close_after

if TYPE_CHECKING:
    from agentrl.check.practice import PracticeReport

_REFUSED_SHOWN = 12
_LINE = 1000  # characters


def practice(
    suite: Annotated[Path, typer.Argument(help="Folder of a suite. Its practice.jsonl is replaced.")],
    recipe: Annotated[Path, typer.Argument(help="Recipe file whose task family generates the tasks.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides of the recipe.")] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Largest number of tasks per case.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated tasks.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Number of sandboxes at a time.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Generate training tasks from the cases of a suite, and keep those that pass the checks of agentrl check.

    No generated task equals, or nearly equals, a case of the suite or of another suite that the recipe withholds. tasks.practice adds them
    to a run.
    """
    root, loaded = load_recipe(recipe, overrides or [])
    cases = load_suite(suite)
    mutants = asyncio.run(_make(suite, cases, loaded, root, count=count, seed=seed, parallel=parallel, quiet=as_json))
    path = None
    if mutants.tasks:
        about = {"suite": cases.name, "family": loaded.tasks.family.ref, "recipe": loaded.name, "seed": seed, "count": count}
        path = save_practice(suite, mutants.tasks, about)
    by_case = {case: dict(how) for case, how in mutants.by_case().items()}
    if as_json:
        print(
            json.dumps(
                {"file": None if path is None else str(path), "tasks": len(mutants.tasks), "cases": by_case, "refused": mutants.rejected}
            )
        )
    else:
        print(render_report(mutants, path))
    raise typer.Exit(0 if by_case.keys() == {case.id for case in cases.cases} else 1)


async def _make(
    suite: Path, cases: Suite, recipe: Recipe, root: Path, *, count: int, seed: int, parallel: int, quiet: bool
) -> PracticeReport:
    from agentrl.check.practice import check_count, generate_practice
    from agentrl.sandbox import open_sandboxes
    from agentrl.session.judge_servers import standalone_judge_servers
    from agentrl.session.run_practice import held_out_cases
    from agentrl.task import open_family

    check_count(count, cases)
    family = open_family(recipe.tasks, seed=recipe.seed, root=root)
    gate = [recipe.gate.suite] if recipe.gate is not None else []
    suites = dict.fromkeys(
        path.resolve() for path in (suite, *(root / one for one in (*recipe.tasks.withhold, *gate, *recipe.tasks.practice)))
    )
    measured_with = WithheldTasks([*load_withheld([str(path) for path in suites], root=root).cases, *held_out_cases(recipe, family)])
    sandboxes = await open_sandboxes(recipe.sandbox, warm=0, run_label="practice", root=root)
    async with close_after(sandboxes.close), standalone_judge_servers(recipe, root=root):
        return await generate_practice(
            cases, family, sandboxes, withheld=measured_with, count=count, seed=seed, root=root, parallel=parallel, quiet=quiet
        )


def render_report(report: PracticeReport, path: Path | None) -> str:
    """The generated tasks by case, and the rejected ones with reasons."""
    lines = [f"{case}: {', '.join(f'{number} {how}' for how, number in how_many.items())}" for case, how_many in report.by_case().items()]
    lines += [f"rejected, {case}: {why}" for case, why in report.rejected[:_REFUSED_SHOWN]]
    if len(report.rejected) > _REFUSED_SHOWN:
        lines.append(f"and {len(report.rejected) - _REFUSED_SHOWN:,} more rejected tasks: see --json")
    where = "no task passed the checks; no file was written" if path is None else f"{len(report.tasks):,} tasks in {path}"
    return "\n".join(printable(line, _LINE) for line in (*lines, where))
