"""A step of a long run costs no more than a step of a short run: a compressed soak test of the driver with a stub learner."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from agentrl.observe import terminal
from agentrl.rollout import pace, repeats
from agentrl.run import loop
from tests.run.endless import endless_recipe, endless_run, steps_done

STEPS, SAMPLES = 480, 8
OPENED = 0


def count_opened(event: str, arguments: object) -> None:
    global OPENED
    OPENED += event == "open"


def figures(folder: Path) -> dict[str, float]:
    """Returns what the process has (objects in memory, open files), and what it has used so far (files opened, bytes read, CPU)."""
    gc.collect()
    read = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    weights = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return {
        "blocks": sys.getallocatedblocks(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "weights": weights,
        "opened": OPENED,
        "read": int(read["rchar"]),
        "cpu_s": sum(os.times()[:2]),
    }


@pytest.mark.slow
async def test_memory_files_and_the_cost_of_a_step_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_KEPT", 32)  # bounded histories, which would otherwise grow during the whole test
    monkeypatch.setattr(repeats, "_NEWEST", 32)
    monkeypatch.setattr(terminal, "_SHOWN_STEPS", 32)
    sys.addaudithook(count_opened)
    recipe = endless_recipe(**{"rollout.concurrency": 4})
    async with endless_run(tmp_path, recipe) as run:
        running = asyncio.create_task(loop._pipeline(run))
        measurements = []
        for sample in range(1, SAMPLES + 1):
            await steps_done(run, sample * STEPS // SAMPLES)
            measurements.append(figures(tmp_path))
        run.stop_after_step()
        await asyncio.wait_for(running, 60)
        assert run.served.version >= STEPS
    print(*(f"{measurement}" for measurement in measurements), sep="\n")
    middle, last = measurements[SAMPLES // 2 - 1], measurements[-1]
    steps = STEPS // 2
    assert last["files"] <= middle["files"] + 1 and last["threads"] <= middle["threads"] + 2 and last["weights"] <= 6 * len(b"weights")
    assert (last["blocks"] - middle["blocks"]) / steps < 10, "objects that each step leaves in memory"
    for used in ("opened", "read", "cpu_s"):
        spent = [(after[used] - before[used]) for before, after in pairwise(measurements)]
        early, late = fmean(spent[2:4]), fmean(spent[-2:])
        assert late < 1.3 * early, (used, spent)
