"""A process that a signal stops while it holds the locks of a run delays the run until it is killed, and does not end it."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from agentrl.base import liveness
from agentrl.base.loop_lag import STALL_S, LoopLag
from agentrl.cluster import process_host
from agentrl.errors import LearnerError
from agentrl.experience import DriverStore, SqliteStore
from agentrl.learner import LearnerProcess
from agentrl.learner import process as learner_process
from agentrl.protocols import VersionRegistry
from agentrl.records import VersionState
from agentrl.rollout.leases import SILENT_S
from agentrl.run import supervise
from agentrl.testing.store_contract import make_group
from agentrl.version import FolderRegistry
from tests.driving import make_recipe
from tests.version.test_registry import publish
from tests.waiting import until

_HOLDER = """
import fcntl, os, signal, sqlite3, sys
lock = open(sys.argv[1] + "/versions/.lock", "r+")
fcntl.flock(lock, fcntl.LOCK_EX)
store = sqlite3.connect(sys.argv[1] + "/experience.sqlite", isolation_level=None)
store.execute("BEGIN IMMEDIATE")
open(sys.argv[1] + "/stopped", "w").close()
os.kill(os.getpid(), signal.SIGSTOP)
"""


class StoppedLearner(LearnerProcess):
    """A learner that is stopped while it holds the locks of the registry and the store."""

    def _command(self, placement: str) -> list[str]:
        return [sys.executable, "-c", _HOLDER, str(self.run_dir)]


def test_the_lock_timeout_exceeds_the_time_to_kill_a_stopped_holder() -> None:
    learner_s = liveness.STOPPED_S + 2 * liveness._STOPPED_LOOK_S + learner_process._POLL_S + process_host._GONE_S
    assert learner_s < liveness.LOCK_WAIT_S and SILENT_S + 10.0 < liveness.LOCK_WAIT_S


@pytest.mark.slow
async def test_calls_that_wait_for_a_stopped_learner_continue_when_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is not blocked meanwhile: it detects the stopped process, and the version can be read."""
    monkeypatch.setattr(liveness, "_STOPPED_LOOK_S", 0.1)
    registry, lag = FolderRegistry(tmp_path / "versions"), LoopLag()
    version = publish(registry, 0)
    store = await DriverStore.open(partial(SqliteStore, tmp_path / "experience.sqlite"))
    learner = StoppedLearner(tmp_path, make_recipe())
    learner.stopped.least_s = 1.0
    alerts: list[str] = []
    async with lag.watched(alerts.append):
        watching = asyncio.create_task(_watch(learner, registry, alerts))
        await until((tmp_path / "stopped").exists)
        began = time.monotonic()
        waiting = asyncio.gather(
            asyncio.to_thread(registry.set_state, 0, VersionState.SERVING), asyncio.to_thread(registry.latest), store.put(make_group(0))
        )
        assert await asyncio.to_thread(registry.get, 0) == version and time.monotonic() - began < 1.0, "a read of one version takes no lock"
        await waiting
        waited_s = time.monotonic() - began
        await until(lambda: alerts)
        watching.cancel()
    await learner.kill()
    assert registry.latest(VersionState.SERVING) is not None and await store.has(0)
    assert "a signal has stopped process" in alerts[0] and 0.5 < waited_s < liveness.LOCK_WAIT_S
    assert lag.metrics()["loop_lag_ms_max"] < 1000 * STALL_S
    await store.close()


async def _watch(learner: LearnerProcess, registry: VersionRegistry, alerts: list[str]) -> None:
    with suppress(LearnerError):  # killed without a version, four times
        await supervise.watch_learner(learner, registry, alerts.append)
