"""Around a run: its folder, the checks before anything starts, and what a person is told when it ends in an error."""

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


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports that take seconds: nothing runs yet, so ctrl-C ends the process there and then.

    Python would raise inside whatever is being imported, and there an interrupt can get lost.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def undoing() -> Iterator[Callable[[], None]]:
    """Around work that undoes itself when ctrl-C ends it. Yields what to call between its steps: an interrupt that got lost in an import
    is raised again there. A second ctrl-C ends the process there and then.
    """
    asked = False

    def interrupt(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        raise KeyboardInterrupt

    def step() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield step
    except KeyboardInterrupt:
        print("stopped; nothing was made", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"\nstopped before anything was started\n")
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
    """Around a run: its folder, held by this process alone, its recipe, and what was found by all the checks that are cheap.

    `given` are the overrides on the command line; a resumed run's earlier ones lie below them. An error that leaves this block is
    told to the person, and ends the command. A terminal that closes does not end it.

    Args:
        verb: the command, which is `train`, `eval` or `sample`. An evaluation cannot be resumed.
    """
    named = written if resume else apply_overrides(written, list(given))  # a typo is told before a folder is made
    name = next((item.partition("=")[2] for item in reversed(given) if item.startswith("name=")), named.name)
    suffix, evaluating = "" if verb == "train" else f"-{verb}", verb == "eval"
    doing = shlex.join(["agentrl", verb, str(recipe), *given])
    with (
        claim_run_folder(wanted, root / "runs", name + suffix, resume=resume, resumable=not evaluating, command=doing) as folder,
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

            checked = preflight.run_preflight(loaded, folder, root=root, training=verb == "train")
        try:
            yield start, loaded, checked
        except typer.Exit:
            raise
        except BaseException as error:
            go_on = start.command(resume=True) if holds_run(folder) and not evaluating else ""
            if ended_by_user(error):
                kept = f"; what was finished is kept, continue with: {go_on}" if go_on else ""
                print(f"stopped{kept}", file=sys.stderr)
                raise typer.Exit(130) from None
            raise typer.Exit(report_error(error, folder=folder, go_on=go_on)) from None
