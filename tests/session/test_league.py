"""The league of a run on a scripted server: rotation, damaged versions, deadlines, resumption."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.config.recipe import Recipe
from agentrl.errors import ServingError, UserError
from agentrl.plugins.parts import Part
from agentrl.records import PolicyVersion
from agentrl.session import league as league_module
from agentrl.session.league import EVERY, RunLeague, open_league
from agentrl.version import FolderRegistry
from agentrl.version.league import LeagueTable
from tests.serving.test_loss_of_a_server import open_registry
from tests.serving.test_loss_of_a_server import scripted as scripted
from tests.serving.test_server_pool import RECIPE

PLAYERS = Part("players", options={"opponent": "league"})
SELF_PLAY: Recipe = RECIPE.but({"serving.replicas": 1, "rollout.agent": PLAYERS})
pytestmark = pytest.mark.usefixtures("scripted")


class League:
    """A league, its server, and its alerts."""

    def __init__(self, folder: Path) -> None:
        self.registry, self.alerts = open_registry(folder), list[str]()
        self.served: Any = SimpleNamespace(version=0)
        self.run = RunLeague(SELF_PLAY, folder, self.registry, self.served, alert=self.alerts.append)

    async def start(self) -> RunLeague:
        base = self.registry.get(0)
        assert base is not None
        await self.run.start(base)
        return self.run


def publish(registry: FolderRegistry, number: int) -> None:
    """Registers another version with the weights of version 1."""
    first = registry.get(1)
    assert first is not None
    folder = registry.folder / f"{number:06d}"
    folder.mkdir()
    for file in registry.path(first).iterdir():
        if file.name != "version.json":
            (folder / file.name).write_bytes(file.read_bytes())
    registry.add(PolicyVersion(number=number, parent=1, folder=f"versions/{number:06d}", sha256=first.sha256))


async def test_the_opponent_changes_with_the_policy_but_not_during_a_game(tmp_path: Path) -> None:
    league = League(tmp_path)
    run = await league.start()
    publish(league.registry, EVERY)
    try:
        async with run.opponent() as first, run.opponent() as second:
            assert first.number == second.number == 0
            league.served.version = EVERY
            waiting = asyncio.create_task(run.opponent().__aenter__())
            await asyncio.sleep(0.05)
            assert not waiting.done(), "two games are running"
        third = await asyncio.wait_for(waiting, 10)
        assert run.table.members == [0, EVERY] and third.number == run.server.policy.version
        publish(league.registry, 3 * EVERY)
        assert league.registry.prune(keep=1) == (1,), "the weights of members are kept"
        assert not league.registry.pinned()
    finally:
        await run.close()
    assert LeagueTable(tmp_path).members == [0, EVERY]


async def test_a_version_that_is_damaged_or_deleted_leaves_the_league(tmp_path: Path) -> None:
    league = League(tmp_path)
    run = await league.start()
    for number in (EVERY, 2 * EVERY):
        publish(league.registry, number)
        run.table.add(number)
        for _ in range(200):  # so that version 0 is hardly drawn
            run.record(0, 1.0, version=11)
            run.record(number, -1.0, version=11)
    (league.registry.folder / f"{EVERY:06d}" / "model.safetensors").write_bytes(b"x")
    (league.registry.folder / f"{2 * EVERY:06d}" / "model.safetensors").unlink()
    league.registry.pin(EVERY)
    league.served.version = 11
    try:
        async with run.opponent() as opponent:
            assert opponent.number == 0 and run.table.members == [0]
        assert league.registry.pinned() == {EVERY}, "the league drops no pin of a user"
        publish(league.registry, 3 * EVERY)
        assert league.registry.prune(keep=1) == (1, 2 * EVERY), "the weights of other former members are deleted"
        assert len(league.alerts) == 2 and all("leaves the league" in alert for alert in league.alerts)
    finally:
        await run.close()


async def test_other_games_wait_for_an_endless_game_until_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(league_module, "CHANGE_S", 0.1)
    league = League(tmp_path)
    run = await league.start()
    try:
        async with run.opponent():
            league.served.version = 3
            with pytest.raises(ServingError, match="not loaded within"):
                async with run.opponent():
                    pass
        async with run.opponent():
            pass
    finally:
        await run.close()


def test_a_league_rejects_workers_and_nccl(tmp_path: Path) -> None:
    registry: Any = None
    for key, value in (("rollout.workers", 1), ("serving.weight_transfer", Part("nccl"))):
        recipe = SELF_PLAY.but({key: value, "rollout.agent": PLAYERS, "device": "cuda"})
        with pytest.raises(UserError, match=re.escape(key)):
            open_league(recipe, tmp_path, registry, registry, alert=print)
    assert open_league(RECIPE, tmp_path, registry, registry, alert=print) is None


def test_the_command_prints_ratings_and_the_next_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = LeagueTable(tmp_path)
    for _ in range(30):
        table.record(3, 0, 1.0)
    table.record(3, 0, 0.0)
    table.save()
    with pytest.raises(SystemExit, match="0"):
        main(["versions", "league", str(tmp_path)])
    head, zero, three = capsys.readouterr().out.splitlines()
    assert head.split() == ["version", "Elo", "95%", "interval", "games", "draw"]
    assert zero.split()[0] == "*0" and zero.split()[-1] == "1.00" and three.split()[0] == "3" and int(three.split()[1]) > 200
