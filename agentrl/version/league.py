"""A league: past versions of the policy as opponents, the results of games against them, and ratings.

Opponents are drawn by prioritized fictitious self-play (Vinyals et al. 2019, doi:10.1038/s41586-019-1724-z). Let p_j be the estimated
probability that the policy beats member j. Then member j is drawn with a probability proportional to (1 - p_j)^2 + 0.01.

    p_j = (wins + draws / 2 + 1) / (games + 2), over the games that the newest `WINDOW` versions played

Ratings are maximum a posteriori strengths s of a Bradley-Terry model, P(i beats j) = 1 / (1 + exp(s_j - s_i)); a draw counts as half a win
for both. The prior of a strength is a normal distribution with mean 0 and standard deviation 2. Ratings are printed on the Elo scale (400 /
ln 10), relative to version 0. The 95% interval of the difference from version 0 comes from the normal approximation of the posterior.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base.files import write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.errors import StoreError

FILE = "league.json"
"""Name of the file in the run folder."""
WINDOW = 10
VERSIONS = 200
"""Number of newest versions whose results are stored, in addition to the results of members."""
ELO = 400 / math.log(10)
_PRIOR_DEVIATION = 2.0
_SMALLEST_WEIGHT = 0.01
_LARGEST = 1 << 22  # bytes of the file
_NEWTON_STEPS = 50


@dataclass(slots=True)
class Results:
    """Results of the games of one version against another."""

    wins: int = 0
    draws: int = 0
    losses: int = 0

    @property
    def games(self) -> int:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """The number of wins plus half the number of draws."""
        return self.wins + self.draws / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """The strength of one version, relative to version 0."""

    version: int
    elo: float
    interval: tuple[float, float]  # 95%
    games: int


class LeagueTable:
    """The members and results of a league, stored in a file. Not safe for concurrent use.

    Args:
        folder: the run folder.
        size: maximum number of members, at least 2. Version 0 and the newest member are never removed to make room. Other members are
            removed so that the numbers of the remaining members are spread evenly.

    Raises `StoreError` for a damaged file.
    """

    def __init__(self, folder: Path, *, size: int = 8) -> None:
        self._path, self._size = folder / FILE, size
        self.members: list[int] = [0]
        self.results: dict[tuple[int, int], Results] = defaultdict(Results)  # (version, opponent)
        if self._path.exists():
            try:
                self._load(json.loads(read_bytes(self._path, most=_LARGEST)))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise StoreError(f"{self._path} is damaged: {str(error)[:200]}\n  fix: remove the file; ratings restart from 0") from error

    def _load(self, data: Mapping[str, Any]) -> None:
        members, rows = [int(number) for number in data["members"]], data["results"]
        if not members or sorted({*members}) != members or members[0] < 0:
            raise ValueError("its members are not ascending version numbers")
        for version, opponent, *counts in rows:
            if len(counts) != 3 or not all(isinstance(count, int) and count >= 0 for count in (version, opponent, *counts)):
                raise ValueError("a row is not (version, opponent, wins, draws, losses)")
            self.results[version, opponent] = Results(*counts)
        self.members = members

    def save(self) -> None:
        """Writes the file."""
        rows = [[*pair, one.wins, one.draws, one.losses] for pair, one in sorted(self.results.items())]
        write_atomically(self._path, json.dumps({"members": self.members, "results": rows}).encode())

    def add(self, version: int) -> None:
        """Adds `version` if it is newer than all members, and removes members until at most `size` remain."""
        if version > self.members[-1]:
            self.members.append(version)
        while len(self.members) > self._size:
            gaps = {n: after - before for n, before, after in zip(self.members[1:-1], self.members, self.members[2:], strict=False)}
            self.members.remove(min(gaps, key=lambda number: (gaps[number], number)) if gaps else self.members[0])

    def remove(self, member: int) -> None:
        """Removes a member whose weights no longer exist. Raises `ValueError` if there is no such member."""
        self.members.remove(member)

    def record(self, version: int, opponent: int, gain: float) -> None:
        """Counts a game. The version won the game if `gain` is positive, and lost it if `gain` is negative."""
        results = self.results[version, opponent]
        if gain > 0:
            results.wins += 1
        elif gain < 0:
            results.losses += 1
        else:
            results.draws += 1
        known = sorted({pair[0] for pair in self.results})
        if len(known) > VERSIONS:
            old = {*known[: len(known) - VERSIONS]} - {*self.members}
            for pair in [pair for pair in self.results if pair[0] in old]:
                del self.results[pair]

    def weights(self, version: int) -> dict[int, float]:
        """Returns member -> the probability with which it is drawn as an opponent of a version."""
        weights = {member: (1 - self._beats(version, member)) ** 2 + _SMALLEST_WEIGHT for member in self.members}
        total = math.fsum(weights.values())
        return {member: weight / total for member, weight in weights.items()}

    def draw(self, version: int, *, seed: int) -> int:
        """Returns an opponent for a version. The same results and the same seed lead to the same opponent."""
        weights = self.weights(version)
        return random.Random(f"{seed} {version}").choices(list(weights), list(weights.values()))[0]

    def _beats(self, version: int, member: int) -> float:
        """Returns p_j (see the module docstring)."""
        known = [one for (player, other), one in self.results.items() if other == member and version - WINDOW < player <= version]
        return (sum(record.points for record in known) + 1) / (sum(record.games for record in known) + 2)

    def ratings(self) -> list[Rating]:
        """Returns the ratings of version 0 and of all versions that have played, by ascending version."""
        return ratings({pair: (one.points, one.games) for pair, one in self.results.items() if pair[0] != pair[1]})


def ratings(results: Mapping[tuple[int, int], tuple[float, int]]) -> list[Rating]:
    """Returns the ratings of the versions in `results`, which maps (version, opponent) to points and games. Version 0 is always included,
    as the origin of the scale."""
    import numpy as np

    versions: Sequence[int] = sorted({0, *(number for pair in results for number in pair)})
    at = {version: index for index, version in enumerate(versions)}
    strengths = np.zeros(len(versions))
    for _ in range(_NEWTON_STEPS):
        gradient, hessian = -strengths / _PRIOR_DEVIATION**2, -np.eye(len(versions)) / _PRIOR_DEVIATION**2
        for (version, opponent), (points, games) in results.items():
            i, j = at[version], at[opponent]
            p = 1 / (1 + math.exp(strengths[j] - strengths[i]))
            gradient[i] += points - games * p
            gradient[j] -= points - games * p
            curvature = games * p * (1 - p)
            hessian[[i, j], [i, j]] -= curvature
            hessian[[i, j], [j, i]] += curvature
        step = np.linalg.solve(hessian, gradient)
        strengths = strengths - np.clip(step, -1.0, 1.0)
        if abs(step).max() < 1e-9:
            break
    covariance, origin = np.linalg.inv(-hessian), at[0]
    rated = []
    for version, index in at.items():
        variance = max(0.0, covariance[index, index] + covariance[origin, origin] - 2 * covariance[index, origin])
        elo, half = ELO * float(strengths[index] - strengths[origin]), 1.96 * ELO * math.sqrt(variance)
        games = sum(count for pair, (_, count) in results.items() if version in pair)
        rated.append(Rating(version=version, elo=elo, interval=(elo - half, elo + half), games=games))
    return rated
