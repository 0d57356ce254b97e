"""`agentrl sample`: attempts of one policy at training tasks, scored and stored, without a learner."""

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
    from agentrl.run.sample import AttemptTotals, SampleResult

_NAME = 40  # characters of a kind


def sample(
    recipe: Annotated[Path, typer.Argument(help="Recipe file whose model, training tasks, verifiers, sandbox and sampling are used.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as rollout.group_size=16.")] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Training tasks, rollout.group_size attempts at each. Default: 32; with --resume as before.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or id, or RUN@VERSION, in place of the recipe's.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/NAME-sample, -sample-2, ...: the first free one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in the run folder; with a larger --groups further than before.")] = False,
    sandbox: SandboxChoice = None,
    as_json: JsonFlag = False,
) -> None:
    """Sample attempts at training tasks, score and keep them; nothing is trained. Ctrl-C once: finish the groups in hand. Twice: stop now.

    What comes out is a run folder for agentrl tune, label, failures and report, and a table of which kinds a policy solves, and which
    would teach it something.
    """
    root, written = load_recipe(recipe, [])
    given = (*(overrides or []), *([f"sandbox.backend={sandbox}"] if sandbox else []), *model_override(model))
    with run_folder(root, recipe, written, given, run_dir, resume=resume, verb="sample") as (start, loaded, checked):
        with loading():
            from agentrl.run import sample as sampling

        found = asyncio.run(sampling.sample(loaded, start, checked, groups=groups, root=root, console=not as_json))
        print(json.dumps(found.as_json()) if as_json else told(found, group_size=loaded.rollout.group_size))
        if found.unfinished:
            print(f"interrupted; continue with: {start.command(resume=True)}", file=sys.stderr if as_json else sys.stdout)
            raise typer.Exit(130)
    if found.totals.rate is None:
        print("not one attempt was scored", file=sys.stderr)
        raise typer.Exit(1)


def told(found: SampleResult, *, group_size: int) -> str:
    """The result for a person: a row for each kind of task, why attempts were left out, and what can be done with the rest."""
    rows = [(" ".join(printable(kind, _NAME).split()) or "-", came) for kind, came in found.by_kind.items()]
    rows = [*(rows if len(rows) > 1 else []), ("all", found.totals)]
    wide = max(4, *(len(name) for name, _ in rows))
    lines = [f"{'kind':{wide}}  {'tasks':>5}  {'attempts':>8}  {'mean score':24}  {'solved':>6}  {'differ':>6}"]
    lines += [f"{name:{wide}}  {_row(came)}" for name, came in rows]
    lines += ["solved: tasks that an attempt solved; differ: groups whose attempts were scored differently, which is what teaches"]
    lines += [f"{count:>8} left out  {reason}" for reason, count in found.totals.left_out_reasons.items()]
    if found.totals.solved:
        lines.append(f"imitate the best: {shlex.join(['agentrl', 'tune', 'sft', str(found.folder), '--out', 'models/imitated'])}")
    lines.append(f"folder {found.folder}  ({found.requested} groups of {group_size})")
    return "\n".join(lines)


def _row(came: AttemptTotals) -> str:
    rate = came.rate
    mean = "-" if rate is None else f"{rate.value:.3f} [{rate.ci_low:.3f}, {rate.ci_high:.3f}]"
    return f"{came.tasks:>5}  {came.attempts:>8}  {mean:24}  {came.solved:>6}  {came.differ:>6}"
