"""Kills random parts of a run every few seconds, and compares its result with that of a run without faults."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from agentrl.base.numbers import plural
from agentrl.base.processes import process_tree
from agentrl.chaos.checks import orphaned_sandboxes, problems
from agentrl.chaos.subject import RANK, SERVER, ChaosError, Subject, ended
from agentrl.chaos.suite import Report, Result
from agentrl.observe import Summary
from agentrl.observe.stats import rate_difference

_STEPS = 8
_SHARES = {"server": 3, "engine": 2, "learner": 4, "driver": 1}
_PAUSE_S = (1.0, 5.0)


def run_soak(*, work: Path, backend: str, minutes: float, kills: int = 100, seed: int = 0, report: Report = print) -> list[Result]:
    """Kills parts until `kills` parts were killed or `minutes` have passed. Returns a result for this run and, if the run has no problems,
    one for the comparison.

    A sandbox is killed every few seconds. The server, its engine, a rank of the learner or the driver is killed only after each completed
    step, because a run with more frequent kills would only restart its parts. A run that has stopped is resumed.
    """
    with ExitStack() as stack:
        orphans = orphaned_sandboxes()
        run = Subject(work / "soak", steps=_STEPS, backend=backend, log=work / "soak.log")
        stack.callback(run.close)
        killed = _kill_parts(run, random.Random(seed), until=time.monotonic() + 60.0 * minutes, most=kills, report=report)
        try:
            _finish(run)
            wrong = list(problems(run, orphans=orphans))
        except ChaosError as error:
            wrong = [str(error)]
        parts = ", ".join(f"{number} {part}" for part, number in killed.most_common())
        witness = (
            f"{plural(killed.total(), 'kill')} with signal 9 ({parts}), {plural(run.resumes, 'resume')}, {plural(run.steps_done(), 'step')}"
        )
        result = Result(case="19 soak", witness=witness, problem="; ".join(wrong))
        if wrong:
            return [result]
        report(f"  {witness}; now comparing with a run without faults")
        alone = Subject(work / "alone", steps=run.steps, backend=backend, log=work / "alone.log")
        stack.callback(alone.close)
        alone.start()
        alone.wait_for_end(timeout_s=3600.0)
        return [result, _compare(run, alone)]


def _kill_parts(run: Subject, chance: random.Random, *, until: float, most: int, report: Report) -> Counter[str]:
    killed, step = Counter[str](), 0
    run.start()
    while killed.total() < most and time.monotonic() < until:
        time.sleep(chance.uniform(*_PAUSE_S))
        if run.exit_code is not None:
            if run.exit_code == 0:
                run.extend(_STEPS)
            run.start()
            continue
        part, done = "sandbox", run.steps_done()
        if done > step:
            part = chance.choices(list(_SHARES), list(_SHARES.values()))[0]
        pids = _pids(run, part)
        if not pids:
            continue
        pid = chance.choice(pids)
        os.kill(pid, signal.SIGKILL)
        step = done if part != "sandbox" else step
        if _gone(run, pid):
            killed[part] += 1
            left_min = max(until - time.monotonic(), 0.0) / 60
            report(f"  kill {killed.total()}: {part} (process {pid}) after step {done}; at most {left_min:.0f} min left")
    return killed


def _pids(run: Subject, part: str) -> list[int]:
    """Returns the ids of the processes that run a part of kind `part`."""
    if part == "driver":
        return [run.pid]
    if part == "learner":
        return run.processes(RANK)[-1:]
    if part == "sandbox":
        return sorted(run.sandboxes())
    servers = run.processes(SERVER)[:1]
    if part == "server" or not servers:
        return servers
    return [pid for pid in process_tree(servers[0]) if pid != servers[0]]


def _gone(run: Subject, pid: int) -> bool:
    deadline = time.monotonic() + 10.0
    while not ended(pid) and not (pid == run.pid and run.exit_code is not None):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _finish(run: Subject) -> None:
    """Waits, without further faults, until the run finishes. Resumes a run that was paused or whose driver was killed."""
    for _ in range(3):
        if run.exit_code not in (None, 0):
            run.start()
        if run.wait_for_end(timeout_s=3600.0) == 0:
            return


def _compare(run: Subject, alone: Subject) -> Result:
    """Checks whether both runs have the same success rate, using the 95% confidence interval of the difference."""
    one, other = Summary.read(run.run_dir).heldout_after, Summary.read(alone.run_dir).heldout_after
    if one is None or other is None:
        return Result(case="19 same success", problem="a run has no evaluation after its last step")
    low, high = rate_difference(other, one)
    witness = f"held-out {one.value:.2f} after the kills, {other.value:.2f} without; difference [{low:+.2f}, {high:+.2f}]"
    return Result(case="19 same success", witness=witness, problem="" if low <= 0.0 <= high else f"the success rates differ: {witness}")
