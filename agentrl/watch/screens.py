"""The screens of `agentrl watch`: the runs in a folder, one run, and one episode. Each screen reads the files that have changed, and shows
everything that can be read.

A run folder may be incomplete, damaged, from a different version or from a third party, and it may be removed at any time. A note in the
frame describes each part that cannot be read.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.text import Text

from agentrl.base.user_code import printable
from agentrl.errors import StoreError, UserError
from agentrl.experience.audit import token_balance
from agentrl.experience.episode_index import EpisodeIndex, EpisodeRow
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.experience.reading import StoreReader
from agentrl.observe import events
from agentrl.observe.event_log import newest_offset, read_events
from agentrl.observe.run_folders import changed_at, check_runs_folder, find_runs, is_run, last_step, run_state
from agentrl.observe.rundata import Line, is_finite, read_object
from agentrl.observe.tails import MetricsTable, read_new_lines
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
"""Maximum number of runs that are listed for a folder. The newest runs are listed."""
_LATELY_S = 60.0
CURVES = {
    "loss": "loss",
    "entropy": "entropy",
    "kl_behaviour": "kl",
    "grad_norm": "grad norm",
    "tokens_per_s": "tokens/s",
    "step_s": "step s",
}
_MAX_FILE = 256 << 20  # maximum size of a file in bytes
_MAX_PAGES = 20  # maximum number of pages of events that one refresh reads
_LISTED = 100  # maximum number of episodes that are listed; the newest are listed
_ALERTS = 20
_IN_FLIGHT = 10_000
_LARGEST = 1e30  # bound on the values of a curve, because a third party's run may contain any number
_STYLES = {"assistant": "green", "tool": "yellow"}
T = TypeVar("T")


def open_screen(path: Path) -> Screen:
    """Returns the screen of a run, or of the runs in a folder. Raises `UserError` if there is no such folder."""
    check_runs_folder(path)
    return RunScreen(path) if is_run(path) else RunsScreen(path)


def _state(folder: Path) -> str:
    """Returns the state of a run.

    A run that seems to have been killed but wrote to its folder recently counts as running, because its driver may be on a different
    machine.
    """
    state = run_state(folder)
    lately = state == "killed" and time.time() - (changed_at(folder) or 0.0) < _LATELY_S
    return "running" if lately else "new" if state == "unknown" else state


class _Cached:
    """Caches a value that is read from a file, and reads the file again after it has changed."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self._path, self._read, self._mark, self._value = path, read, (-1, -1), None

    def get(self) -> Any:
        """Returns the result of `read` for the newest version of the file."""
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
        self._metrics = MetricsTable(folder / "metrics.jsonl")
        self._recipe = _Cached(folder / "recipe.json", lambda path: read_object(path, [], most=_MAX_FILE))
        self._evaluations = _Cached(folder / "evaluations.json", lambda path: read_object(path, [], most=_MAX_FILE))
        self._ledger = _Cached(folder / "experience.sqlite-wal", lambda path: self._count())
        self._index: EpisodeIndex | None = None
        self._offset: int | None = None
        self._stage, self._alerts = "", deque[str](maxlen=_ALERTS)
        self._restarts, self._in_flight = Counter[str](), dict[str, None]()
        self._seen_events = False
        self._rows: tuple[EpisodeRow, ...] = ()
        self._selected: str | None = None  # id of the selected episode; None selects the newest
        self.frame = RunFrame(name=folder.name, state="")

    def refresh(self) -> None:
        """Reads the files that have changed."""
        notes: list[str] = []
        if not self._folder.is_dir():
            self.frame = RunFrame(name=self._folder.name, state="removed", notes=("the run folder was removed or renamed",))
            return
        _tried(self._read_events, None, notes)
        read_new_lines(self._metrics, notes)
        metrics, steps = self._metrics, self._metrics.steps
        self._rows = _tried(self._read_rows, (), notes)
        state = _state(self._folder)
        recipe = self._recipe.get()
        of = recipe.get("steps") if isinstance(recipe.get("steps"), int) else None
        newest = metrics.row(steps[-1]) if steps else {}
        self.frame = RunFrame(
            name=self._folder.name,
            state=state,
            stage=self._stage if state == "running" else "",
            step=steps[-1] if steps else 0,
            steps=of,
            left_s=metrics.seconds_left(of) if state == "running" else None,
            success=tuple(self._success()),
            reward=_curve(metrics, "reward_mean", "reward", "{:.3f}".format),
            curves=tuple(curve for key, label in CURVES.items() if (curve := _curve(metrics, key, label)) is not None),
            parts=tuple((key.removeprefix(UTILIZATION), newest[key]) for key in newest if key.startswith(UTILIZATION))[:8],
            restarts=tuple(self._restarts.items()),
            ledger=_tried(self._ledger.get, "", notes) or "",
            alerts=tuple(reversed(self._alerts)),
            running=len(self._in_flight) if self._seen_events else None,
            episodes=tuple(map(_listed, self._rows)),
            selected=self._position(),
            notes=tuple(note.replace(f"{self._folder}/", "") for note in dict.fromkeys(notes)),
        )

    def lines(self, size: Size) -> list[Text]:
        """Returns the lines of the frame."""
        return run_frame(self.frame, size)

    def key(self, name: str) -> Screen | None:
        """Selects an episode, or opens the selected episode."""
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
        """Returns the token balance of the ledger as text; empty if the run has no store."""
        path = self._folder / "experience.sqlite"
        if not path.is_file():
            return ""
        with closing(StoreReader(path)) as store:
            return token_balance(store.counts().tokens)

    def _success(self) -> Iterator[tuple[str, float]]:
        """Yields the label and the newest success rate of each held-out split: the rate after training or, if it is missing, the newest
        rate during training or, if both are missing, the rate before training."""
        phases = self._evaluations.get()
        for split, label in (("heldout", "held-out"), ("heldout_real", "held-out, real")):
            during = [value for _, value in self._metrics.series(split)]
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
    """The runs in a folder, the newest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[tuple[Path, RunLine]] = []
        self._selected, self._notes = 0, list[str]()

    def refresh(self) -> None:
        """Reads the list of runs again."""
        self._notes = []
        self._runs = _tried(lambda: [(path, _run_line(path)) for path in find_runs(self._folder, most=MAX_RUNS)], [], self._notes)
        self._selected = max(0, min(self._selected, len(self._runs) - 1))

    def lines(self, size: Size) -> list[Text]:
        """Returns the lines of the frame."""
        count = len(self._runs)
        title = f"{count} {'run' if count == 1 else 'runs'} in {self._folder}"
        return runs_frame([line for _, line in self._runs], self._selected, size, title=title, notes=self._notes)

    def key(self, name: str) -> Screen | None:
        """Selects a run, or opens the selected run."""
        moves = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -MAX_RUNS, "end": MAX_RUNS}
        self._selected = max(0, min(self._selected + moves.get(name, 0), len(self._runs) - 1))
        return RunScreen(self._runs[self._selected][0]) if name in ("enter", "right") and self._runs else None

    def close(self) -> None:
        """Does nothing."""


class EpisodeScreen:
    """The transcript of an episode. The keys n and p show the next and the previous episode in the list."""

    def __init__(self, folder: Path, ids: tuple[str, ...], position: int) -> None:
        self._folder, self._ids, self._position = folder, ids, position
        self._transcript: Transcript | None = None
        self._page = 10  # number of lines to scroll for a page

    def refresh(self) -> None:
        """Reads the episode once. A stored episode does not change."""
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
        """Scrolls, or shows a different episode."""
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
    """Returns an episode as messages: for each agent, the prompt, the turns with their tool calls, and the results of the calls."""
    episode, score = scored.episode, scored.score
    parts: list[Part] = []
    for number, line in enumerate(episode.trajectories):
        if number:
            parts.append(Part(who=f"agent {line.agent}, trajectory {number}", text=""))
        parts += _messages(group, line)
    parts += [Part(who=f"failure: {failure.blame} {failure.kind}", text=failure.message, style="red") for failure in episode.failures]
    why = score.evidence or score.reason
    parts.append(Part(who="score", text="\n".join([*(f"{name} {value:g}" for name, value in score.parts.items()), why]).strip()))
    value = "no score" if score.value is None else f"score {score.value:g}"
    versions = sorted({span.version for trajectory in episode.trajectories for turn in trajectory.turns for span in turn.versions})
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


def _curve(metrics: MetricsTable, key: str, label: str, form: Callable[[float], str] = "{:.3g}".format) -> Curve | None:
    values = tuple(max(-_LARGEST, min(_LARGEST, value)) for _, value in metrics.series(key))
    return Curve(label=label, values=values, form=form) if values else None


def _value(phases: Line, phase: str, split: str) -> float | None:
    splits = phases.get(phase)
    result = splits.get(split) if isinstance(splits, dict) else None
    value = result.get("value") if isinstance(result, dict) else None
    return float(value) if is_finite(value) else None


def _run_line(folder: Path) -> RunLine:
    recipe = read_object(folder / "recipe.json", [], most=_MAX_FILE)
    newest = last_step(folder)
    step, reward = newest.get("step"), newest.get("reward_mean")
    of = recipe.get("steps")
    return RunLine(
        name=folder.name,
        state=_state(folder),
        step=step if isinstance(step, int) else 0,
        steps=of if isinstance(of, int) else None,
        reward=reward if is_finite(reward) else None,
        changed_s=None if (changed := changed_at(folder)) is None else max(0.0, time.time() - changed),
    )


def _tried(read: Callable[[], T], otherwise: T, notes: list[str] | None = None) -> T:
    """Returns the result of `read`. If `read` fails, returns `otherwise` and adds the reason to `notes`."""
    try:
        return read()
    except (OSError, ValueError, StoreError, UserError) as error:
        if notes is not None:
            notes.append(printable(str(error).partition("\n")[0], 300))
        return otherwise
