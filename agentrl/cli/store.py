"""`agentrl store`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.base.numbers import plural
from agentrl.base.user_code import one_line
from agentrl.cli.running import JsonFlag, RunFolder, progress_bar, say
from agentrl.errors import UserError
from agentrl.experience.audit import LedgerCounts
from agentrl.protocols import ExperienceStore
from agentrl.records import LedgerEntry
from agentrl.records.late_score import LAST_EXPIRY

_PAGE = 1000  # episodes with late scores that are read at once
_SHOWN = 20  # groups or problems printed without --all


def store(
    run_dir: RunFolder,
    state: Annotated[
        Literal["issued", "running", "parked", "ready", "assigned", "trained", "excluded"] | None,
        typer.Option(help="List only groups in this state."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="List only groups of this learner step, counted from 1.")] = None,
    list_all: Annotated[bool, typer.Option("--all", help=f"List all groups. Default: the newest {_SHOWN}.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the ledger with all groups, the newest checkpoint and metrics.jsonl.")
    ] = False,
    index: Annotated[
        bool,
        typer.Option(
            "--index", help="Index the episodes of a run that an older version of agentrl wrote or that uses a user-supplied store."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the groups of a run and count its sampled, trained, excluded and open tokens. The command also works during the run.

    A group is issued (its block has started), running (an attempt has finished or saved a turn), parked (it waits for late scores), ready,
    assigned to a learner step, trained, or excluded (its step trained none of its tokens). Open tokens belong to parked, ready and assigned
    groups. The exit code is 1 if --verify reports a problem.
    """
    from agentrl.experience import audit

    if index:
        _index(run_dir, as_json=as_json)
        return
    with open_run_store(run_dir) as opened, progress_bar("groups") as bar:
        if opened.parked():
            opened.expire_scores(now=time.time())
        entries = opened.entries()
        unstored = audit.unstored_groups(run_dir, opened, entries)
        expiries = _expiries(opened)
        problems = list(islice(audit.verify(run_dir, opened, progress=bar), audit.MAX_PROBLEMS)) if verify else []
    counts = audit.count(entries)
    chosen = [entry for entry in entries if state in (None, entry.state) and (step is None or entry.step == step - 1)]
    if as_json:
        groups = [_as_data(entry) for entry in chosen]
        data = {"counts": asdict(counts), "unstored": unstored, "next_expiry": min(expiries, default=None), "groups": groups}
        print(json.dumps(data | {"problems": problems, "verified": verify}))
        raise typer.Exit(1 if problems else 0)
    numbers = {"issued": 0, "running": 0, **Counter(unstored.values()), **counts.groups}
    print(", ".join(f"{number} {name}" for name, number in numbers.items()) + f" of {plural(sum(numbers.values()), 'group')}")
    print(audit.token_balance(counts.tokens))
    _print_counts(counts, expiries)
    _print_groups(chosen if list_all else chosen[-_SHOWN:], hidden=0 if list_all else max(0, len(chosen) - _SHOWN))
    for group in () if step is not None else (group for group, name in unstored.items() if state in (None, name)):
        print(f"{group:>7}  {unstored[group]}")
    for problem in problems:
        print(f"FAIL  {one_line(problem)}")
    if verify and not problems:
        print("ok    the ledger agrees with groups, checkpoint and metrics")
    raise typer.Exit(1 if problems else 0)


def _print_counts(counts: LedgerCounts, expiries: Sequence[float]) -> None:
    if counts.residuals:
        print(f"{counts.tokens_residual:,} tokens of {counts.residuals} groups were trained again for late parts (residuals)")
    if counts.parts_pending:
        first = f"; the next expires at {datetime.fromtimestamp(min(expiries)).isoformat(' ', 'seconds')}" if expiries else ""
        print(f"{counts.parts_pending} parts of late scores have not arrived{first}")
    for reason, number in counts.unused.items():
        print(f"  {number:>6} groups without trained tokens: {one_line(reason)}")


def _index(run_dir: Path, *, as_json: bool) -> None:
    """Builds `episodes.sqlite`, unless the store itself contains a table of episodes."""
    from agentrl.experience.index_copy import OlderStore, copy_episodes

    with progress_bar("groups") as bar:
        if (path := run_dir / "experience.sqlite").is_file():
            with closing(OlderStore(path)) as older:
                groups = None if older.has_index else copy_episodes(run_dir, older, progress=bar)
        else:
            with open_run_store(run_dir) as opened:
                groups = copy_episodes(run_dir, opened, progress=bar)
    if as_json:
        print(json.dumps({"indexed": groups}))
    elif groups is None:
        print("the store has an index, which is always up to date")
    else:
        say(f"indexed {plural(groups, 'group')} in {run_dir / 'episodes.sqlite'}; repeat this command to index later groups")


def _expiries(opened: ExperienceStore) -> list[float]:
    """Returns the expiry of each pending part, in Unix time. Each time is limited to a valid range, because the file may contain times that
    agentrl did not write."""
    expiries, after = list[float](), ""
    while page := opened.pending_scores(limit=_PAGE, after=after):
        expiries += [min(max(part.expires_at, 0.0), LAST_EXPIRY) for part in page if part.expires_at is not None]
        after = page[-1].episode_id
    return expiries


def _as_data(entry: LedgerEntry) -> dict[str, object]:
    return asdict(entry) | {"state": entry.state, "step": None if entry.step is None else entry.step + 1}


def _print_groups(entries: Sequence[LedgerEntry], *, hidden: int) -> None:
    print(f"{'group':>7}  {'state':9}{'step':>6}{'version':>9}{'attempts':>10}{'tokens':>9}{'trained':>9}  task")
    for entry in entries:
        step = None if entry.step is None else entry.step + 1
        trained = None if entry.use is None else entry.use.tokens_trained
        cells = (step, entry.oldest_version, f"{entry.counted}/{entry.attempts}", entry.tokens_sampled, trained)
        texts = ("-" if cell is None else str(cell) for cell in cells)
        columns = "".join(text.rjust(width) for text, width in zip(texts, (6, 9, 10, 9, 9), strict=True))
        print(f"{entry.index:>7}  {entry.state:9}{columns}  {one_line(entry.task_id)}")
    if hidden:
        print(f"{hidden} older groups are not shown; --all lists them")


@contextmanager
def open_run_store(run_dir: Path) -> Iterator[ExperienceStore]:
    """Opens the store of a run for one command. Raises `UserError` if the folder contains no run or no valid recipe, or if no group has
    been stored yet, and the errors of `open_store`."""
    from agentrl.config import recipe
    from agentrl.experience import open_store
    from agentrl.plugins.parts import STORE
    from agentrl.plugins.references import add_project_root

    if not (run_dir / "recipe.json").is_file():
        raise UserError(f"{run_dir} is not a run folder", fix="give the folder of a run, such as runs/quickstart")
    add_project_root(Path.cwd())  # for a user-supplied store
    loaded = recipe.load(run_dir / "recipe.json")
    if loaded.store.ref in STORE.shipped and not (run_dir / "experience.sqlite").is_file():
        raise UserError(
            f"{run_dir} has no stored groups yet", fix="wait until the first group is stored, or give the folder of a different run"
        )
    with closing(open_store(run_dir, loaded)) as opened:
        yield opened
