"""The screens of `agentrl watch`: the runs of a folder, one run, and one episode. Each reads what changed, and shows what can be read.

A run folder may be half written, damaged, of another version or from a third party, and it may be removed meanwhile: each such part becomes
a note in the frame.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.text import Text

from agentrl.base.database import connect_read_only, query_deadline, read_pragma
from agentrl.base.files import tail_bytes
from agentrl.base.run_lock import driver_of
from agentrl.base.user_code import printable
from agentrl.errors import StoreError, UserError
from agentrl.experience.audit import token_balance
from agentrl.experience.episode_index import EpisodeIndex, EpisodeRow
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.experience.store import APPLICATION_ID, SCHEMA, translated_errors
from agentrl.observe import events
from agentrl.observe.event_log import newest_offset, read_events
from agentrl.observe.rundata import Line, is_finite, parse_object, read_lines, read_object
from agentrl.observe.summary import read_sessions
from agentrl.observe.timeline import UTILIZATION
from agentrl.records import Group, ScoredEpisode, Trajectory
from agentrl.watch.frames import (
    Curve,
    EpisodeLine,
    Part,
    RunFrame,
    RunLine,
    Size,
    Transcript,
    run_frame,
    runs_frame,
    shown,
    transcript_frame,
)
from agentrl.watch.terminal import Screen

MAX_RUNS = 500
"""Runs of a folder that are listed: the newest."""
_LATELY_S = 60.0
RUN_FILES = ("recipe.json", "metrics.jsonl", "summary.json")
CURVES = {"loss": "loss", "entropy": "entropy", "kl": "kl", "grad_norm": "grad norm", "tokens_per_s": "tokens/s", "step_s": "step s"}
_MAX_FILE = 256 << 20  # bytes of a file
_MAX_PAGES = 20  # of events that one refresh reads
_LISTED = 100  # newest episodes
_ALERTS = 20
_IN_FLIGHT = 10_000
_NEWEST = 10  # steps from which the remaining time is estimated
_LONGEST_S, _LARGEST = 1e9, 1e30  # a run of a third party may have any numbers
_QUERY_S = 5.0
_TOKENS = """
SELECT coalesce(sum(tokens_sampled), 0), coalesce(sum(iif(checkpoint IS NULL, 0, tokens_trained)), 0),
       coalesce(sum(iif(checkpoint IS NULL, tokens_sampled, 0)), 0)
FROM groups LEFT JOIN taken USING (idx) WHERE idx >= 0
"""
"""Sampled, trained and open tokens, as `agentrl.experience.audit.count` counts them."""
_STYLES = {"assistant": "green", "tool": "yellow"}
T = TypeVar("T")


def open_screen(path: Path) -> Screen:
    """Returns the screen of a run, or of the runs in a folder. Raises `UserError` if there is no such folder."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", fix="give a run, such as runs/quickstart, or the folder of your runs")
    return RunScreen(path) if is_run(path) else RunsScreen(path)


def is_run(path: Path) -> bool:
    """Whether a folder contains a run."""
    return any((path / name).is_file() for name in RUN_FILES)


def run_state(folder: Path) -> str:
    """Returns `running`, or how the newest session of a run ended: finished, interrupted, failed or killed; `new` before its first one."""
    if driver_of(folder) is not None:
        return "running"
    ended: str = _tried(lambda: sessions[-1].ended if (sessions := read_sessions(folder)) else "new", "new")
    lately = ended == "killed" and time.time() - _changed_at(folder) < _LATELY_S  # the driver may run on another machine
    return "running" if lately else ended


class _Cached:
    """Reads a file again when it changed."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self._path, self._read, self._mark, self._value = path, read, (-1, -1), None

    def get(self) -> Any:
        """Returns what `read` returned for the newest version of the file."""
        try:
            status = os.stat(self._path)
            mark = status.st_mtime_ns, status.st_size
        except OSError:
            mark = 0, 0
        if mark != self._mark:
            self._value = self._read(self._path)
            self._mark = mark
        return self._value


class RunScreen:
    """One run: curves, health and its newest episodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics = _Cached(folder / "metrics.jsonl", lambda path: _read_metrics(path))
        self._recipe = _Cached(folder / "recipe.json", lambda path: read_object(path, [], most=_MAX_FILE))
        self._evaluations = _Cached(folder / "evaluations.json", lambda path: read_object(path, [], most=_MAX_FILE))
        self._ledger = _Cached(folder / "experience.sqlite-wal", lambda path: self._count())
        self._index: EpisodeIndex | None = None
        self._offset: int | None = None
        self._stage, self._alerts = "", deque[str](maxlen=_ALERTS)
        self._restarts, self._in_flight = Counter[str](), dict[str, None]()
        self._seen_events = False
        self._rows: tuple[EpisodeRow, ...] = ()
        self._selected: str | None = None  # id of an episode; None follows the newest
        self.frame = RunFrame(name=folder.name, state="")

    def refresh(self) -> None:
        """Reads what changed."""
        notes: list[str] = []
        if not self._folder.is_dir():
            self.frame = RunFrame(name=self._folder.name, state="removed", notes=("the run folder was removed or renamed",))
            return
        _tried(self._read_events, None, notes)
        steps, unreadable = self._metrics.get()
        self._rows = _tried(self._read_rows, (), notes)
        state = run_state(self._folder)
        recipe = self._recipe.get()
        of = recipe.get("steps") if isinstance(recipe.get("steps"), int) else None
        newest = steps[-1] if steps else {}
        done = newest.get("step", 0)
        self.frame = RunFrame(
            name=self._folder.name,
            state=state,
            stage=self._stage if state == "running" else "",
            step=done,
            steps=of,
            left_s=_left_s(steps, of) if state == "running" else None,
            success=tuple(self._success(steps)),
            reward=_curve(steps, "reward_mean", "reward", "{:.3f}".format),
            curves=tuple(curve for key, label in CURVES.items() if (curve := _curve(steps, key, label)) is not None),
            parts=tuple(
                (key.removeprefix(UTILIZATION), newest[key]) for key in newest if key.startswith(UTILIZATION) and is_finite(newest[key])
            )[:8],
            restarts=tuple(self._restarts.items()),
            ledger=_tried(self._ledger.get, "", notes) or "",
            alerts=tuple(reversed(self._alerts)),
            running=len(self._in_flight) if self._seen_events else None,
            episodes=tuple(map(_listed, self._rows)),
            selected=self._position(),
            notes=tuple(note.replace(f"{self._folder}/", "") for note in dict.fromkeys([*unreadable, *notes])),
        )

    def lines(self, size: Size) -> list[Text]:
        """Returns the lines of the frame."""
        return run_frame(self.frame, size)

    def key(self, name: str) -> Screen | None:
        """Selects an episode, or opens the selected one."""
        moves = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -_LISTED, "end": _LISTED}
        if name in moves and self._rows:
            position = max(0, min(self._position() + moves[name], len(self._rows) - 1))
            self._selected = self._rows[position].id if position else None
            self.frame = replace(self.frame, selected=position)
        if name in ("enter", "right") and self._rows:
            return EpisodeScreen(self._folder, tuple(row.id for row in self._rows), self._position())
        return None

    def close(self) -> None:
        """Closes the index."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def _position(self) -> int:
        return next((position for position, row in enumerate(self._rows) if row.id == self._selected), 0)

    def _read_rows(self) -> tuple[EpisodeRow, ...]:
        try:
            if self._index is None:
                self._index = EpisodeIndex(self._folder)
            return self._index.search(EpisodeQuery(limit=_LISTED)).rows
        except BaseException:
            self.close()
            raise

    def _count(self) -> str:
        """Returns the balance of the ledger's tokens. It only reads, and the folder may come from a third party."""
        path = self._folder / "experience.sqlite"
        if not path.is_file():
            return ""
        with translated_errors(path), closing(connect_read_only(path, SCHEMA, timeout_s=_QUERY_S)) as db, query_deadline(db, _QUERY_S):
            if read_pragma(db, "application_id") != APPLICATION_ID:
                raise StoreError(f"{path} is an SQLite file but not an experience store")
            sampled, trained, left = db.execute(_TOKENS).fetchone()
        return token_balance({"sampled": sampled, "trained": trained, "excluded": sampled - trained - left, "open": left})

    def _success(self, steps: list[Line]) -> Iterator[tuple[str, float]]:
        """Yields the newest success on held-out tasks: after training, or during it, or before."""
        phases = self._evaluations.get()
        for split, label in (("heldout", "held-out"), ("heldout_real", "held-out, real")):
            during = [line[split] for line in steps if is_finite(line.get(split))]
            after, before = (_value(phases, phase, split) for phase in ("after", "before"))
            newest = after if after is not None else during[-1] if during else before
            if newest is not None:
                yield label, newest

    def _read_events(self) -> None:
        if self._offset is None:
            self._offset = newest_offset(self._folder)
        for _ in range(_MAX_PAGES):
            page = read_events(self._folder, after=self._offset)
            for event in page.events:
                self._take(event)
            if page.offset == self._offset:
                return
            self._offset = page.offset

    def _take(self, event: events.Event) -> None:
        self._seen_events = True
        if isinstance(event, events.RunStarted):
            self._in_flight.clear()
        elif isinstance(event, events.StageStarted):
            self._stage = event.stage
        elif isinstance(event, events.AlertRaised):
            self._alerts.append(event.text)
        elif isinstance(event, events.PartRestarted):
            self._restarts[shown(event.part, 40) if len(self._restarts) < 40 else "others"] += 1
        elif isinstance(event, events.EpisodeStarted) and len(self._in_flight) < _IN_FLIGHT:
            self._in_flight[event.episode] = None
        elif isinstance(event, events.EpisodeEnded):
            self._in_flight.pop(event.episode, None)


class RunsScreen:
    """The runs of a folder, the newest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[tuple[Path, RunLine]] = []
        self._selected, self._notes = 0, list[str]()

    def refresh(self) -> None:
        """Reads the list of runs."""
        self._notes = []
        self._runs = _tried(lambda: [(path, _run_line(path)) for path in _run_folders(self._folder)], [], self._notes)
        self._selected = max(0, min(self._selected, len(self._runs) - 1))

    def lines(self, size: Size) -> list[Text]:
        """Returns the lines of the frame."""
        title = f"{len(self._runs)} runs in {self._folder}"
        return runs_frame([line for _, line in self._runs], self._selected, size, title=title, notes=self._notes)

    def key(self, name: str) -> Screen | None:
        """Selects a run, or opens the selected one."""
        moves = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -MAX_RUNS, "end": MAX_RUNS}
        self._selected = max(0, min(self._selected + moves.get(name, 0), len(self._runs) - 1))
        return RunScreen(self._runs[self._selected][0]) if name in ("enter", "right") and self._runs else None

    def close(self) -> None:
        """Does nothing."""


class EpisodeScreen:
    """The transcript of an episode; n and p show the next and the previous one of the list."""

    def __init__(self, folder: Path, ids: tuple[str, ...], position: int) -> None:
        self._folder, self._ids, self._position = folder, ids, position
        self._transcript: Transcript | None = None
        self._page = 10  # lines

    def refresh(self) -> None:
        """Reads the episode, once: it does not change."""
        if self._transcript is None:
            notes: list[str] = []
            self._transcript = _tried(self._read, None, notes) or Transcript(
                title=self._ids[self._position],
                facts="",
                parts=tuple(Part(who="note", text=note) for note in notes or ["the episode is not stored"]),
            )

    def lines(self, size: Size) -> list[Text]:
        """Returns the visible lines."""
        self.refresh()
        assert self._transcript is not None
        self._page = max(1, size.height - 4)
        return transcript_frame(self._transcript, size)

    def key(self, name: str) -> Screen | None:
        """Scrolls, or changes the episode."""
        moves = {"up": -1, "down": 1, "page up": -self._page, "page down": self._page, "home": -(1 << 30), "end": 1 << 30}
        if self._transcript is not None:
            self._transcript.top += moves.get(name, 0)
        if name in ("n", "p"):
            position = max(0, min(self._position + (1 if name == "n" else -1), len(self._ids) - 1))
            if position != self._position:
                self._position, self._transcript = position, None
        return None

    def close(self) -> None:
        """Does nothing."""

    def _read(self) -> Transcript | None:
        with EpisodeIndex(self._folder) as index:
            record = index.episode(self._ids[self._position])
        return None if record is None else transcript_of(record.group, record.scored)


def transcript_of(group: Group, scored: ScoredEpisode) -> Transcript:
    """Returns an episode as messages: of each agent the prompt, the turns with their calls, and the results of tools."""
    episode, score = scored.episode, scored.score
    parts: list[Part] = []
    for number, line in enumerate(episode.trajectories):
        if number:
            parts.append(Part(who=f"agent {line.agent}, trajectory {number}", text=""))
        parts += _messages(group, line)
    parts += [Part(who=f"failure: {one.blame} {one.kind}", text=one.message, style="red") for one in episode.failures]
    why = score.evidence or score.reason
    parts.append(Part(who="score", text="\n".join([*(f"{name} {value:g}" for name, value in score.parts.items()), why]).strip()))
    value = "no score" if score.value is None else f"score {score.value:g}"
    versions = sorted({span.version for line in episode.trajectories for turn in line.turns for span in turn.versions})
    of = f"version {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else "") if versions else "no tokens"
    facts = [value, episode.stop_reason, f"{episode.completion_tokens} tokens", of, f"{episode.wall_s:.1f} s"]
    return Transcript(title=f"{episode.id}  {group.kind}  {group.task_id}", facts=" · ".join(filter(None, facts)), parts=tuple(parts))


def _messages(group: Group, line: Trajectory) -> Iterator[Part]:
    for message in line.prompt or group.prompt:
        yield Part(who=message.role, text=message.content)
    for number, turn in enumerate(line.turns, 1):
        calls = [f"{call.name}({_arguments(call.arguments)})" for call in turn.message.tool_calls]
        text = "\n".join(filter(None, [turn.message.content, *calls]))
        yield Part(who=f"assistant, turn {number}, {turn.generate_s:.1f} s, {turn.finish_reason}", text=text, style=_STYLES["assistant"])
        for result in turn.tool_results:
            yield Part(
                who=f"{result.name}, {result.wall_s:.1f} s{'' if result.ok else ', failed'}", text=result.output, style=_STYLES["tool"]
            )


def _arguments(arguments: Any) -> str:
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return f"\n{values[0]}\n" if "\n" in values[0] else values[0]
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _listed(row: EpisodeRow) -> EpisodeLine:
    return EpisodeLine(
        id=row.id, kind=row.kind, score=row.score, outcome=row.outcome, turns=row.turns, tokens=row.tokens, version=row.newest_version
    )


def _read_metrics(path: Path) -> tuple[list[Line], list[str]]:
    """Returns the steps in order, and what could not be read."""
    notes: list[str] = []
    by_step = {line["step"]: line for line in read_lines(path, {"step": int}, notes, most=_MAX_FILE)}
    return [by_step[step] for step in sorted(by_step)], notes


def _curve(steps: list[Line], key: str, label: str, form: Callable[[float], str] = "{:.3g}".format) -> Curve | None:
    values = tuple(max(-_LARGEST, min(_LARGEST, float(line[key]))) for line in steps if is_finite(line.get(key)))
    return Curve(label=label, values=values, form=form) if values else None


def _left_s(steps: list[Line], of: int | None) -> float | None:
    times = [line["step_s"] for line in steps[-_NEWEST:] if is_finite(line.get("step_s"))]
    if of is None or not times:
        return None
    return min(_LONGEST_S, max(0, of - int(steps[-1]["step"])) * float(statistics.median(times)))


def _value(phases: Line, phase: str, split: str) -> float | None:
    splits = phases.get(phase)
    result = splits.get(split) if isinstance(splits, dict) else None
    value = result.get("value") if isinstance(result, dict) else None
    return float(value) if is_finite(value) else None


def _run_folders(folder: Path) -> list[Path]:
    """Returns the run folders in a folder, the newest first. Links are not followed."""
    runs = []
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and is_run(path):
                runs.append((_changed_at(path), path))
    return [path for _, path in sorted(runs, reverse=True)[:MAX_RUNS]]


def _changed_at(folder: Path) -> float:
    times = [_tried(lambda path=folder / name: path.stat().st_mtime, 0.0) for name in (*RUN_FILES, "events")]  # type: ignore[misc]
    return max(times)


def _run_line(folder: Path) -> RunLine:
    recipe = read_object(folder / "recipe.json", [], most=_MAX_FILE)
    newest: Line = {}
    newest = _tried(lambda: _last_step(folder), newest)
    reward = newest.get("reward_mean")
    of = recipe.get("steps")
    return RunLine(
        name=folder.name,
        state=run_state(folder),
        step=newest.get("step", 0),
        steps=of if isinstance(of, int) else None,
        reward=reward if is_finite(reward) else None,
        changed_s=max(0.0, time.time() - _changed_at(folder)),
    )


def _last_step(folder: Path) -> Line:
    for text in reversed(tail_bytes(folder / "metrics.jsonl", most=1 << 17).splitlines()):
        line = parse_object(text)
        if line is not None and isinstance(line.get("step"), int):
            return line
    return {}


def _tried(read: Callable[[], T], otherwise: T, notes: list[str] | None = None) -> T:
    """Returns what `read` returns; if it fails, `otherwise`, and the reason in `notes`."""
    try:
        return read()
    except (OSError, ValueError, StoreError, UserError) as error:
        if notes is not None:
            notes.append(printable(str(error).partition("\n")[0], 300))
        return otherwise
