"""The gate's own server: it keeps its version across restarts, and changes neither the registry nor the announced server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import SwapError
from agentrl.gate.schedule import VersionServer
from agentrl.records import PolicyVersion, VersionState
from agentrl.serving.access import announced_server
from agentrl.version import FolderRegistry
from tests.serving.test_loss_of_a_server import ScriptedChannel, ScriptedServer, open_registry
from tests.serving.test_loss_of_a_server import scripted as scripted
from tests.serving.test_server_pool import RECIPE
from tests.waiting import until

RECIPE = RECIPE.but({"serving.replicas": 1})


@asynccontextmanager
async def start_server(run: Path, registry: FolderRegistry) -> AsyncIterator[tuple[VersionServer, PolicyVersion, PolicyVersion]]:
    """Yields a watched server that serves version 0, and versions 0 and 1."""
    server, (base, first) = VersionServer(RECIPE, run, registry), registry.versions()
    await server.start(base)
    watcher = asyncio.create_task(server.policy.watch(on_loss=server.policy.close))
    try:
        yield server, base, first
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await server.policy.close()


@pytest.mark.usefixtures("scripted")
async def test_the_server_loads_versions_without_changing_the_registry(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    async with start_server(tmp_path, registry) as (server, base, first):
        await server.serve(first)
        await server.serve(base)
        await server.serve(first)
        assert server.policy.version == 1
        assert [version.state for version in registry.versions()] == [VersionState.SERVING, VersionState.CANDIDATE]
        assert announced_server(tmp_path) is None, "the learner sends weights to the policy's server alone"
        assert len(ScriptedServer.started) == 1


@pytest.mark.usefixtures("scripted")
async def test_a_server_that_dies_during_a_swap_restarts_with_the_new_version(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    async with start_server(tmp_path, registry) as (server, _, first):
        ScriptedChannel.deaths = 1
        async with asyncio.timeout(30):
            await server.serve(first)
        assert server.policy.version == 1 and server.policy.restarts == 1
        assert [server.version for server in ScriptedServer.started] == [0, 1]


@pytest.mark.usefixtures("scripted")
async def test_a_server_that_dies_later_restarts_with_the_evaluated_version(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    async with start_server(tmp_path, registry) as (server, base, first):
        registry.set_state(first.number, VersionState.SERVING)  # the policy's server has advanced
        ScriptedServer.started[0].dead = True
        await until(lambda: server.policy.restarts == 1 and server.policy.accepts_requests)
        await server.serve(base)
        assert server.policy.version == 0 and [server.version for server in ScriptedServer.started] == [0, 0]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("cause", ["retracted", "pruned", "rebuilt"])
async def test_a_server_whose_weights_are_missing_restarts_with_version_0(tmp_path: Path, cause: str) -> None:
    """Those weights are no longer evaluated, and the run continues: the next due version is loaded as usual."""
    registry = open_registry(tmp_path)
    async with start_server(tmp_path, registry) as (server, _, first):
        await server.serve(first)
        if cause == "pruned":
            for name in ("model.safetensors", "probe.json"):
                (tmp_path / "versions/000001" / name).unlink()
        else:
            registry.reconcile(0)
        if cause == "rebuilt":
            registry.add(replace(first, sha256=64 * "a"))
            (tmp_path / "versions/000001/probe.json").write_text("not for these")
        ScriptedServer.started[0].dead = True
        await until(lambda: server.policy.restarts == 1 and server.policy.accepts_requests)
        assert server.policy.version == 0 and [server.version for server in ScriptedServer.started] == [0, 0]


@pytest.mark.usefixtures("scripted")
async def test_a_rejected_version_raises(tmp_path: Path) -> None:
    registry = open_registry(tmp_path)
    async with start_server(tmp_path, registry) as (server, _, first):
        ScriptedChannel.refusals = 3
        with pytest.raises(SwapError, match="the probe disagrees"):
            await server.serve(first)
