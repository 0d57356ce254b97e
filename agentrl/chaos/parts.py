"""Faults of the run's parts: its server, its learner and its sandboxes. Each function waits for the right moment, injects the fault, proves
that it happened, and waits until the part works again."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.files import numbered_folders, sha256_file
from agentrl.base.processes import process_tree
from agentrl.chaos.subject import PER_STEP, RANK, SERVER, STALENESS, ChaosError, Subject, command_line, ended, send
from agentrl.records import VersionState

_FAST_S = 0.0005
_TRIES = 12  # number of steps in which a moment of milliseconds may be missed


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """The outcome of a fault: evidence from outside the affected part, and the seconds until the run recovered."""

    witness: str
    recovered_s: float | None = None  # None if no part has to recover


def server_killed_idle(run: Subject) -> Injected:
    """Kills the policy server while it is idle. To make the server idle, first kills a rank of the learner and waits until no more groups
    may be sampled."""
    run.wait_for_step()
    os.kill(run.processes(RANK)[-1], signal.SIGKILL)
    run.wait_for(lambda: len(run.entries()) >= PER_STEP * (run.served() + 1 + STALENESS), "an idle server", poll_s=0.01)
    stored = len(run.entries())
    return _server_killed(run, f"{stored} groups were stored, all that version {run.served()} may sample")


def server_killed_in_flight(run: Subject) -> Injected:
    """Kills the policy server while a block of groups is sampled."""
    run.wait_for_step()
    failed = _attempts_failed(run)
    for _ in range(_TRIES):
        served = run.served()
        run.wait_for(lambda: run.served() > served, "a new version", poll_s=0.01)  # noqa: B023 - called at once
        time.sleep(0.2)
        lines = len(run.metrics())
        injected = _server_killed(run, "groups were being sampled")
        run.wait_for(lambda: len(run.metrics()) > lines + 1, "the metrics of the step")  # noqa: B023 - called at once
        if lost := _attempts_failed(run) - failed:
            return Injected(witness=f"{injected.witness}; the driver counted {lost} lost attempts", recovered_s=injected.recovered_s)
    raise ChaosError("each time the server died, no request was in flight")


def engine_killed(run: Subject) -> Injected:
    """Kills the engine behind the server's API process, which may still respond to health checks."""
    run.wait_for_step()
    api, engine = _server(run), _engine(run)
    size = run.output_size()
    os.kill(engine, signal.SIGKILL)
    began = time.monotonic()
    health = _health(api)
    run.wait_for(lambda: ended(engine), "the end of the engine", poll_s=0.01)
    witness = f"engine {engine} ended; {'its API server had ended too' if health is None else f'GET /health returned {health}'}"
    return _server_back(run, witness, size, began)


def server_killed_in_swap(run: Subject) -> Injected:
    """Kills the policy server while it loads new weights."""
    for _ in range(_TRIES):
        number = run.served() + 1
        record = run.run_dir / "versions" / f"{number:06d}" / "version.json"
        run.wait_for(record.exists, f"version {number}", poll_s=_FAST_S)
        time.sleep(0.06)  # the driver checks for a new version every 50 ms
        pids, size = _server_processes(run), run.output_size()
        send(pids, signal.SIGSTOP)
        version = run.version(VersionState.CANDIDATE)
        if version is None or version.number != number:
            send(pids, signal.SIGCONT)
            continue
        send(pids, signal.SIGKILL)
        began = time.monotonic()
        waits = f"version {number} waits for the next server"
        run.wait_for(lambda: run.served() >= number, "the version in a new server")  # noqa: B023 - called at once
        if waits in run.output(size):
            return Injected(witness=f'the driver logged "{waits}"', recovered_s=time.monotonic() - began)
    raise ChaosError("each time, the server was killed before or after a weight swap, not during it")


def server_stopped(run: Subject) -> Injected:
    """Stops the engine (SIGSTOP) while the server's routes still respond. Measures the seconds until the stop is detected."""
    run.wait_for_step()
    engine, size = _engine(run), run.output_size()
    os.kill(engine, signal.SIGSTOP)
    began = time.monotonic()
    run.wait_for(lambda: "the inference server is replaced" in run.output(size), "the detection of the stopped server")
    detected = time.monotonic() - began
    back = _server_back(run, f"engine {engine} was in state T", size, began)
    return Injected(witness=f"{back.witness}; it served again after {back.recovered_s:.0f} s", recovered_s=detected)


def learner_killed_before(run: Subject) -> Injected:
    """Kills a learner rank that is waiting for groups."""
    return _rank_killed(run, lambda step: True, lambda step: not _assigned(run, step), "no group was assigned to the step")


def learner_killed_during(run: Subject) -> Injected:
    """Kills a learner rank that is computing an update."""

    def computes(step: int) -> bool:
        return _assigned(run, step) and not _part(run, step).exists() and not _checkpoint(run, step).exists()

    return _rank_killed(run, computes, computes, "its groups were assigned, and no checkpoint of the step existed")


def learner_killed_after(run: Subject) -> Injected:
    """Kills a learner rank that has updated the weights and is writing its checkpoint."""

    def writes(step: int) -> bool:
        return _part(run, step).exists() and not _manifest(run, step).exists()

    return _rank_killed(run, writes, writes, "its checkpoint was half written")


def learner_killed_before_rename(run: Subject) -> Injected:
    """Kills a learner rank after it has written the last byte of its checkpoint and before it renames the checkpoint."""

    def complete(step: int) -> bool:
        return _manifest(run, step).exists()

    return _rank_killed(run, complete, complete, "its checkpoint was complete under its temporary name")


def learner_killed_uncommitted(run: Subject) -> Injected:
    """Kills a learner rank after it has renamed its checkpoint and before it commits the step to the ledger."""

    def renamed(step: int) -> bool:
        return _checkpoint(run, step).exists()

    return _rank_killed(run, renamed, renamed, "its checkpoint existed and the ledger had not acknowledged its groups")


def checkpoint_damaged(run: Subject) -> Injected:
    """Flips a bit in the newest checkpoint and kills the learner, which must continue from the previous checkpoint."""
    run.wait_for_step()
    run.wait_for(lambda: run.steps_done() > 1, "two checkpoints")
    ranks = run.processes(RANK)
    send(ranks, signal.SIGSTOP)
    newest = numbered_folders(run.run_dir / "checkpoints")[-1]
    file = max((newest / "state").iterdir(), key=lambda path: path.stat().st_size)
    expected = json.loads((newest / "manifest.json").read_text())[f"state/{file.name}"]
    with file.open("r+b") as damaged:
        damaged.seek(file.stat().st_size // 2)
        byte = damaged.read(1)[0]
        damaged.seek(-1, os.SEEK_CUR)
        damaged.write(bytes([byte ^ 1]))
    if sha256_file(file) == expected:
        raise ChaosError(f"{file} is undamaged")
    began, size, output = time.monotonic(), _learner_log_size(run), run.output_size()
    send(ranks, signal.SIGKILL)
    run.wait_for(lambda: "resumed after" in _learner_log(run, size), "the restart of the learner")
    recovered, text = time.monotonic() - began, _learner_log(run, size)
    run.wait_for(lambda: f"{newest.name} is damaged" in run.output(output), "the alert for the damaged checkpoint")
    if f"resumed after step {int(newest.name) - 1} from" not in text:
        raise ChaosError(f"the learner did not fall back from {newest}: {text[-1500:]}")
    return Injected(witness=f"sha256 of {newest.name}/state/{file.name} differs from its manifest", recovered_s=recovered)


def learner_stopped(run: Subject) -> Injected:
    """Stops a learner rank (SIGSTOP). Measures the seconds until the stop is detected."""
    run.wait_for_step()
    rank, size, log = run.processes(RANK)[-1], run.output_size(), _learner_log_size(run)
    os.kill(rank, signal.SIGSTOP)
    detected = run.wait_for(lambda: "the learner has made no progress" in run.output(size), "the detection of the stopped learner")
    back = detected + run.wait_for(lambda: "resumed after" in _learner_log(run, log), "the restart of the learner")
    return Injected(witness=f"rank {rank} was in state T; its successor worked after {back:.0f} s", recovered_s=detected)


def learner_stopped_with_lock(run: Subject) -> Injected:
    """Stops a learner rank (SIGSTOP) while it holds the lock of the version registry. Measures the seconds until the stop is detected."""
    run.wait_for_step()
    rank, size, log = run.processes(RANK)[-1], run.output_size(), _learner_log_size(run)

    def stopped_in_time() -> bool:
        if not _holds_lock(run, rank):
            return False
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.01)
        if _holds_lock(run, rank):
            return True
        os.kill(rank, signal.SIGCONT)
        return False

    run.wait_for(stopped_in_time, "the rank to hold the lock", poll_s=0.0002)
    detected = run.wait_for(lambda: "the learner has made no progress" in run.output(size), "the detection of the stopped learner")
    back = detected + run.wait_for(lambda: "resumed after" in _learner_log(run, log), "the restart of the learner")
    return Injected(witness=f"rank {rank} was in state T with the lock; its successor worked after {back:.0f} s", recovered_s=detected)


def _holds_lock(run: Subject, pid: int) -> bool:
    """Whether a process holds the lock of the version registry, according to the kernel's list of locks."""
    inode = f":{(run.run_dir / 'versions' / '.lock').stat().st_ino}"
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(fields[4] == str(pid) and fields[5].endswith(inode) for fields in locks if fields[1] != "->")


def sandboxes_killed(run: Subject) -> Injected:
    """Kills every open sandbox and the programs in it."""
    served = run.served()
    run.wait_for(lambda: run.served() > served, "a new version, whose groups start", poll_s=0.01)
    run.wait_for(run.sandboxes, "an open sandbox", poll_s=0.005)
    before = run.sandboxes()
    programs = {pid for sandbox in before for pid in process_tree(sandbox)}
    send(programs, signal.SIGKILL)
    began = time.monotonic()
    run.wait_for(lambda: run.sandboxes() - before, "a new sandbox", poll_s=0.005)
    recovered = time.monotonic() - began
    run.wait_for(lambda: all(ended(pid) for pid in programs), "the end of the killed sandboxes")
    return Injected(witness=f"{len(before)} sandboxes with {len(programs)} processes ended", recovered_s=recovered)


def _checkpoint(run: Subject, step: int) -> Path:
    """Returns the final folder of the checkpoint after step `step` of the learner, counted from 0."""
    return run.run_dir / "checkpoints" / f"{step + 1:06d}"


def _part(run: Subject, step: int) -> Path:
    return run.run_dir / "checkpoints" / f".{step + 1:06d}.part"


def _manifest(run: Subject, step: int) -> Path:
    return _part(run, step) / "manifest.json"


def _assigned(run: Subject, step: int) -> bool:
    return any(entry.step == step for entry in run.entries())


def _rank_killed(run: Subject, seen: Callable[[int], bool], holds: Callable[[int], bool], evidence: str) -> Injected:
    """Waits until `seen` is true for the next step (counted from 0), then stops the ranks. If `holds` is true for the step and the ledger
    has not acknowledged it, kills one rank. Otherwise resumes the ranks and retries with the step that is next then."""
    run.wait_for_step()  # restarts without a new version between them are limited
    for _ in range(_TRIES * 4):
        step, ranks = run.steps_done(), run.processes(RANK)
        run.wait_for(lambda: seen(step) or _checkpoint(run, step).exists(), evidence, poll_s=_FAST_S)  # noqa: B023 - called at once
        send(ranks, signal.SIGSTOP)
        if ranks and holds(step) and run.steps_done() == step:
            return _learner_back(run, ranks, f"in step {step + 1}; {evidence}")
        send(ranks, signal.SIGCONT)
    raise ChaosError(f"the moment for the fault was missed in each step: {evidence}")


def _learner_back(run: Subject, ranks: list[int], evidence: str) -> Injected:
    """Kills a stopped rank, and waits until the new learner has loaded a checkpoint."""
    began, size = time.monotonic(), _learner_log_size(run)
    os.kill(ranks[-1], signal.SIGKILL)
    send(ranks, signal.SIGCONT)
    run.wait_for(lambda: ended(ranks[-1]), "the end of the rank", poll_s=0.01)
    run.wait_for(lambda: "resumed after" in _learner_log(run, size), "the restart of the learner")
    return Injected(witness=f"rank {ranks[-1]} was killed by signal 9 {evidence}", recovered_s=time.monotonic() - began)


def _learner_log_size(run: Subject) -> int:
    return (run.run_dir / "logs" / "learner.log").stat().st_size


def _learner_log(run: Subject, start: int) -> str:
    with (run.run_dir / "logs" / "learner.log").open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def _server(run: Subject) -> int:
    """Returns the process id of the policy server. Raises `ChaosError` if there is none."""
    servers = run.processes(SERVER)
    if not servers:
        raise ChaosError(f"the run has no server: {run.last_output()}")
    return servers[0]


def _server_processes(run: Subject) -> list[int]:
    servers = run.processes(SERVER)
    return list(process_tree(servers[0])) if servers else []


def _engine(run: Subject) -> int:
    """Returns the id of the server's child process that uses the most memory."""
    api = _server(run)
    below = [pid for pid in process_tree(api) if pid != api]
    if not below:
        raise ChaosError("the server has no engine")
    return max(below, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def _server_killed(run: Subject, evidence: str) -> Injected:
    _server(run)
    pids, size = _server_processes(run), run.output_size()
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    run.wait_for(lambda: all(ended(pid) for pid in pids), "the end of the server", poll_s=0.01)
    return _server_back(run, f"server {pids[0]} was killed by signal 9, and its engine ended; {evidence}", size, began)


def _server_back(run: Subject, witness: str, size: int, began: float) -> Injected:
    """Waits until a new server works, that is, until a group is stored or a new version is served."""
    run.wait_for(lambda: "the inference server is replaced" in run.output(size), "the alert for the lost server")
    stored, served = len(run.entries()), run.served()
    run.wait_for(lambda: len(run.entries()) > stored or run.served() > served, "a group or a swap of the new server")
    return Injected(witness=witness, recovered_s=time.monotonic() - began)


def _health(api: int) -> int | None:
    """Returns the status of the server's response to a health probe; None if it does not respond."""
    words = command_line(api).split()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{words[words.index('--port') + 1]}/health", timeout=5.0) as answer:
            return int(answer.status)
    except (OSError, ValueError):
        return None


def _attempts_failed(run: Subject) -> int:
    """Returns the number of attempts that the driver counted as faults, according to the metrics of the steps."""
    return int(sum(line.get("attempts_failed", 0) for line in run.metrics()))
