"""The league of a run: past versions of the policy, served one at a time on an additional server.

The opponent changes when the policy's servers have loaded a new version. New games then wait until the running games have ended and the
additional server has loaded the next opponent. A version other than 0 that cannot be loaded is removed from the league.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import ServingError, StoreError, SwapError, UserError
from agentrl.gate.schedule import VersionServer
from agentrl.protocols import Launcher, Policy, PolicyServer
from agentrl.records import PolicyVersion
from agentrl.version import FolderRegistry
from agentrl.version.league import LeagueTable

EVERY = 5
"""Minimum number of versions between two members of the league."""
CHANGE_S = 600.0
"""Maximum time for the running games to end and the next opponent to load, in seconds."""
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOpponent:
    """An `agentrl.protocols.Opponent`."""

    number: int
    policy: Policy


class RunLeague:
    """An `agentrl.protocols.League`."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        registry: FolderRegistry,
        served: PolicyServer,
        *,
        launcher: Launcher | None = None,
        alert: Callable[[str], None],
    ) -> None:
        self.table = LeagueTable(folder)
        self.server = VersionServer(recipe, folder, registry, name="league", launcher=launcher, alert=alert)
        self._seed, self._registry, self._served, self._alert = recipe.seed, registry, served, alert
        self._chosen_for = -1  # version of the policy for which the current opponent was drawn
        self._games = 0
        self._changing, self._changed = asyncio.Lock(), asyncio.Condition()

    async def start(self, version: PolicyVersion) -> None:
        """Starts the server with version 0, or with `version` if version 0 is not registered. Raises the errors of
        `SupervisedServer.start`."""
        base = await asyncio.to_thread(self._registry.get, 0)
        await self.server.start(base or version)

    async def close(self) -> None:
        """Saves the results and stops the server."""
        await asyncio.to_thread(self.table.save)
        await self.server.policy.close()

    @asynccontextmanager
    async def opponent(self) -> AsyncIterator[ServedOpponent]:
        """Yields the current opponent for one game. The opponent does not change during the game.

        Raises `ServingError` if the next opponent is not loaded within `CHANGE_S` seconds, or if version 0 cannot be loaded.
        """
        try:
            async with asyncio.timeout(CHANGE_S), self._changing:
                if self._served.version != self._chosen_for:
                    await self._change()
                self._games += 1
        except TimeoutError:
            raise ServingError(f"the league's next opponent was not loaded within {CHANGE_S:g} s") from None
        try:
            yield ServedOpponent(number=self.server.policy.version, policy=self.server.policy)
        finally:
            async with self._changed:
                self._games -= 1
                self._changed.notify_all()

    def record(self, opponent: int, gain: float, *, version: int) -> None:
        """Counts a finished game. The league's file is written when the opponent changes."""
        self.table.record(version, opponent, gain)

    async def _change(self) -> None:
        """Waits until no game is running, then draws the next opponent and loads it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._games)
        version = self._served.version
        if version - self.table.members[-1] >= EVERY:
            self.table.add(version)
        await self._keep_members()
        for _ in range(_TRIES):
            number = self.table.draw(version, seed=self._seed)
            problem = await self._serve(number)
            if not problem:
                break
            self._alert(f"version {number} leaves the league: {problem}")
            if number == 0:
                raise ServingError(f"version 0 of the league cannot be served: {problem}")
            self.table.remove(number)
            await self._keep_members()
        self._chosen_for = version
        await asyncio.to_thread(self.table.save)

    async def _serve(self, number: int) -> str:
        """Loads a version. Returns the reason if the version cannot be loaded; otherwise ""."""
        version = await asyncio.to_thread(self._registry.get, number)
        if version is None:
            return "it is not registered"
        try:
            await asyncio.to_thread(self._registry.verify, version)
            await self.server.serve(version)
        except (StoreError, SwapError) as error:
            return str(error)
        return ""

    async def _keep_members(self) -> None:
        """Makes the registry keep the weights of the current members, and of no former member."""
        try:
            await asyncio.to_thread(self._registry.keep_for_league, self.table.members)
        except StoreError as error:
            self._alert(f"weights of the league's members may be deleted: {error}")


def open_league(
    recipe: Recipe,
    folder: Path,
    registry: FolderRegistry,
    served: PolicyServer,
    *,
    launcher: Launcher | None = None,
    alert: Callable[[str], None],
) -> RunLeague | None:
    """Returns the league of a run, not started yet; None if the agent needs no league. Raises `UserError` if other settings prevent a
    league."""
    if not recipe.rollout.needs_league:
        return None
    if recipe.rollout.workers:
        raise UserError(
            "rollout workers cannot play against a league, because only the driver can use its server", fix="set rollout.workers=0"
        )
    if recipe.serving.weight_transfer.ref == "nccl":
        raise UserError(
            "serving.weight_transfer=nccl cannot send past versions, which a league needs as opponents",
            fix="set serving.weight_transfer=file or delta",
        )
    return RunLeague(recipe, folder, registry, served, launcher=launcher, alert=alert)
