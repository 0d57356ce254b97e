"""Measures the time that the parts of a run spend in each state.

For each part, the seconds spent in all states add up to the wall time of the interval.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from agentrl.records import ScoredEpisode

PARTS = ("server", "learner", "sandboxes", "scoring", "rollouts")
BUSY, DOWN = "busy", "down"
WAITING_FOR = "waiting for "
"""Prefix of every state other than `BUSY` and `DOWN`."""
LOADING = f"{WAITING_FOR}weights"
"""State of a server that is loading a version."""
PREFIX = "timeline/"
"""Prefix of the metrics `timeline/PART/STATE`: seconds that a part spent in a state during a step."""
WALL = "timeline_s"
"""Metric: length of the interval in seconds. The states of each part add up to it."""
UTILIZATION = "utilization/"
"""Prefix of the metrics `utilization/PART`: share of the interval in which the part was busy."""
STEP = "step"
"""Pseudo-part in the metrics `timeline/step/STATE`: seconds by which parts were busy at the same time. The states, which `overlap` returns,
also add up to the interval."""
NOTHING = "nothing"
Counter = Callable[[], Mapping[str, float]]
"""A function that returns a mapping name -> count. The counts never decrease."""
MAX_COUNTS = 24
"""Maximum number of counts per counter in the metrics of an interval. The counts that grew most are used."""


class Timeline:
    """The states of the parts over time. A part stays in a state until `mark` sets a new one. The first state is `DOWN`.

    Args:
        clock: returns the seconds of a monotonic clock.
        counters: name -> counter. `take_counts` returns the growth of the counts, under the keys `NAME/COUNT`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, counters: Mapping[str, Counter] = MappingProxyType({})) -> None:
        self._clock, self._counters = clock, dict(counters)
        self._counted: dict[str, Mapping[str, float]] = {}
        self._states = dict.fromkeys(PARTS, DOWN)
        self._spent: dict[tuple[str, str], float] = {}
        self._began: float | None = None
        self._newest = 0.0

    @property
    def running(self) -> bool:
        """Whether an interval has started."""
        return self._began is not None

    def restart(self) -> None:
        """Starts an interval now, and discards the interval that is running."""
        self._began = self._newest = self._clock()
        self._spent = {}
        self.take_counts()

    def mark(self, states: Mapping[str, str]) -> None:
        """Sets the states that the given parts have from now on. Raises `KeyError` if a part is unknown."""
        self._advance()
        if unknown := states.keys() - self._states.keys():
            raise KeyError(f"unknown parts: {', '.join(sorted(unknown))}")
        self._states |= states

    def take(self) -> dict[str, float]:
        """Ends the running interval and starts the next interval.

        Returns the metrics of the interval that ended. If no interval is running, does nothing and returns an empty dictionary.
        """
        if self._began is None:
            return {}
        self._advance()
        wall_s = self._newest - self._began
        metrics = {WALL: wall_s} | {f"{PREFIX}{part}/{state}": spent for (part, state), spent in sorted(self._spent.items())}
        if wall_s > 0:
            metrics |= {f"{UTILIZATION}{part}": self._spent.get((part, BUSY), 0.0) / wall_s for part in PARTS}
        self._began, self._spent = self._newest, {}
        return metrics

    def take_counts(self) -> dict[str, float]:
        """Returns the growth of the counts that grew most since the last call or since `restart`; empty if no interval had started.

        Reading a counter may take milliseconds, so call it from a thread, right after `take`.
        """
        if self._began is None:
            return {}
        grown: dict[str, float] = {}
        for name, counter in self._counters.items():
            before, counts = self._counted.get(name, {}), dict(counter())
            growth = {f"{name}/{key}": count - before.get(key, 0.0) for key, count in counts.items() if count > before.get(key, 0.0)}
            grown |= dict(sorted(growth.items(), key=lambda item: -item[1])[:MAX_COUNTS])
            self._counted[name] = counts
        return grown

    def _advance(self) -> None:
        now = self._clock()
        if self._began is not None:
            for part, state in self._states.items():
                self._add(part, state, now - self._newest)
            self._add(STEP, overlap(self._states), now - self._newest)
        self._newest = now

    def _add(self, part: str, state: str, seconds: float) -> None:
        self._spent[part, state] = self._spent.get((part, state), 0.0) + seconds


def overlap(states: Mapping[str, str]) -> str:
    """Returns a short text about which parts are busy at the same time.

    The text is `server and learner` if both are busy, otherwise the first busy part among server, learner, sandboxes and scoring. If none
    of these is busy, the text is `swap` during a swap, otherwise `nothing`.
    """
    busy = [part for part in ("server", "learner", "sandboxes", "scoring") if states.get(part) == BUSY]
    if busy[:2] == ["server", "learner"]:
        return "server and learner"
    if busy:
        return busy[0]
    return "swap" if states.get("server") == LOADING else NOTHING


def time_by_state(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns a mapping part -> state -> seconds, summed over all steps, from the metrics of the steps."""
    spent: dict[str, dict[str, float]] = {}
    for step in steps:
        for name, seconds in step.items():
            part, _, state = name.removeprefix(PREFIX).partition("/")
            if name.startswith(PREFIX) and part in PARTS:
                states = spent.setdefault(part, {})
                states[state] = states.get(state, 0.0) + seconds
    return spent


def loop_latency(counted: Sequence[ScoredEpisode], now: float) -> dict[str, float]:
    """Returns metrics of the loop latency.

    This is the time from the end of a turn to `now`, when the server starts to serve the version that was trained on the turn.

    The metrics are the mean over sampled tokens and the maximum over turns. Both are absent if no turn has a known end time.
    """
    turns = [
        turn
        for attempt in counted
        for trajectory in attempt.episode.trajectories
        for turn in trajectory.own_turns
        if turn.ended_at and turn.sampled
    ]
    if not turns:
        return {}
    waits = [max(0.0, now - turn.ended_at) for turn in turns]
    weights = [turn.sampled for turn in turns]
    return {"loop_latency_s_mean": statistics.fmean(waits, weights), "loop_latency_s_max": max(waits)}
