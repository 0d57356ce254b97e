"""The format of late scores: senders send one JSON object per score and get one response per score.

    {"episode_id": "g12-3", "part": "review", "value": 0.5, "scored_by": "anna", "key": "review-812"}

`scored_by` and `key` are optional. The default key is a hash of the other fields, so a score that is sent twice is recognized. `"replace":
true` corrects an earlier value. A correction that was itself corrected needs a different key if it is to be sent again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.base.untrusted_files import open_file
from agentrl.base.user_code import printable
from agentrl.errors import ScoreRejected, UserError
from agentrl.experience.late_parts import Clock
from agentrl.protocols import ExperienceStore
from agentrl.records import LateScore, ScoreReceipt, codec

FIELDS = ("episode_id", "part", "value", "scored_by", "key", "replace")
ANONYMOUS = "anonymous"
"""`LateScore.scored_by` if a score does not name its sender."""
MAX_LINE = 64 << 10
"""Maximum size in bytes of one line in an imported file."""
MAX_LINES = 200_000
_SHOWN = 300  # maximum number of characters of a string in an error message
_MAX_REPORTED = 1000  # maximum number of rejected lines in a report, with their reasons


def read_score(data: Any, *, scored_by: str = "", sent: Counter[str] | None = None) -> LateScore:
    """Returns the score that a JSON value contains. Raises `ScoreRejected` with the cause `malformed` or `not_finite`.

    Args:
        scored_by: the sender, if the score does not contain one.
        sent: default keys of the earlier corrections in the same file. A repeated default key is replaced by a different key. None if the
            score does not come from a file.
    """
    fix = f"send an object with episode_id, part and value, such as {_EXAMPLE}"
    if not isinstance(data, dict):
        raise ScoreRejected(f"a score must be an object, got {type(data).__name__}", cause="malformed", fix=fix)
    if unknown := [name for name in data if name not in FIELDS]:
        raise ScoreRejected(f"unknown field {_brief(unknown[0])}", cause="malformed", fix=f"the fields of a score are {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS[:3] if data.get(name) is None]:
        raise ScoreRejected(f"the field {missing[0]} is missing", cause="malformed", fix=fix)
    value = data["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScoreRejected(f"value must be a number, got {type(value).__name__}", cause="malformed", fix=fix)
    if not _is_finite(value):
        raise ScoreRejected("value is not finite", cause="not_finite", fix="send a finite number within the range of the part")
    if not isinstance(replace := data.get("replace", False), bool):
        raise ScoreRejected("replace must be true or false", cause="malformed", fix=fix)
    names = {name: data[name] for name in FIELDS if name not in ("value", "replace") and data.get(name) is not None}
    if wrong := [name for name, text in names.items() if not isinstance(text, str)]:
        raise ScoreRejected(f"{wrong[0]} must be a string", cause="malformed", fix=fix)
    names.setdefault("scored_by", scored_by or ANONYMOUS)
    names.setdefault("key", _default_key(names, value, replace=replace, sent=sent))
    try:
        return LateScore(value=float(value), replace=replace, **names)
    except ValueError as error:
        raise ScoreRejected(printable(str(error), _SHOWN), cause="malformed", fix=fix) from None


_EXAMPLE = '{"episode_id": "...", "part": "review", "value": 0.5}'


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def _default_key(names: Mapping[str, str], value: float, *, replace: bool, sent: Counter[str] | None) -> str:
    content = json.dumps([names["episode_id"], names["part"], float(value), names["scored_by"], *(["replace"] if replace else [])])
    if replace and sent is not None:
        sent[content] += 1
        content += f" {sent[content]}" * (sent[content] > 1)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _brief(value: object) -> str:
    return ascii(value)[:80]


def pending_pages(store: ExperienceStore, *, limit: int, now: float, after: str = "") -> Iterator[list[dict[str, Any]]]:
    """Yields pages of pending parts as JSON data, with at most `limit` episodes per page. Records expired parts first, so that they are
    recorded even if no driver is running.

    The key `left_s` contains the remaining seconds; None means no limit.
    """
    store.expire_scores(now=now)
    while page := store.pending_scores(limit=limit, after=after):
        yield [{**codec.to_data(part), "left_s": None if part.expires_at is None else part.expires_at - now} for part in page]
        after = page[-1].episode_id


def error_data(error: UserError) -> dict[str, Any]:
    """Returns an error as JSON data: its cause (`malformed` unless it is a `ScoreRejected`), its message and its fix."""
    cause = error.cause if isinstance(error, ScoreRejected) else "malformed"
    return {"error": {"cause": cause, "message": error.message, "fix": error.fix}}


@dataclass(slots=True)
class ImportReport:
    """The result of importing a file. `rejected` describes the first 1,000 rejected lines: line number, cause, message and fix."""

    counts: Counter[str] = field(default_factory=lambda: Counter(accepted=0, repeated=0, rejected=0))
    rejected: list[dict[str, Any]] = field(default_factory=list)

    def accept(self, receipt: ScoreReceipt) -> None:
        """Counts a receipt."""
        self.counts["repeated" if receipt.repeated else "accepted"] += 1

    def reject(self, line: int, error: UserError) -> None:
        """Counts a rejected line."""
        self.counts["rejected"] += 1
        if len(self.rejected) < _MAX_REPORTED:
            self.rejected.append({"line": line, **error_data(error)["error"]})


def import_scores(store: ExperienceStore, path: Path, *, scored_by: str = "") -> ImportReport:
    """Sends the scores in a JSON-lines file to a store, in order. Skips blank lines. A rejected line does not stop the import.

    An interrupted import can be repeated. Lines that were already imported are then counted as repeated, or as rejected if later lines
    corrected them. Raises `UserError` if the file cannot be read, or after the first `MAX_LINES` lines if it has more, and `StoreError` if
    the store cannot be read or written.
    """
    report, clock, sent = ImportReport(), Clock(), Counter[str]()
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if number > MAX_LINES:
                    raise UserError(f"{path} has more than {MAX_LINES:,} lines", fix="split the file; the preceding lines were imported")
                try:
                    if len(line) > MAX_LINE:
                        raise UserError(f"longer than {MAX_LINE >> 10} KiB", fix="write one score per line")
                    if line.strip():
                        report.accept(store.add_score(read_score(parse(line), scored_by=scored_by, sent=sent), now=clock.now()))
                except UserError as error:
                    report.reject(number, error)
                while len(line) > MAX_LINE and not line.endswith(b"\n") and (line := file.readline(MAX_LINE + 1)):
                    pass  # skip the rest of a line that is too long
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{path}: {reason}", fix="use a file with one score per line") from None
    return report


def parse(text: bytes) -> Any:
    """Parses JSON text in which numbers may be infinite or NaN. Raises `ScoreRejected` if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ScoreRejected("this is not valid JSON", cause="malformed", fix=f"send {_EXAMPLE}") from None
