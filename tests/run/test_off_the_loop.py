"""No call of a database, no sync, no compression and no encoding of a record runs on the thread of the driver's event loop."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import traceback
from collections import Counter
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


class Watch:
    """Counts calls by what they do, and records the stack of those on the loop's thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = Counter[str]()
        self.on_loop: list[str] = []
        self._thread: int | None = None
        watch = self

        class Connection(sqlite3.Connection):
            def execute(self, *args: Any) -> Any:
                watch.saw("database")
                return super().execute(*args)

        class Compressor:
            def __init__(self, **options: Any) -> None:
                self.compress = watch.watched("compression", compressor(**options).compress)

        connect, compressor = sqlite3.connect, zstandard.ZstdCompressor
        patch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **options, factory=Connection))
        patch.setattr(zstandard, "ZstdCompressor", Compressor)
        patch.setattr(os, "fsync", self.watched("sync", os.fsync))
        patch.setattr(codec, "dump", self.watched("encoding", codec.dump))
        patch.setattr(files, "append_lines", self.watched("lines", files.append_lines))

    def start(self) -> None:
        self._thread = threading.get_ident()

    def stop(self) -> None:
        self._thread = None

    def saw(self, what: str) -> None:
        self.calls[what] += 1
        if threading.get_ident() == self._thread:
            self.on_loop.append(f"{what}: " + "".join(traceback.format_stack()[-6:-2]))

    def watched(self, what: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.saw(what)
            return function(*args, **options)

        return call


@pytest.mark.slow
async def test_the_loops_thread_only_coordinates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of groups with checkpoints, captured failures, transcripts, task weights and notes, their records, and an evaluation."""
    watch = Watch(monkeypatch)
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
            watch.start()
            async with asyncio.TaskGroup() as running:
                groups = RunningGroups(Rollouts.of(run), running)
                for slot in range(step * run.order.per_step, (step + 1) * run.order.per_step):
                    assert run.starts.admit(slot, version=step, parked=0)
                    await groups.start(slot)
            watch.stop()
            take_step(run.order, run.store.store, step)
        watch.start()
        await StepRecords.of(run).finish(registry.get(2) or _none(), None)
        await StepRecords.of(run).unfinished_groups()
        await HeldOutEvaluation.of(run).evaluate("after", step=2)
        watch.stop()
    assert not watch.on_loop, "\n".join(watch.on_loop)
    assert watch.calls["database"] > 50 and min(watch.calls[what] for what in ("sync", "compression", "encoding")) > 10, watch.calls


def _none() -> Any:
    raise AssertionError("it was registered")
