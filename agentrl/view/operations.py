"""The operations that change a run: the functions behind `agentrl failures tag`, `agentrl failures promote`, `agentrl label` and `agentrl
score`.

A page asks for confirmation before it sends an operation. Each operation is recorded with its user and result in `operations.jsonl` in the
run folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.base.error_text import reason_text
from agentrl.base.files import append_lines, json_line
from agentrl.base.untrusted_files import check_output
from agentrl.errors import UserError
from agentrl.experience.late_parts import Clock
from agentrl.experience.store import SqliteStore
from agentrl.failure.collection import FILE, Collection
from agentrl.failure.digest import write_digest
from agentrl.failure.promote import promote
from agentrl.failure.trace import Trace
from agentrl.failure.triage import manual_tag
from agentrl.judge.labelling import LabellingSession, labels_file
from agentrl.judge.labels import RIGHT, SKIP, WRONG, parse_item
from agentrl.records import ScoredEpisode, codec
from agentrl.session.late_scores import read_score
from agentrl.session.transcript import transcript
from agentrl.view.source import Missing, RunSource

LOG_FILE = "operations.jsonl"
MAX_NOTE = 2000

log = logging.getLogger(__name__)

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that a page can request: the fields of the request, and the function that performs the operation for a user."""

    name: str
    fields: tuple[str, ...]
    work: Callable[[RunSource, Body, str], dict[str, Any]]

    def run(self, source: RunSource, body: Body, user: str) -> dict[str, Any]:
        """Performs the operation and records it. If only the record cannot be written, the message of the result says so. Raises
        `UserError` if a field is invalid or the operation cannot be performed, and `StoreError` if a file of the run cannot be read."""
        with source.lock:
            _check_output(source, source.path / LOG_FILE)
            _check_text(body)
            try:
                result = self.work(source, body, user)
            except OSError as error:  # a full disk, a read-only folder, or a name that is too long
                raise UserError(
                    f"{self.name} failed: {error.strerror}", fix="check the disk and the write permission of the folder"
                ) from error
            at = datetime.now(UTC).isoformat(timespec="seconds")
            try:
                append_lines(source.path / LOG_FILE, [json_line({"at": at, "by": user, "operation": self.name, **body, "result": result})])
            except OSError as error:
                log.warning("%s of run %s by %s is not recorded in %s: %s", self.name, source.name, user, LOG_FILE, error)
                result["message"] += f", but this is not recorded in {LOG_FILE}: {error.strerror}"
        log.info("%s of run %s by %s", self.name, source.name, user)
        return result


def _tag(source: RunSource, body: Body, user: str) -> dict[str, Any]:
    turn = body.get("turn")
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or turn < 1):
        raise UserError("turn must be a number of at least 1", fix="leave it empty if the failure has no single turn")
    tag = manual_tag(_text(body, "tag"), by=user, turn=turn, note=_text(body, "note", optional=True))
    with Collection(source.path) as collection:
        trace = _trace(collection, body)
        collection.tag(trace.id, (*trace.tags, tag))
    write_digest(source.path)
    return {"message": f"{trace.id} is tagged {tag.name}"}


def _label(source: RunSource, body: Body, user: str) -> dict[str, Any]:
    label = _text(body, "label")
    if label not in (RIGHT, WRONG, SKIP):
        raise UserError(f"label must be {RIGHT}, {WRONG} or {SKIP}", fix="press one of the buttons")
    with Collection(source.path) as collection:
        trace = _trace(collection, body)
    if trace.task is None or trace.episode is None or trace.score is None:
        raise UserError(f"trace {trace.id} comes from a different agent and has no task", fix="label an episode of a run")
    line = transcript(trace.task, ScoredEpisode(episode=trace.episode, score=trace.score), phase=trace.phase, step=trace.step)
    try:
        item = parse_item({key: line[key] for key in ("task_id", "question", "answer", "truth", "messages")})
    except ValueError as error:
        raise UserError(f"trace {trace.id} has no answer to label: {error}", fix="label an episode that submitted an answer") from None
    path = labels_file(source.path, user)
    _check_output(source, path)
    LabellingSession(items=[item], path=path, by=user).save(item, label)
    return {"message": f"the answer of {trace.id} is labelled {label} in {path.relative_to(source.path)}"}


def _promote(source: RunSource, body: Body, user: str) -> dict[str, Any]:
    with Collection(source.path) as collection:
        trace = _trace(collection, body)
    suite = _suite(_text(body, "suite"))
    (done,) = promote([trace], suite, note=_text(body, "note", optional=True), by=user)
    return {"message": done.summary, "case": done.case, "new": done.path is not None}


def _score(source: RunSource, body: Body, user: str) -> dict[str, Any]:
    source.store()  # raises StoreError for a file that is not a store of this version
    store = SqliteStore(source.path / "experience.sqlite", busy_timeout_s=5.0)
    try:
        receipt = store.add_score(read_score(dict(body), scored_by=user), now=Clock().now())
    finally:
        store.close()
    return {"message": "the score is stored", **codec.to_data(receipt)}


OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(name="tag", fields=("trace", "tag", "turn", "note"), work=_tag),
        Operation(name="label", fields=("trace", "label"), work=_label),
        Operation(name="promote", fields=("trace", "suite", "note"), work=_promote),
        Operation(name="score", fields=("episode_id", "part", "value"), work=_score),
    )
}
"""Name of the operation in the URL -> operation."""


def _text(body: Body, name: str, *, optional: bool = False) -> str:
    value = body.get(name, "" if optional else None)
    if not isinstance(value, str) or len(value) > MAX_NOTE or not (value or optional):
        raise UserError(f"{name} must be a string of at most {MAX_NOTE} characters", fix="fill in or shorten the field")
    if "\0" in value:
        raise UserError(f"{name} contains a null character", fix="type it again")
    return value


def _check_text(body: Body) -> None:
    """Raises `UserError` if a string contains half a surrogate pair, which cannot be written to a file."""
    try:
        json_line(dict(body))
    except UnicodeEncodeError:
        raise UserError("a field contains half a surrogate pair, which is not a character", fix="type it again") from None


def _check_output(source: RunSource, path: Path) -> None:
    """Raises `UserError` if writing to the path would change a file outside the run folder, which may come from a third party."""
    try:
        check_output(path, inside=source.path)
    except (OSError, ValueError) as error:
        name = path.relative_to(source.path)
        raise UserError(
            f"{name} of {source.name}: {reason_text(error)}, so nothing was changed", fix=f"remove {name} from the run folder"
        ) from None


def _trace(collection: Collection, body: Body) -> Trace:
    name = _text(body, "trace")
    trace = collection.get(name)
    if trace is None:
        raise Missing(f"{FILE} has no trace {name[:100]!r}", fix="return to the list of failures")
    return trace


def _suite(text: str) -> Path:
    """Returns the folder of a suite, relative to the current folder of the command. Raises `UserError` if the suite is not inside the
    current folder."""
    path = Path(text)
    if path.is_absolute() or ".." in path.parts or not (Path.cwd() / path).resolve().is_relative_to(Path.cwd()):
        raise UserError(
            "the suite must be inside the folder in which agentrl view was started", fix="give a path such as evals/regressions"
        )
    return path
