from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.records import Blame, Failure
from agentrl.serving.server_pool import ServerPool
from agentrl.serving.supervisor import SupervisedServer
from agentrl.session.builders import fault_rate, open_policy_server
from agentrl.version import FolderRegistry
from tests.driving import make_recipe


def test_a_run_gets_the_number_of_servers_in_its_recipe(tmp_path: Path) -> None:
    recipe, registry = make_recipe(), FolderRegistry(tmp_path / "versions")
    single = open_policy_server(recipe, tmp_path, registry)
    assert isinstance(single, SupervisedServer) and (single._name, single.figures()) == ("", {})
    pool = open_policy_server(recipe.but("serving.replicas=3"), tmp_path, registry)
    assert isinstance(pool, ServerPool)
    assert [replica._name for replica in pool._replicas] == ["0", "1", "2"]


async def test_one_daemon_crash_during_rollouts_and_gate_does_not_pause_a_run() -> None:
    recipe = make_recipe().but({"rollout.concurrency": 64, "gate.suite": "evals/x", "gate.server": "own"})
    faults, died = fault_rate(recipe), Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="lost", message="the daemon died")
    watching = asyncio.create_task(faults.watch())
    for failure in (died, None):  # all attempts in flight fail, their retries do not
        for _ in range(2 * 64):
            faults.record_attempt(failure)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
