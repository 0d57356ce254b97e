"""`agentrl score`."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.base.user_code import one_line
from agentrl.cli.running import JsonFlag, RunFolder, require_web_server, say, user_name
from agentrl.cli.store import open_run_store
from agentrl.errors import UserError
from agentrl.protocols import ExperienceStore

if TYPE_CHECKING:
    from agentrl.session.late_scores import ImportReport

_SHOWN = 20  # pending parts or rejected lines printed without --json
_PAGE = 500


def score(
    run_dir: RunFolder,
    episode: Annotated[str | None, typer.Argument(help="Id of the episode.")] = None,
    part: Annotated[str | None, typer.Argument(help="Name of the pending part.")] = None,
    value: Annotated[float | None, typer.Argument(help="The score. Write -- before a negative number.")] = None,
    by: Annotated[str, typer.Option(help="Name of the scorer. Default: the user name.")] = "",
    key: Annotated[
        str,
        typer.Option(
            help="Idempotency key: scores with the same key count once. Default: a hash of the score, or a new key with --replace."
        ),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an earlier score. Possible while the group waits for more scores.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the pending scores.")] = False,
    import_file: Annotated[
        Path | None, typer.Option("--import", help="Send the scores in a file: one JSON object per line, as for POST /scores.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve POST /scores and a scoring page until ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0: any free port.")] = 8421,
    host: Annotated[str, typer.Option(help="Address that --serve listens on.")] = "127.0.0.1",
    blind: Annotated[bool, typer.Option("--blind", help="Hide the correct answers on the page.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the pending scores of a run, or send scores. The command works during the run and afterwards.

    Each line of the --import file has the form
    {"episode_id": ..., "part": ..., "value": ..., "scored_by": ..., "key": ..., "replace": ...}. The last three fields are optional. The
    exit code is 1 if a line is rejected, and 2 if the score EPISODE PART VALUE is rejected.
    """
    single = (episode, part, value)
    if replace and value is None:
        raise UserError("--replace needs EPISODE PART VALUE", fix='in a file or a request, write "replace": true')
    if sum((any(option is not None for option in single), list_all, import_file is not None, serve)) != 1:
        raise UserError(
            "give exactly one of EPISODE PART VALUE, --list, --import and --serve", fix="see the examples: agentrl score --help"
        )
    with open_run_store(run_dir) as store:
        if list_all:
            _list(store, as_json=as_json)
        elif import_file is not None:
            _import(store, import_file, by or user_name(""), as_json=as_json)
        elif serve:
            asyncio.run(_serve(store, run_dir, host, port, blind=blind, user=by or user_name("")))
        elif any(option is None for option in single):
            raise UserError("EPISODE, PART and VALUE must be given together", fix="agentrl score RUN EPISODE PART VALUE")
        else:
            key = key or (secrets.token_hex(16) if replace else "")  # a person may correct a score back and forth
            sent = {"episode_id": episode, "part": part, "value": value, "key": key or None, "replace": replace}
            _send(store, sent, by or user_name(""), as_json=as_json)


def _list(store: ExperienceStore, *, as_json: bool) -> None:
    from agentrl.experience.late_parts import Clock
    from agentrl.observe.stats import format_duration
    from agentrl.session.late_scores import pending_pages

    parts = [part for page in pending_pages(store, limit=_PAGE, now=Clock().now()) for part in page]
    if as_json:
        print(json.dumps(parts))
        return
    for part in parts[:_SHOWN]:
        left = "no limit" if part["left_s"] is None else f"{format_duration(part['left_s'])} left"
        episode, name, task = (one_line(part[key]) for key in ("episode_id", "part", "task_id"))
        print(f"{episode}  {name} {part['low']:g} to {part['high']:g}  {left}  {task}")
    print(f"{len(parts)} pending scores" + (f"; --json lists the other {len(parts) - _SHOWN}" if len(parts) > _SHOWN else ""))


def _send(store: ExperienceStore, data: dict[str, Any], by: str, *, as_json: bool) -> None:
    from agentrl.experience.late_parts import Clock
    from agentrl.records import codec, sampled_index
    from agentrl.session.late_scores import read_score

    receipt = store.add_score(read_score(data, scored_by=by), now=Clock().now())
    if as_json:
        print(json.dumps(codec.to_data(receipt)))
        return
    state = "was already stored" if receipt.repeated else "is stored"
    state += "" if receipt.replaced is None else f" and replaces {receipt.replaced:g}"
    group = sampled_index(receipt.group)
    print(f"the score {state}: attempt {receipt.attempt} of group {group}, which waits for {receipt.remaining} more scores")


def _import(store: ExperienceStore, path: Path, by: str, *, as_json: bool) -> None:
    from agentrl.session.late_scores import import_scores

    report: ImportReport = import_scores(store, path, scored_by=by)
    if as_json:
        print(json.dumps({**report.counts, "lines": report.rejected}))
    else:
        for line in report.rejected[:_SHOWN]:
            print(one_line(f"{path}:{line['line']}: {line['cause']}: {line['message']}; {line['fix']}"), file=sys.stderr)
        if (more := report.counts["rejected"] - _SHOWN) > 0:
            print(f"and {more} more rejected lines; --json lists up to 1,000", file=sys.stderr)
        print(", ".join(f"{count} {name}" for name, count in report.counts.items()))
    raise typer.Exit(1 if report.counts["rejected"] else 0)


async def _serve(store: ExperienceStore, run_dir: Path, host: str, port: int, *, blind: bool, user: str) -> None:
    require_web_server("--serve")
    from agentrl.gateway.http_server import HttpServer
    from agentrl.session.score_server import TOKEN_FILE, ScoreServer, run_token

    token = run_token(run_dir)
    routes = ScoreServer(store=store, run_dir=run_dir, token=token, blind=blind, user=user)
    server = HttpServer(app=routes.app(), name="score server", host=host, port=port)
    await server.start()
    try:
        say(f"programs: POST {server.url}/scores, Authorization: Bearer TOKEN, with the token in {run_dir / TOKEN_FILE}")
        print(f"people:   {server.url}/{f'#{token}' if sys.stdout.isatty() else ''}", flush=True)
        await server.wait()
    finally:
        await server.stop()
