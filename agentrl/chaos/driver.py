"""Faults of the run's driver, run folder and disk. After each fault, the run continues or is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import LAUNCHER, RANK, SERVER, ChaosError, Subject

_SMALL_MIB = 1400


def second_driver(run: Subject) -> Injected:
    """Starts a second driver on the run folder, and checks that it fails."""
    run.wait_for((run.run_dir / "recipe.json").exists, "the run folder")
    for command in (run.command, (*run.command, "--resume")):
        reader, writer = os.pipe()
        with open(reader, encoding="utf-8", errors="replace") as output:
            other = run.spawn(command, writer)
            os.close(writer)
            text = " ".join(output.read().split())
        expected = f"is in use by another agentrl: process {run.pid} on "
        if other.wait() != 2 or expected not in text:
            raise ChaosError(f"a second driver ended with exit code {other.returncode}: {text[-1500:]}")
    return Injected(witness=f'both attempts to start a second driver ended with exit code 2 and "{expected}..."')


def hang_up(run: Subject) -> Injected:
    """Sends SIGHUP to the driver, as a closed terminal does."""
    log = run.run_dir / "logs" / "driver.log"
    run.wait_for_step()
    steps = run.steps_done()
    os.kill(run.pid, signal.SIGHUP)
    run.wait_for(lambda: log.exists() and "the terminal was closed (SIGHUP)" in log.read_text(), "the driver's log line about its terminal")
    run.wait_for(lambda: run.steps_done() > steps, "another step")
    return Injected(witness='logs/driver.log contains "the terminal was closed (SIGHUP)", and the next step followed')


def interrupted(run: Subject) -> Injected:
    """Sends ctrl-C, after which the driver finishes the step. Then sends ctrl-C twice while the resumed run starts, and resumes the run
    again."""
    run.wait_for_step()
    os.kill(run.pid, signal.SIGINT)
    code = run.wait_for_end()
    steps = run.steps_done()
    if code != 130 or "--resume" not in run.resume_command():
        raise ChaosError(f"after one ctrl-C the run ended with exit code {code}: {run.last_output()}")
    _expect_nothing_left(run)
    run.start()
    run.wait_for(lambda: run.processes(LAUNCHER), "the start of the learner")
    os.kill(run.pid, signal.SIGINT)
    run.wait_for(lambda: "interrupt again to stop now" in run.output(), "the answer to the first ctrl-C")
    os.kill(run.pid, signal.SIGINT)
    code = run.wait_for_end()
    if code != 130 or "stopped; finished work is kept" not in run.output():
        raise ChaosError(f"after two ctrl-C the run ended with exit code {code}: {run.last_output()}")
    return _resumed(run, f"exit code 130 after step {steps}, and again during the next start")


def driver_killed(run: Subject) -> Injected:
    """Kills the driver while groups are sampled. The kernel must kill all processes of the driver, and --resume must continue the run."""
    run.wait_for_step()
    run.wait_for(run.sandboxes, "open sandboxes", poll_s=0.01)
    sandboxes = len(run.sandboxes())
    os.kill(run.pid, signal.SIGKILL)
    code = run.wait_for_end()
    return _resumed(run, f"signal {-code} ended the driver while {sandboxes} sandboxes were open")


def disk_full(run: Subject) -> Injected:
    """Fills the disk of the run folder. The run must pause, and continue when there is free space."""
    run.wait_for_step()
    filler = fill(run.run_dir.parent)
    try:
        free, size = os.statvfs(run.run_dir).f_bavail, run.output_size()

        def paused() -> bool:
            fill(run.run_dir.parent)  # repeated, because the run removes old versions
            return f"paused: the disk of {run.run_dir} is full" in run.output(size)

        run.wait_for(paused, "the pause")
        if running := run.processes(SERVER) + run.processes(RANK):
            raise ChaosError(f"the paused run still has the processes {running}")
    finally:
        filler.unlink()
    began, steps = time.monotonic(), run.steps_done()
    run.wait_for(lambda: run.steps_done() > steps or run.exit_code == 0, "a step after the pause")
    if "Traceback" in run.output(size):
        raise ChaosError(f"the run printed a traceback when it paused: {run.last_output()}")
    return Injected(witness=f"the disk had {free} free blocks; the run paused, then continued", recovered_s=time.monotonic() - began)


def fill(folder: Path) -> Path:
    """Writes or extends a file until it occupies all free space on the folder's disk. Returns its path."""
    path = folder / "filler"
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for block in (1 << 20, 4096):
            try:
                while True:
                    os.write(handle, bytes(block))
            except OSError:
                pass
    finally:
        os.close(handle)
    return path


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a file system of 1,400 MiB at a folder. Yields whether it was mounted, which requires root."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_MIB}m", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _resumed(run: Subject, witness: str) -> Injected:
    """Resumes a run that has stopped, and waits until it completes a step."""
    _expect_nothing_left(run)
    began, steps = time.monotonic(), run.steps_done()
    run.start()
    run.wait_for(lambda: run.steps_done() > steps or run.exit_code == 0, "a step of the resumed run")
    return Injected(witness=f"{witness}; --resume continued", recovered_s=time.monotonic() - began)


def _expect_nothing_left(run: Subject) -> None:
    """Raises `ChaosError` if a process outlives the driver by more than a minute."""
    deadline = time.monotonic() + 60.0
    while left := run.left():
        if time.monotonic() > deadline:
            raise ChaosError(f"processes outlive the driver: {left}")
        time.sleep(0.05)
