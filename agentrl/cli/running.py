"""Contexts for commands that run something (interrupts, the run folder, progress and error reports), loading of a command's recipe, and
options that several commands share.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from agentrl.base.installation import install_command
from agentrl.base.processes import process_age_s
from agentrl.base.user_code import one_line, printable
from agentrl.cli.terminal import outlasting_terminal
from agentrl.config.recipe import Recipe
from agentrl.errors import RecipeError, UserError
from agentrl.evaluation.policies import version_folder
from agentrl.plugins.references import add_project_root, resolve
from agentrl.plugins.references import project_root as project_root
from agentrl.session.ending import append_driver_log, ended_by_user, report_error
from agentrl.session.folder import (
    RunStart,
    check_links,
    check_resumed_recipe,
    check_same_command,
    claim_run_folder,
    holds_run,
    merge_overrides,
    recorded_overrides,
)

if TYPE_CHECKING:
    from agentrl.session.preflight import PreflightResult


def checked_run(folder: Path | None) -> Path | None:
    """Returns `folder`. Raises `UserError` if it is not a folder, or contains a symbolic link to a file outside the folder: the folder may
    come from a third party, and a command could write to that file."""
    if folder is not None:
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {problem}", fix="give the folder of a run, such as runs/quickstart")
        check_links(folder)
    return folder


RunFolder = Annotated[Path, typer.Argument(help="Run folder.", callback=checked_run)]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SandboxChoice = Annotated[
    str | None, typer.Option("--sandbox", help="Sandbox backend: auto, docker, bubblewrap or module:attr. Overrides the recipe.")
]


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
    """Context for work that cleans up after ctrl-C; then the command exits with 130. A second ctrl-C stops the process immediately.

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

    If the block raises an error, reports it and exits the command. Errors before the block are raised, such as `UserError` for a busy
    folder, an invalid override or a failed check. The run survives the loss of its terminal.

    Args:
        given: overrides from the command line. For a resumed run, they are applied after its earlier overrides.
        wanted: the run folder; None means the first free folder name or, with `resume`, the last run with the recipe's name.
        verb: the command: `train`, `eval`, `sample` or `profile`. Only `train` and `sample` can be resumed.
    """
    named = written if resume else written.but(*given)  # report a wrong override before creating a folder
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
        loaded = written.but(*start.overrides)
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


def load_recipe(path: Path, overrides: Sequence[str]) -> tuple[Path, Recipe]:
    """Loads a recipe file with overrides. Returns the root of its project, which is added to `sys.path`, and the recipe.

    Raises `UserError` if the file is missing or contains no recipe, or if an override is invalid.
    """
    if not path.is_file() or path.suffix != ".py":
        missing = f"{path} is not a recipe" if path.exists() else f"there is no recipe file {path}"
        raise RecipeError(missing, fix="give the path of a Python file with a module-level `recipe`")
    root = project_root(path)
    add_project_root(root)
    recipe = resolve(f"{path.resolve()}:recipe")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{path}: `recipe` is {type(recipe).__name__}, not agentrl.Recipe", fix="write recipe = Recipe(...)")
    return root, recipe.but(*overrides)


def all_overrides(
    arguments: Sequence[str] | None, *, sandbox: str | None = None, cluster: str | None = None, model: str | None = None
) -> tuple[str, ...]:
    """Returns the recipe overrides of a command: its arguments, followed by those that its options set.

    Args:
        model: a folder, a version of a run (RUN@VERSION), or a model id. A missing version raises `UserError`.
    """
    if model is not None:
        version = version_folder(model)
        model = str(version[1] if version is not None else Path(model).resolve() if Path(model).is_dir() else model)
    return (
        *(arguments or ()),
        *([f"sandbox.backend={sandbox}"] if sandbox else []),
        *([f"cluster.address={json.dumps(cluster)}"] if cluster else []),
        *([f"policy.model={json.dumps(model)}"] if model is not None else []),
    )


@contextmanager
def reporting_errors(folder: Path) -> Iterator[None]:
    """Context for an evaluation in a run folder. The evaluation survives the loss of its terminal. If the block raises an error, reports it
    and exits the command. An interrupt is raised unchanged."""
    try:
        with outlasting_terminal():
            yield
    except BaseException as error:
        if ended_by_user(error):
            raise
        raise typer.Exit(report_error(error, folder=folder)) from None


@contextmanager
def progress_bar(unit: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on a terminal. Yields a function to call with the number of finished units and the total number."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def timed_progress() -> Callable[[str], None]:
    """Returns a function that prints the seconds since this call and a message on standard error."""
    began = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began:5.1f} s  {text}", file=sys.stderr, flush=True)


def require_web_server(needed_for: str) -> None:
    """Raises `UserError` if a package that serves web pages is not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"{needed_for} needs {' and '.join(missing)}", fix=install_command("gateway"))


def user_name(default: str = "unknown") -> str:
    """Returns the name of the user, or `default` if the user id has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return default


def say(text: str, *, file: TextIO | None = None) -> None:
    """Prints text that contains a path. Characters of a path that would control the terminal are replaced."""
    print(printable(text, len(text)), file=file, flush=True)


def listed(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names on one line, and the number of remaining names."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(one_line, names[:most]))}{more}"
