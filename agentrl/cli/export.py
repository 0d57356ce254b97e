"""`agentrl export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.base.numbers import plural
from agentrl.cli.running import JsonFlag, RunFolder, progress_bar, say


def export(
    run_dir: RunFolder,
    to: Annotated[
        Literal["eval", "parquet", "atif", "jsonl"],
        typer.Option(help="eval: logs for `inspect view`, one file per step; parquet and jsonl: one row per episode; atif: documents."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder. Default: RUN/exports/FORMAT.")] = None,
    phase: Annotated[str, typer.Option(help="Only episodes of this phase: train, before, step8, after, ...")] = "",
    kind: Annotated[str, typer.Option(help="Only episodes of this kind of task.")] = "",
    outcome: Annotated[
        Literal["", "solved", "partial", "failed", "pending", "excluded"], typer.Option(help="Only episodes with this outcome.")
    ] = "",
    tool: Annotated[str, typer.Option(help="Only episodes that called this tool.")] = "",
    exclusion: Annotated[str, typer.Option(help="Only episodes excluded because of this kind of failure.")] = "",
    step: Annotated[int | None, typer.Option(min=1, help="Only groups of this learner step, counted from 1.")] = None,
    policy_version: Annotated[int | None, typer.Option("--version", min=0, help="Only episodes sampled by this policy version.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Only episodes with at least this score.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Only episodes with at most this score.")] = None,
    text: Annotated[str, typer.Option(help="Only episodes that contain these words; a word that ends in * is a prefix.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Write the episodes of a run, with their exact tokens, to files. The run may be in progress.

    Files of an earlier export with the same names are replaced.
    """
    from agentrl.experience.episode_query import EpisodeQuery
    from agentrl.session.exports import export_episodes

    query = EpisodeQuery(
        phase=phase,
        kind=kind,
        outcome=outcome,
        tool=tool,
        exclusion=exclusion,
        step=step,
        version=policy_version,
        min_score=min_score,
        max_score=max_score,
        text=text,
    )
    with progress_bar("episodes") as progress:
        exported = export_episodes(run_dir, to, out, query=query, progress=progress)
    if not exported.is_complete:
        print("the episodes of older steps are not exported: they were deleted because of store.options.keep_steps", file=sys.stderr)
    if as_json:
        print(json.dumps({"folder": str(exported.folder), "files": exported.files, "episodes": exported.episodes}))
    else:
        say(f"wrote {plural(exported.episodes, 'episode')} to {plural(exported.files, 'file')} in {exported.folder}")
