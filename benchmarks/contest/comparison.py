"""Alternating runs of agentrl and a peer on one machine: the conditions for publishing them, and their ratios.

A round is one run of each side with one seed. The ratio of a round is the peer's time divided by agentrl's. Ratios of several rounds are
reported with their number, median and range. Rounds from several machines, or from one machine at different times, are not comparable.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.errors import UserError
from benchmarks.contest.outcome import Outcome, Point

LEAST_ROUNDS = 3
MOST_GAP_S = 900.0  # between two runs of a comparison


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The peer's time divided by agentrl's, over `n` rounds. In `censored` rounds the peer missed the target: these are lower bounds."""

    n: int
    median: float
    low: float
    high: float
    censored: int

    def __str__(self) -> str:
        least = f", in {self.censored} at least" if self.censored else ""
        return f"{self.median:.1f} times ({self.low:.1f} to {self.high:.1f}, n={self.n}{least})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rounds of one setting, and their origin."""

    setting: dict[str, Any]
    sides: tuple[str, ...]
    options: dict[str, Any]  # of the peer, in every round
    tried: tuple[dict[str, Any], ...]  # settings of the peer that were timed before the rounds, on the same machine
    origin: dict[str, Any]  # of `benchmarks.stored.origin`
    versions: dict[str, str]
    boot: str
    rounds: tuple[tuple[Outcome, ...], ...] = field(default=())

    def with_round(self, outcomes: tuple[Outcome, ...]) -> Comparison:
        return replace(self, rounds=(*self.rounds, outcomes))

    def of(self, side: str) -> list[Outcome]:
        return [run for outcomes in self.rounds for run in outcomes if run.side == side]

    def ratio(self, peer: str, seconds: Callable[[Outcome], float] = lambda run: run.took_s) -> Ratio:
        """Raises `ValueError` if a run of agentrl did not reach the target: the ratio would not be a lower bound."""
        ours, theirs = self.of("ours"), self.of(peer)
        if any(run.arrived_s is None for run in ours):
            raise ValueError("a run of ours did not reach the target")
        values = [seconds(their) / seconds(our) for our, their in zip(ours, theirs, strict=True)]
        late = sum(run.arrived_s is None for run in theirs)
        return Ratio(n=len(values), median=statistics.median(values), low=min(values), high=max(values), censored=late)

    def faults(self) -> list[str]:
        """Returns the reasons against publishing; empty if it may be published."""
        reasons = []
        if len(self.rounds) < LEAST_ROUNDS:
            reasons.append(f"it has {len(self.rounds)} of at least {LEAST_ROUNDS} pairs")
        if any(tuple(run.side for run in outcomes) != self.sides or len({run.seed for run in outcomes}) != 1 for outcomes in self.rounds):
            reasons.append("a round does not consist of one run of each side with the same seed")
        runs = [run for outcomes in self.rounds for run in outcomes]
        kinds = {(run.machine.get("processor"), run.machine.get("cores")) for run in runs}
        if len(kinds) > 1 or not self.boot:
            reasons.append("its runs are from several machines")
        if not all({"processor", "gflops", "load", "busy_cores"} <= run.machine.keys() for run in runs):
            reasons.append("a run has no CPU model, GFLOPS or load")
        if any(not 0.0 <= after.began - before.finished <= MOST_GAP_S for before, after in pairwise(runs)):
            reasons.append(f"more than {MOST_GAP_S / 60:.0f} min between two runs")
        return reasons


def save(comparison: Comparison, path: Path) -> None:
    """Writes the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(comparison), indent=1) + "\n")


def publish(comparison: Comparison, path: Path) -> None:
    """Saves a comparison to the docs. Raises `UserError` if it has `faults`."""
    if flaws := comparison.faults():
        raise UserError(f"not published: {'; '.join(flaws)}", fix=f"run --pairs {LEAST_ROUNDS} or more on one machine without interruption")
    save(comparison, path)


def load(path: Path) -> Comparison:
    """Returns a stored comparison. Raises `UserError` for a file that contains none."""
    try:
        data = json.loads(path.read_text())
        rounds = tuple(tuple(_outcome(record) for record in outcomes) for outcomes in data.pop("rounds"))
        data |= {"sides": tuple(data["sides"]), "tried": tuple(data["tried"])}
        return Comparison(**data, rounds=rounds)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a result of this benchmark: {error}", fix="delete it, and run the benchmark again") from error


def published(folder: Path) -> dict[str, Comparison]:
    """Comparisons by name. Raises `UserError` for a file that must not be published, or is not a comparison."""
    comparisons = {path.stem: load(path) for path in sorted(folder.glob("*.json"))}
    for name, comparison in comparisons.items():
        if faults := comparison.faults():
            raise UserError(f"{folder / name}.json must not be published: {'; '.join(faults)}", fix="delete it, and run the pairs again")
    return comparisons


def _outcome(data: dict[str, Any]) -> Outcome:
    curve = tuple(Point(**point) for point in data.pop("curve"))
    after = data.pop("after")
    return Outcome(**data, curve=curve, after=Point(**after) if after else None)
