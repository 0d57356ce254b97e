"""Contexts for commands that run something (interrupts, the run folder, and error reports), loading of a command's recipe, and options that
several commands share.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from agentrl.base.processes import process_age_s
from agentrl.cli.terminal import outlasting_terminal
from agentrl.config.recipe import Recipe, apply_overrides
from agentrl.session.ending import append_driver_log, ended_by_user, report_error
from agentrl.session.folder import (
    RunStart,
    check_resumed_recipe,
    check_same_command,
    claim_run_folder,
    holds_run,
    merge_overrides,
    recorded_overrides,
)

if TYPE_CHECKING:
    from agentrl.session.preflight import PreflightResult
import json
from typing import Annotated

from agentrl.errors import RecipeError
from agentrl.evaluation.policies import version_folder
from agentrl.plugins.references import add_project_root, resolve
from agentrl.plugins.references import project_root as project_root


@contextmanager
def loading() -> Iterator[None]:
    """Context for slow imports, in which ctrl-C stops the process immediately.

    Otherwise Python would raise the interrupt inside an imported module, which may swallow it.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def undoing() -> Iterator[Callable[[], None]]:
    """Context for work that cleans up after ctrl-C. A second ctrl-C stops the process immediately.

    Yields a function to call between steps, which re-raises an interrupt that an import swallowed.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(130)
        interrupted = True
        raise KeyboardInterrupt

    def step() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield step
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"\nstopped before the command started\n")
    os._exit(130)


@contextmanager
def run_folder(
    root: Path,
    recipe: Path,
    written: Recipe,
    given: tuple[str, ...],
    wanted: Path | None,
    *,
    resume: bool = False,
    verb: str = "train",
) -> Iterator[tuple[RunStart, Recipe, PreflightResult]]:
    """Locks a run's folder during the block, loads its recipe and runs the preflight checks.

    Reports an error in the block and exits the command. The run survives the loss of its terminal.

    Args:
        given: overrides from the command line. For a resumed run, they are applied after its earlier overrides.
        wanted: the run folder; None means the first free folder name.
        verb: the command: `train`, `eval`, `sample` or `profile`. Only `train` and `sample` can be resumed.
    """
    named = written if resume else apply_overrides(written, list(given))  # report a wrong override before creating a folder
    name = next((item.partition("=")[2] for item in reversed(given) if item.startswith("name=")), named.name)
    suffix, resumable = "" if verb == "train" else f"-{verb}", verb in ("train", "sample")
    doing = shlex.join(["agentrl", verb, str(recipe), *given])
    with (
        claim_run_folder(wanted, root / "runs", name + suffix, resume=resume, resumable=resumable, command=doing) as folder,
        outlasting_terminal(partial(append_driver_log, folder)),
    ):
        if resume:
            check_same_command(folder, verb)
        overrides = merge_overrides(recorded_overrides(folder) if resume else (), given)
        start = RunStart(recipe=recipe, folder=folder, verb=verb, overrides=overrides, began=time.monotonic() - process_age_s())
        loaded = apply_overrides(written, list(start.overrides))
        if resume and (changes := check_resumed_recipe(folder, loaded)):
            print(f"resuming with {', '.join(changes)}", file=sys.stderr)
        with loading():
            from agentrl.session import preflight

            checked = preflight.run_preflight(loaded, folder, root=root, training=verb in ("train", "profile"))
        try:
            yield start, loaded, checked
        except typer.Exit:
            raise
        except BaseException as error:
            go_on = start.command(resume=True) if holds_run(folder) and resumable else ""
            if ended_by_user(error):
                note = f"; finished work is kept; continue with: {go_on}" if go_on else ""
                print(f"stopped{note}", file=sys.stderr)
                raise typer.Exit(130) from None
            raise typer.Exit(report_error(error, folder=folder, go_on=go_on)) from None


def load_recipe(path: Path, overrides: list[str]) -> tuple[Path, Recipe]:
    """Loads a recipe file with overrides. Returns the root of its project, which is added to `sys.path`, and the recipe."""
    if not path.is_file():
        raise RecipeError(f"there is no recipe file {path}", fix="give the path of a Python file with a module-level `recipe`")
    root = project_root(path)
    add_project_root(root)
    recipe = resolve(f"{path.resolve()}:recipe")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{path}: `recipe` is {type(recipe).__name__}, not agentrl.Recipe", fix="write recipe = Recipe(...)")
    return root, apply_overrides(recipe, overrides)


JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SandboxChoice = Annotated[
    str | None, typer.Option("--sandbox", help="Sandbox backend: auto, docker, bubblewrap or module:attr. Overrides the recipe.")
]


def model_override(model: str | None) -> tuple[str, ...]:
    """Returns the recipe override for `--model`: a folder, a version of a run (RUN@VERSION), or a model id."""
    if model is None:
        return ()
    if (version := version_folder(model)) is not None:
        return (f"policy.model={json.dumps(str(version[1]))}",)
    return (f"policy.model={json.dumps(str(Path(model).resolve()) if Path(model).is_dir() else model)}",)
