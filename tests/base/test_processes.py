"""A child that dies with its parent, and the age of a process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from agentrl.base.processes import die_with_parent, process_age_s, process_tree, raise_file_limit, rare_collections
from tests.waiting import until, wait_until


def _start_a_child(pids: multiprocessing.Queue[int]) -> None:
    """Starts a child that dies with this process, sends the child's id, and waits."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        pids.put(os.getpid())
    time.sleep(60)


@pytest.mark.slow
def test_a_child_dies_with_its_parent() -> None:
    context = multiprocessing.get_context("spawn")
    pids = context.Queue()
    parent = context.Process(target=_start_a_child, args=(pids,))
    parent.start()
    child = pids.get(timeout=30)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.01)


def test_a_process_tree_contains_the_states() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        wait_until(lambda: len(process_tree(child.pid)) == 2)
        (sleeper,) = process_tree(child.pid).keys() - {child.pid}
        assert process_tree(sleeper) == {sleeper: "S"} and child.pid in process_tree(os.getpid())
        os.kill(sleeper, signal.SIGSTOP)
        wait_until(lambda: process_tree(child.pid).get(sleeper) == "T")
        os.kill(sleeper, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert process_tree(child.pid) == {}


def test_the_age_of_a_process_matches_the_clock() -> None:
    started = time.monotonic()
    code = "import time; time.sleep(0.7); from agentrl.base.processes import process_age_s; print(process_age_s())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 0.68 <= float(result.stdout) <= time.monotonic() - started + 0.02
    assert process_age_s() > float(result.stdout)


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
        assert raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
async def test_full_collections_are_rare_and_still_free_cycles() -> None:
    """Objects that outlive the younger generations do not start a full collection; the timer and the end of the context do."""
    generations: list[int] = []

    def record_generation(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    before = gc.get_threshold()
    gc.callbacks.append(record_generation)
    try:
        async with rare_collections(every_s=3600.0):
            generations.clear()
            survivors = [[Cycle()] for _ in range(200_000)]  # without the context: several full collections
            assert 1 in generations and 2 not in generations
            dead = weakref.ref(cycle := Cycle())
            del cycle
        assert generations.count(2) == 1 and dead() is None and gc.get_threshold() == before
        async with rare_collections(every_s=0.01):
            generations.clear()
            await until(lambda: generations.count(2) >= 2)
    finally:
        gc.callbacks.remove(record_generation)
    assert len(survivors) == 200_000
