"""`agentrl sample`."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.user_code import printable
from agentrl.cli.options import JsonFlag, SandboxChoice, model_override
from agentrl.cli.recipes import load_recipe
from agentrl.cli.running import loading, run_folder

if TYPE_CHECKING:
    from agentrl.run.sample import SampleResult, SampleTotals

_NAME = 40  # characters of a kind


def sample(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as rollout.group.size=16.")] = None,
    groups: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of training tasks, each with rollout.group.size attempts. Default: 32, or as before with --resume."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or id, or RUN@VERSION. Default: the model of the recipe.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder. Default: the first free one of runs/NAME-sample, runs/NAME-sample-2, ...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue in the run folder. A larger --groups adds groups.")] = False,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Sample and score attempts at training tasks without training.

    Writes a run folder for agentrl tune, label, failures and report. Prints for each kind of task how many tasks are solved, and how many
    groups have different scores, from which training can learn. Press ctrl-C once to finish the current groups, twice to stop immediately.
    """
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []), *model_override(model))
    with run_folder(root, recipe, written, given, run_dir, resume=resume, verb="sample") as (start, loaded, checked):
        with loading():
            from agentrl.run import sample as sampling

        result = asyncio.run(sampling.sample(loaded, start, checked, groups=groups, root=root, console=not as_json))
        print(json.dumps(result.as_json()) if as_json else render_result(result, group_size=loaded.rollout.group.size))
        if result.unfinished:
            print(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
    if result.totals.rate is None:
        print("no attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def render_result(result: SampleResult, *, group_size: int) -> str:
    """The result as text: a row for each kind of task, why attempts were excluded, and the next command."""
    rows = [(" ".join(printable(kind, _NAME).split()) or "-", came) for kind, came in result.by_kind.items()]
    rows = [*(rows if len(rows) > 1 else []), ("all", result.totals)]
    wide = max(4, *(len(name) for name, _ in rows))
    lines = [f"{'kind':{wide}}  {'tasks':>5}  {'attempts':>8}  {'mean score':24}  {'solved':>6}  {'differ':>6}"]
    lines += [f"{name:{wide}}  {_row(came)}" for name, came in rows]
    lines += ["solved: tasks that at least one attempt solved; differ: groups whose attempts have different scores"]
    lines += [f"{count:>8} excluded  {reason}" for reason, count in result.totals.left_out_reasons.items()]
    if result.totals.solved:
        lines.append(f"imitate the best: {shlex.join(['agentrl', 'tune', 'sft', str(result.folder), '--out', 'models/imitated'])}")
    lines.append(f"folder {result.folder}  ({result.requested} groups of {group_size})")
    return "\n".join(lines)


def _row(came: SampleTotals) -> str:
    rate = came.rate
    mean = "-" if rate is None else f"{rate.value:.3f} [{rate.ci_low:.3f}, {rate.ci_high:.3f}]"
    return f"{came.tasks:>5}  {came.attempts:>8}  {mean:24}  {came.solved:>6}  {came.differ:>6}"
