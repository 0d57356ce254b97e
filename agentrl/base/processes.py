"""Settings of a process (exit with the parent, limits, garbage collection, OpenMP), and what `proc(5)` reports about processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
COLLECT_EVERY_S = 300.0
_NEVER = 2**31 - 1
_SPINS = 20_000  # checks of a flag, which take a fraction of a millisecond


@functools.cache
def boot_id() -> str:
    """Returns the first eight characters of the id that the kernel draws at each boot. Raises `OSError` if the file cannot be read."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process as soon as process `parent`, which started it, is gone (`prctl(2)`).

    Linux only; no effect elsewhere. The kernel watches the thread that started this process, so start the process from a thread that lives
    at least as long as the process. A forked process does not inherit this setting. Raises `OSError` if the kernel rejects the request.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before the request took effect
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def deadline_alarm(limit_s: float, raised: Callable[[], BaseException], *, cpu: bool = False) -> Iterator[None]:
    """Raises the exception that `raised` returns if the block takes more than `limit_s` seconds of real time, or of CPU time if `cpu` is
    True.

    Python runs signal handlers in the main thread, between two operations, so a block in any other thread has no limit. Blocks with the
    same kind of limit cannot be nested, because the end of the inner block also stops the outer timer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise raised()

    number, timer = (signal.SIGVTALRM, signal.ITIMER_VIRTUAL) if cpu else (signal.SIGALRM, signal.ITIMER_REAL)
    before = signal.signal(number, stop)
    signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before or signal.SIG_DFL)


def kill_marked(name: str, value: str) -> int:
    """Kills the processes of this user, except this process, that were started with the environment variable `name` set to `value`. Returns
    the number of signals sent; a process that exits slowly counts more than once.

    Programs inherit the variable in any session or process group, so this also finds daemons. Linux only; kills none on other systems.
    """
    wanted, killed = f"{name}={value}".encode(), 0
    for _ in range(8):  # repeated, because processes may start others meanwhile
        pids: list[int] = []
        with contextlib.suppress(OSError):  # no file descriptor is free
            pids = [pid for pid in _processes() if wanted in _environment(pid)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if not pids:
            break
    return killed


def process_tree(root: int) -> dict[int, str]:
    """Returns the ids of a process and of all processes below it, each with its state letter from `proc(5)`, such as R, S, D, Z or T
    (stopped).

    Linux only; empty on other systems, and if there is no such process. Raises `OSError` under the same condition as `read_stat`.
    """
    stats = {pid: read_stat(pid) for pid in [*_processes(), os.getpid()]}
    below: dict[int, list[int]] = {}
    for pid, one in stats.items():
        below.setdefault(one.parent, []).append(pid)
    tree = [root] if stats.get(root, GONE).state else []
    for pid in tree:
        tree += below.get(pid, ())
    return {pid: state for pid in tree if (state := stats[pid].state)}


def process_group(group: int) -> list[int]:
    """Returns the ids of the processes in a group that have not exited, without this process. Linux only; empty on other systems. Raises
    `OSError` as `read_stat` does."""
    return [pid for pid in _processes() if (stat := read_stat(pid)).group == group and not stat.has_ended]


def memory_by_group() -> Counter[int]:
    """Returns the resident bytes of the processes in each process group, without this process. A page that several processes share counts
    for each of them. Linux only. Incomplete if no file descriptor is free."""
    used = Counter[int]()
    with contextlib.suppress(OSError):  # no file descriptor is free
        for stat in map(read_stat, _processes()):
            used[stat.group] += stat.memory
    return used


def available_memory() -> int:
    """Returns the bytes of memory that this container may use; if it has no limit, the bytes of memory of this machine."""
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or contains "max"
            amounts.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(amounts)


class ProcessStat(NamedTuple):
    """What `proc(5)` reports about a process. `started` and the process id together identify a process, because ids are reused."""

    state: str = ""  # empty if it does not exist
    parent: int = 0
    group: int = 0
    started: int = 0  # ticks since boot
    memory: int = 0  # resident bytes

    @property
    def has_ended(self) -> bool:
        """Whether the process no longer runs, because it does not exist or its parent has not read its exit code."""
        return self.state in ("", "Z", "X")


GONE = ProcessStat()


def read_stat(pid: int) -> ProcessStat:
    """Returns what `proc(5)` reports about a process; `GONE` if it does not exist. Linux only.

    Raises `OSError` if no file descriptor is free, because the process may exist even though its file cannot be opened.
    """
    with _absent_files():
        text = Path(f"/proc/{pid}/stat").read_text()
        state, parent, group, *rest = text.rpartition(")")[2].split()  # the program's name, in parentheses, may contain anything
        return ProcessStat(state, int(parent), int(group), int(rest[16]), int(rest[18]) * resource.getpagesize())
    return GONE


def _processes() -> list[int]:
    with _absent_files():
        return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()]
    return []


@contextlib.contextmanager
def _absent_files() -> Iterator[None]:
    """Suppresses `OSError`, unless no file descriptor is free."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise


def _environment(pid: int) -> list[bytes]:
    """Returns the environment of a process at its start; empty if the process belongs to another user or has exited."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def raise_file_limit() -> int:
    """Raises the soft limit on open files to the hard limit, and returns it.

    A driver with thousands of episodes needs a socket for each, but shells usually start programs with a limit of 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def import_environment(folder: Path) -> dict[str, str]:
    """Returns this process's environment, for a Python child that looks for modules in `folder` first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Collects no garbage in the block, and excludes all objects that exist at its end from later collections. Use it around imports.

    Torch and similar libraries create millions of objects and no garbage. Collections took a fifth to a quarter of the import time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.asynccontextmanager
async def rare_collections(every_s: float = COLLECT_EVERY_S) -> AsyncIterator[None]:
    """Runs full garbage collections only every `every_s` seconds in the block, and at its end.

    A full collection stops the event loop, for about half a second with 4,000 episodes in flight. By default, Python starts a full
    collection whenever the number of objects that survived the younger generations has grown by a quarter. In a busy driver this happens
    every few seconds, and more than one turn in a hundred waits for a collection. Younger generations are collected as before, and
    reference counting frees nearly all objects. Objects that exist at the start are examined only at the end.
    """
    first, second, third = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(first, second, _NEVER)
    collecting = asyncio.create_task(_collect_every(every_s))
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(first, second, third)
        gc.unfreeze()
        gc.collect()


async def _collect_every(seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        gc.collect()


def openmp_environment(threads: int, *, alone: bool) -> dict[str, str]:
    """Returns the environment of a process that computes with OpenMP (GNU's or Intel's runtime).

    Args:
        threads: threads per team.
        alone: whether no other process computes at the same time. If True, waiting threads spin briefly before they sleep, because a small
            model causes hundreds of such waits per token. Otherwise they sleep at once, because spinning takes CPU time from other
            processes.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "active" if alone else "passive",
        "GOMP_SPINCOUNT": str(_SPINS if alone else 0),
        "KMP_BLOCKTIME": "1" if alone else "0",  # milliseconds
    }


def process_age_s() -> float:
    """Returns the seconds since this process was started, to a hundredth (`proc(5)`); 0 if there is no /proc."""
    stat = read_stat(os.getpid())
    return 0.0 if stat is GONE else max(time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / os.sysconf("SC_CLK_TCK"), 0.0)
