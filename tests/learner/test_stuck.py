"""A learner without progress is killed and restarted, and loses nothing; a slow one continues. The steps are real."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agentrl.base.liveness import Liveness
from agentrl.base.processes import read_stat
from agentrl.config import Part
from agentrl.errors import LearnerError
from agentrl.experience import SqliteStore
from agentrl.learner import LearnerProcess
from agentrl.run import supervise
from agentrl.version import FolderRegistry
from tests.learner.building import build_recipe, random_group, write_run
from tests.learner.test_process import MakeLearner, _workers
from tests.ledgers import consumed
from tests.waiting import until

pytestmark = pytest.mark.deepspeed
ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 4.0  # instead of a minute
STEPS = 3


class Stopping(Liveness):
    """Sends SIGSTOP to the processes that `workers` returns when the learner reports a kind of work for the first time."""

    def __init__(self, work: str, workers: Callable[[], list[int]]) -> None:
        self._work, self._workers = work, workers
        self.stopped: list[int] = []
        super().__init__("the learner", first_s=120.0, least_s=SHORT_S)

    def progress(self, work: str, size: float = 1.0, *, at: float | None = None) -> None:
        super().progress(work, size, at=at)
        if work == self._work and not self.stopped:
            self.stopped += self._workers()
            for pid in self.stopped:
                os.kill(pid, signal.SIGSTOP)
            self._first_s = SHORT_S  # the kind of work may be new, and waiting two minutes would not test more

    def begin(self, work: str = "starting") -> None:
        super().begin(work)
        self._first_s = 120.0
        if self.stopped:  # no process is stopped any more, and a busy machine may pause a working learner for seconds
            self._least_s = 120.0


def rank_of(pid: int) -> int:
    variables = dict(pair.split(b"=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in pair)
    return int(variables[b"RANK"])


class Alerts:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def alert(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize(
    ("work", "ranks"),
    [
        ("computing a micro-batch", 1),
        ("writing a checkpoint", 1),
        ("publishing a version", 1),
        ("waiting for groups", 1),
        ("waiting for groups", 2),
    ],
)
async def test_a_stuck_learner_is_restarted_and_each_group_is_trained_once(
    tmp_path: Path, work: str, ranks: int, host: Path, make_learner: MakeLearner
) -> None:
    """With two ranks, torchrun starts them, and the rank that is stopped is not the one that reports."""
    recipe = build_recipe().but(f"learner.ranks={ranks}", steps=STEPS)
    groups = [random_group(index) for index in range(3 * STEPS)]
    write_run(tmp_path, recipe, groups[:6])

    def workers() -> list[int]:
        if ranks == 1:
            return [child.pid for child in psutil.Process(int(host.stem)).children()]
        return [pid for pid in _workers(tmp_path) if rank_of(pid) == ranks - 1]

    learner = LearnerProcess(tmp_path, recipe) if ranks == 2 else make_learner(tmp_path, recipe)
    liveness = learner.liveness = Stopping(work, workers)
    learner.stopped.least_s = 1e9  # a stopped process is a stand-in for one that hangs
    registry = FolderRegistry(tmp_path / "versions")
    run = SimpleNamespace(learner=learner, tracker=Alerts(), registry=registry)
    watcher = asyncio.create_task(supervise.watch_learner(learner, registry, run.tracker.alert))
    try:
        async with asyncio.timeout(300):
            while not run.tracker.texts:
                await asyncio.sleep(0.05)
                assert not watcher.done() or not watcher.exception()
            if ranks == 1:  # the host of preloaded processes kills its ranks within a moment
                await until(lambda: all(read_stat(pid).has_ended for pid in liveness.stopped))
            assert liveness.stopped and all(read_stat(pid).has_ended for pid in liveness.stopped), "no successor runs next to it"
            (text,) = run.tracker.texts
            assert "the learner has made no progress for" in text and "it was killed" in text and "restart 1 of at most 3" in text
            store = SqliteStore(tmp_path / "experience.sqlite")
            for group in groups[6:]:
                store.put(group)
            await watcher
    finally:
        watcher.cancel()
        await learner.kill()
    assert len(run.tracker.texts) == 1
    assert consumed(store) == {index: index // 3 for index in range(3 * STEPS)}
    versions = [registry.get(number) for number in range(STEPS + 1)]
    assert all(versions) and len({version.sha256 for version in versions if version is not None}) == STEPS + 1
    log = (tmp_path / "logs" / "learner.log").read_text()
    assert "all 3 steps are done" in log
    store.close()
    registry.close()


async def test_a_slow_learner_continues_and_one_without_progress_is_killed(tmp_path: Path, make_learner: MakeLearner) -> None:
    """Each micro-batch takes three times the shortest deadline; the fourth never ends, in a process that keeps computing."""
    slow = Part("tests.learner.slow_loss:slow", options={"seconds": 3.0, "stuck_at": 4})
    recipe = build_recipe(objective={"loss": slow}, learner={"max_tokens_per_microbatch": 256})
    recipe = recipe.but(steps=4)
    write_run(tmp_path, recipe, [random_group(index) for index in range(12)])
    learner = make_learner(tmp_path, recipe)
    learner.root = ROOT
    learner.liveness = Liveness("the learner", first_s=60.0, least_s=1.0)
    await learner.start()
    try:
        started = time.monotonic()
        with pytest.raises(
            LearnerError, match=r"no progress for \d+ s while computing a micro-batch \(longest so far: .* s; deadline: .* s\)"
        ):
            await learner.wait(timeout_s=300)
        assert time.monotonic() - started > 3 * 3.0, "the learner waited for three slow micro-batches"
        assert FolderRegistry(tmp_path / "versions").get(1) is not None, "the slow micro-batches completed a step"
    finally:
        await learner.kill()
