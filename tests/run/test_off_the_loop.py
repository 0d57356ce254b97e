"""No database call, sync, compression or encoding of a record runs on the thread of the driver's event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agentrl.base import files
from agentrl.evaluation.held_out import HeldOutEvaluation
from agentrl.records import PolicyVersion, codec
from agentrl.run.rollouts import Rollouts, RunningGroups
from agentrl.run.versions import StepRecords
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from agentrl.version import FolderRegistry
from tests.driving import Family, Journaled, make_recipe, opened
from tests.ledgers import take_step
from tests.off_loop import BlockingCalls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> BlockingCalls:
    """Also counts compression, encoding of records and files of lines."""
    calls, compressor = BlockingCalls(monkeypatch), zstandard.ZstdCompressor

    class Compressor:
        def __init__(self, **options: Any) -> None:
            self.compress = calls.counted("compression", compressor(**options).compress)

    monkeypatch.setattr(zstandard, "ZstdCompressor", Compressor)
    monkeypatch.setattr(codec, "dump", calls.counted("encoding", codec.dump))
    monkeypatch.setattr(files, "append_lines", calls.counted("lines", files.append_lines))
    return calls


@pytest.mark.slow
async def test_nothing_blocks_the_loops_thread(tmp_path: Path, calls: BlockingCalls) -> None:
    """Runs two steps with checkpoints, captured failures, transcripts, task weights, notes and records, and an evaluation."""
    recipe = make_recipe(groups_per_step=3).but("steps=2", "max_staleness=0", "tasks.weighting=true", "evaluation.heldout=2", "memory={}")
    registry = FolderRegistry(tmp_path / "versions")
    for number in range(3):
        folder = registry.folder / f"{number:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        registry.add(
            PolicyVersion(
                number=number, parent=None, folder=f"versions/{number:06d}", sha256=files.sha256_file(folder / "model.safetensors")
            )
        )
    async with opened(tmp_path, Journaled(tmp_path / "j"), ScriptedSandboxes(printing("3")), recipe, Family()) as run:
        run.registry = registry
        served: Any = run.served
        served.figures = dict
        for step in range(2):
            async with asyncio.TaskGroup() as running:
                groups = RunningGroups(Rollouts.of(run), running)
                for slot in range(step * run.order.per_step, (step + 1) * run.order.per_step):
                    assert run.starts.admit(slot, version=step, parked=0)
                    await groups.start(slot)
            take_step(run.order, run.store.store, step)
        await StepRecords.of(run).finish(registry.get(2) or _none(), None)
        await StepRecords.of(run).record_missing()
        await StepRecords.of(run).unfinished_groups()
        await HeldOutEvaluation.of(run).evaluate("after", step=2)
    assert not calls.on_loop, "\n".join(calls.on_loop)
    assert calls.calls["database"] > 50 and min(calls.calls[kind] for kind in ("sync", "compression", "encoding")) > 10, calls.calls


def _none() -> Any:
    raise AssertionError("it was registered")
