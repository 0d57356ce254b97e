"""`agentrl profile`."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.running import JsonFlag, SandboxChoice, all_overrides, load_recipe, loading, run_folder, say
from agentrl.cluster.nsight import NsightSessions
from agentrl.config.recipe import EvalConfig
from agentrl.errors import UserError

WARM_STEPS = 1
"""Number of steps before the measured steps. In the first step, programs warm up and the pipeline fills."""


def profile(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as rollout.concurrency=32.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Learner steps to measure, after a warm-up step.")] = 2,
    run_dir: Annotated[Path | None, typer.Option(help="Keep the run in this folder. Default: a temporary folder.")] = None,
    sandbox: SandboxChoice = None,
    nsight: Annotated[
        bool, typer.Option("--nsight", help="Also record the learner and the servers with Nsight Systems. Needs a GPU.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a few learner steps of a recipe and print how the time is spent.

    Runs the recipe without evaluations and without a gate, in a temporary folder unless --run-dir is given. One table shows which parts
    compute at the same time, and one table per part shows the states of that part. Each table adds up to the wall time of the measured
    steps. CPU seconds add up to the number of CPUs times the wall time. With --nsight, the command also writes Nsight Systems reports on
    the measured steps to nsight/ in --run-dir or in the current folder.
    """
    root, written = load_recipe(recipe, [])
    changed = written.but(*all_overrides(overrides, sandbox=sandbox))
    wanted = range(WARM_STEPS + 1, WARM_STEPS + steps + 1)
    last = wanted[-1] + changed.max_staleness + 1  # later steps keep the pipeline full
    measured = changed.but(steps=last, evaluation=EvalConfig(heldout=0, heldout_real=0), gate=None, trackers=["terminal"])
    if nsight and measured.cluster.address != "local":
        raise UserError("--nsight records parts on this machine only", fix="omit --nsight, or set cluster.address=local")
    recorder = NsightSessions((run_dir or Path()).resolve() / "nsight") if nsight else None
    with (
        _folder(run_dir) as folder,
        run_folder(root, recipe, measured, (), folder, verb="profile") as (start, loaded, checked),
    ):
        with loading():
            from agentrl.run.profile import profile_steps, render_profile

        if recorder is not None:
            checked = replace(checked, plan=replace(checked.plan, wrap=recorder.wrap))
        result = asyncio.run(profile_steps(loaded, start, checked, root=root, wanted=wanted, nsight=recorder))
        print(json.dumps(result.to_data()) if as_json else render_profile(result))
        if recorder is not None:
            say(f"Nsight Systems reports: {recorder.folder}", file=sys.stderr)


@contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    """Yields the run folder. A temporary folder is removed afterwards, unless the run failed with exit code 1, because then its logs are
    needed."""
    if wanted is not None:
        yield wanted
        say(f"run folder: {wanted}", file=sys.stderr)
        return
    parent, needed = Path(tempfile.mkdtemp(prefix="agentrl-profile-")), False
    try:
        yield parent / "run"
    except typer.Exit as failed:
        if needed := failed.exit_code == 1:
            say(f"the run folder with its logs is {parent / 'run'}", file=sys.stderr)
        raise
    finally:
        if not needed:
            shutil.rmtree(parent, ignore_errors=True)
