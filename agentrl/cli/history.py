"""`agentrl history`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.base.files import numbered_folders
from agentrl.base.user_code import one_line
from agentrl.cli.running import JsonFlag, say
from agentrl.cli.suites import differing_settings, evaluation
from agentrl.errors import UserError
from agentrl.evaluation import results
from agentrl.evaluation.results import EvaluationInfo, SuiteResults
from agentrl.gate.verdict import FOLDER as GATE

if TYPE_CHECKING:
    from agentrl.observe.evaluations import SuiteHistory

_NAME = 60  # characters


def history(
    evaluations: Annotated[
        list[str],
        typer.Argument(
            help="Evaluations, in the order to show them: evaluation folders, RUN@VERSION, or run folders, which add all versions that "
            "their gate evaluated."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="HTML file to write, with a plot for each suite.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show results on suites across policy versions: pass@1 with its interval, pass@k, and tokens, turns and time per attempt.

    Changes in the suite, sampling or threshold between two rows are marked. To test whether two evaluations differ, use `agentrl compare`.
    """
    from agentrl.observe.evaluations import write_history_page

    case_histories = histories([(name, results.load_results(folder)) for source in evaluations for name, folder in _expanded(source)])
    if out is not None:
        if out.is_dir() or not out.parent.is_dir():
            raise UserError(f"--out {out}: this is a folder, or its folder does not exist", fix="give a file in an existing folder")
        write_history_page(out, case_histories)
    if as_json:
        print(json.dumps([dataclasses.asdict(case_history) for case_history in case_histories]))
    else:
        say("\n\n".join(map(table, case_histories)) + (f"\n\n{out}" if out is not None else ""))


def histories(evaluations: Sequence[tuple[str, SuiteResults]]) -> list[SuiteHistory]:
    """Returns the history of each suite, in the order of first appearance."""
    from agentrl.observe.evaluations import HistoryRow, SuiteHistory

    rows: dict[str, list[HistoryRow]] = {}
    before: dict[str, EvaluationInfo] = {}
    for name, evaluated in evaluations:
        about, figures = evaluated.about, evaluated.figures()
        attempts = max(figures.attempts, 1)
        row = HistoryRow(
            of=one_line(name, _NAME),
            sha256=one_line(about.sha256[:12], _NAME),
            at=one_line(about.at, _NAME),
            version=about.version,
            rate=figures.pass_at_1,
            low=figures.low or 0.0,
            high=figures.high or 0.0,
            k=figures.k,
            pass_at_k=figures.pass_at_k,
            tokens=figures.tokens / attempts,
            turns=figures.turns or 0.0,
            seconds=sum(attempt.wall_s for attempt in evaluated.attempts if not attempt.again) / attempts,
            attempts=figures.attempts,
            unscored=figures.unscored,
            changed=", ".join(name.removesuffix("_sha256") for name in differing_settings(before.get(about.suite, about), about)),
        )
        rows.setdefault(about.suite, []).append(row)
        before[about.suite] = about
    return [SuiteHistory(suite=one_line(suite, _NAME), rows=tuple(suite_rows)) for suite, suite_rows in rows.items()]


def table(suite_history: SuiteHistory) -> str:
    """Returns a history as a text table."""
    contents = suite_history.table()
    lines = [(contents.title, *contents.columns), *((name, *cells) for name, cells in contents.rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    shown = (
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )
    return "\n".join([suite_history.suite, *(line.rstrip() for line in shown)])


def _expanded(named: str) -> Iterator[tuple[str, Path]]:
    """Yields the name and folder of each evaluation that an argument refers to. If it refers to no evaluation, yields one folder, which
    `load_results` rejects."""
    run = Path(named)
    gate = [path for path in numbered_folders(run / GATE) if (path / results.ABOUT).exists()]
    # A name with a leading dot marks an incomplete evaluation.
    several = sorted(path.parent for path in run.glob(f"suites/*/{results.ABOUT}") if not path.parent.name.startswith("."))
    if gate:
        yield from ((f"{run.name}@{int(path.name)}", path) for path in gate)
    elif several:
        yield from ((run.name, path) for path in several)
    else:
        yield (Path(named).name if run.exists() else named, evaluation(named))
