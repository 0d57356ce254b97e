"""Faults of rollout workers, and of the Redis server that transports their groups, in a run with two workers."""

from __future__ import annotations

import os
import signal
import time

from agentrl.base.processes import process_tree
from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import ChaosError, Subject, command_line, ended, send

WORKERS = ("rollout.workers=2", "rollout.checkpoint_turns=true", "store=redis")
"""Overrides for the second run, which has workers."""
_MODULE = "agentrl.run.worker"


def worker_killed(run: Subject) -> Injected:
    """Kills one of two rollout workers while it is sampling. Measures the seconds until its groups are queued for the other worker."""
    pid, size = _sampling(run)[0], run.output_size()
    os.kill(pid, signal.SIGKILL)
    recovered = run.wait_for(lambda: "it was killed by signal 9, SIGKILL" in run.output(size), "the alert for the worker", poll_s=0.01)
    _next_group(run)
    return Injected(witness=_gone(run, [pid], "another group was stored"), recovered_s=recovered)


def workers_killed(run: Subject) -> Injected:
    """Kills all rollout workers while they are sampling. Measures the seconds until a new worker has finished a group."""
    pids = _sampling(run)
    send(pids, signal.SIGKILL)
    began = time.monotonic()
    run.wait_for(lambda: all(ended(pid) for pid in pids), "the end of the workers", poll_s=0.01)
    _next_group(run)
    return Injected(witness=_gone(run, pids, "a new one has finished a group"), recovered_s=time.monotonic() - began)


def worker_stopped(run: Subject) -> Injected:
    """Stops a rollout worker (SIGSTOP). Measures the seconds until its groups are queued for the other worker."""
    pid, size = _sampling(run)[0], run.output_size()
    os.kill(pid, signal.SIGSTOP)
    detected = run.wait_for(lambda: "is silent; its groups continue in another worker" in run.output(size), "the detection of the worker")
    _next_group(run)
    return Injected(witness=_gone(run, [pid], "it was in state T, then replaced"), recovered_s=detected)


def redis_killed(run: Subject) -> Injected:
    """Kills the Redis server while workers are sending groups. Measures the seconds until a group is stored again."""
    _sampling(run)
    [pid] = _servers(run)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    run.wait_for(lambda: ended(pid), "the end of the Redis server", poll_s=0.01)
    _next_group(run)
    after = _servers(run)
    if len(after) != 1 or after == [pid]:
        raise ChaosError(f"the Redis server was not replaced: {after}")
    return Injected(
        witness=f"Redis server {pid} was killed by signal 9; server {after[0]} has its data", recovered_s=time.monotonic() - began
    )


def _sampling(run: Subject) -> list[int]:
    """Waits until groups of a new version are being sampled. Returns the process ids of the two workers."""
    run.wait_for(lambda: len(run.processes(_MODULE)) == 2, "two workers")
    served = run.served()
    run.wait_for(lambda: run.served() > served, "a new version, whose groups start", poll_s=0.01)
    run.wait_for(run.sandboxes, "an open sandbox", poll_s=0.005)
    workers = run.processes(_MODULE)
    if len(workers) != 2:
        raise ChaosError(f"the run has the workers {workers}, not two: {run.last_output()}")
    return workers


def _next_group(run: Subject) -> None:
    stored = len(run.entries())
    run.wait_for(lambda: len(run.entries()) > stored, "another group", poll_s=0.01)


def _gone(run: Subject, pids: list[int], evidence: str) -> str:
    """Waits until workers have exited and returns the evidence as text."""
    run.wait_for(lambda: all(ended(pid) for pid in pids), "the end of the workers", poll_s=0.01)
    return f"worker {', '.join(map(str, pids))} was killed by signal 9; {evidence}"


def _servers(run: Subject) -> list[int]:
    return [pid for pid in process_tree(run.pid) if command_line(pid).startswith("redis-server")]
