"""`agentrl judge` and `agentrl label`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.files import sha256_file, write_atomically
from agentrl.base.numbers import plural
from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, checked_run, load_recipe, project_root, say, user_name
from agentrl.errors import PluginError, UserError
from agentrl.plugins.references import add_project_root, resolve

if TYPE_CHECKING:
    from agentrl.judge.calibrate import CalibrationReport

judge_app = command_group()


@judge_app.command(
    epilog="Example: agentrl judge calibrate rewards.mine:helpful runs/mine/labels/anna.jsonl --out calibrations/helpful.json"
)
def calibrate(
    judge: Annotated[str, typer.Argument(help="The judge, or any verifier: module:attr or ./file.py:attr.")],
    labels: Annotated[
        list[Path], typer.Argument(help="Label files of `agentrl label`. With several labellers, the majority label counts.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write, for Judge(calibration=...). A plot is written next to it.")] = None,
    threshold: Annotated[float, typer.Option(help="Lowest score that counts as right.")] = 0.5,
    parallel: Annotated[int, typer.Option(min=1, help="Number of answers judged in parallel.")] = 8,
    cache: Annotated[str | None, typer.Option(help="File that caches the judge's replies.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with the judge server that the judge needs. The command starts this server.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a judge on labelled answers: agreement, sensitivity, specificity, bias by length and position, reliability, and cost.

    The exit code is 1 if the judge is not significantly better than chance.
    """
    from agentrl.judge.calibrate import calibrate as measure
    from agentrl.judge.labels import read_labels
    from agentrl.judge.report import render_report, report_data
    from agentrl.session.judge_servers import standalone_judge_servers

    root = project_root((recipe or Path.cwd() / "x").absolute())
    add_project_root(root)
    resolved = resolve(judge)
    if not callable(resolved):
        raise PluginError(f"{judge!r} is not callable", fix="give a judge, or async def score(task, episode) -> Score")
    labelled = read_labels(labels)
    served = None if recipe is None else load_recipe(recipe, [])[1]
    if served is not None and not served.judge_servers:
        raise UserError(f"{recipe} has no section judge_servers", fix="omit --recipe, or add the section")

    async def measured() -> CalibrationReport:
        async with standalone_judge_servers(served, root=root):
            return await measure(
                resolved,
                labelled,
                reference=judge,
                labels_sha256=",".join(sha256_file(path) for path in labels),
                root=root,
                threshold=threshold,
                parallel=parallel,
                ledger=cache,
                progress=_progress,
            )

    report = asyncio.run(measured())
    if out is not None:
        _save(report, out)
    print(json.dumps({**asdict(report.calibration), "more": report_data(report)}) if as_json else render_report(report))
    raise typer.Exit(1 if report.calibration.may_be_chance else 0)


def _save(report: CalibrationReport, out: Path) -> None:
    """Writes the calibration and, next to it, its plot."""
    from agentrl.judge.calibration import save_calibration
    from agentrl.judge.report import render_svg, report_data

    save_calibration(out, report.calibration, report_data(report))
    write_atomically(out.with_suffix(".svg"), render_svg(report))
    say(f"wrote {out} and {out.with_suffix('.svg')}", file=sys.stderr)
    if not report.calibration.identity:
        print("this verifier has no identity, so no judge can require this calibration", file=sys.stderr)


@judge_app.command(epilog="Example: agentrl judge correct calibrations/helpful.json 830 1000")
def correct(
    calibration: Annotated[Path, typer.Argument(help="Calibration file of `agentrl judge calibrate`.")],
    passed: Annotated[int, typer.Argument(help="Number of answers that the judge called right.")],
    total: Annotated[int, typer.Argument(help="Number of answers with a verdict.")],
    as_json: JsonFlag = False,
) -> None:
    """Estimate the true success rate from the success rate according to a judge and the judge's sensitivity and specificity."""
    from agentrl.judge.agreement import corrected_rate
    from agentrl.judge.calibration import load_calibration

    rate = corrected_rate(passed, total, load_calibration(calibration))
    if as_json:
        print(json.dumps({"judged": passed / total, **asdict(rate)}))
        return
    print(f"rate of the judge {passed / total:.3f}; corrected {rate.value:.3f}, 95% interval {rate.low:.3f} to {rate.high:.3f}")


def label(
    run: Annotated[Path | None, typer.Argument(help="Run folder.", callback=checked_run)] = None,
    by: Annotated[str, typer.Option(help="Name of the labeller. Default: the user name.")] = "",
    out: Annotated[Path | None, typer.Option(help="Label file. Default: RUN/labels/BY.jsonl.")] = None,
    phase: Annotated[str, typer.Option(help="Show only episodes of this phase, such as after.")] = "",
    blind: Annotated[bool, typer.Option("--blind", help="Hide the reference answer.")] = False,
    agreement: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Print the agreement of two label files, and exit.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Label the answers in a run by hand. Each key press is a verdict and is saved immediately.

    A later run of the command continues with the remaining answers. Each line of the label file has the form {"question": ..., "answer":
    ..., "label": "right" or "wrong", "by": ..., "reference": ..., "messages": [...]}.
    """
    if agreement is not None:
        _agreement(*agreement, as_json=as_json)
        return
    if run is None:
        raise UserError("no run folder is given", fix="run agentrl label RUN, or agentrl label --agreement A B")
    from agentrl.judge.labelling import LabellingSession, labels_file, run_answers

    by = by or user_name()
    path = labels_file(run, by) if out is None else out
    session = LabellingSession(items=run_answers(run, phase=phase), path=path, by=by, blind=blind)
    with _keys() as keys:
        session.run(keys, partial(print, file=sys.stderr) if as_json else print)
    counts = {name: list(session.done.values()).count(name) for name in ("right", "wrong", "skip")}
    if as_json:
        print(json.dumps({"file": str(path), **counts}))
        return
    say(f"{path}: {', '.join(f'{count} {name}' for name, count in counts.items())}")


def _agreement(first: Path, second: Path, *, as_json: bool) -> None:
    from agentrl.judge import agreement as stats
    from agentrl.judge.labels import read_labels

    ours, others = ({item.item.key: item.right for item in read_labels([path])} for path in (first, second))
    pairs = [(mine, theirs) for key, mine in ours.items() if mine is not None and (theirs := others.get(key)) is not None]
    if not pairs:
        raise UserError(f"{first} and {second} have no answer in common", fix="label the same phase of the same run")
    table = stats.AgreementTable.from_pairs(pairs)
    agree = stats.agreement(table)
    try:
        kappa = stats.kappa(table)
    except ValueError:
        kappa = None
    if as_json:
        print(json.dumps({"agreement": asdict(agree), "kappa": None if kappa is None else asdict(kappa), "table": asdict(table)}))
        return
    print(f"{plural(table.n, 'answer')} with both labels: both right {table.right_right}, both wrong {table.wrong_wrong},")
    print(f"only {first.stem} says right {table.right_wrong}, only {second.stem} says right {table.wrong_right}")
    print(f"  agreement      {agree.value:.3f}   95% interval {agree.low:.3f} to {agree.high:.3f}")
    if kappa is None:
        print("  Cohen's kappa  undefined, because both give the same verdict on every answer")
    else:
        print(f"  Cohen's kappa  {kappa.value:.3f}   95% interval {kappa.low:.3f} to {kappa.high:.3f}")


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """Yields an iterator over key presses, or over the characters of standard input if it is not a terminal; empty if it is closed."""
    if sys.stdin is None:
        yield iter(())
        return
    pressed = iter(lambda: sys.stdin.read(1), "")
    if not sys.stdin.isatty():
        yield pressed
        return
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    tty.setcbreak(handle, termios.TCSADRAIN)  # for the entire session, because otherwise keys pressed in between would be lost
    try:
        yield pressed
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() or done == total:
        print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
