"""Sandboxes on this machine: ours beside `docker run` and `docker exec`, in one run, with medians and ratios.

    python benchmarks/sandbox.py [--repeat 20] [--parallel 8] [--crowd 200] [--row 1000] [--image sandboxes/tables]

Each operation is timed alone; the backends and their peers take turns, so that a busy machine slows all of them alike. Then
`--parallel` sandboxes at a time are opened, used once and closed. CPU time is the whole machine's: close other programs.

`--crowd N` holds N sandboxes open at once, each of which runs a snippet in its turn, three times over. `--row N` opens and closes
N, and then counts what is left of them: processes, containers, folders, control groups, mounts, and this process's descriptors.
Both are left out when 0, their default; the exit status is 1 when one fails or leaves anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import BubblewrapBackend, DockerBackend, WarmPool, cgroups, list_open, select_backend
from agentrl.sandbox.images import load_image
from agentrl.sandbox.lease import lease

CODE = "import csv, json\nprint(sum(range(100)))"
OPEN_S = 120.0
EXEC_S = 30.0

Operation = Callable[[], Awaitable[float]]


async def timed(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def command(*argv: str) -> float:
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
    seconds = await timed(asyncio.wait_for(process.wait(), OPEN_S))
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with status {process.returncode}")
    return seconds


async def cold_open(backend: DockerBackend | BubblewrapBackend, spec: SandboxSpec) -> float:
    """Opens a sandbox and closes it; only the opening is timed."""
    start = time.perf_counter()
    sandbox = await backend.open(spec, timeout_s=OPEN_S)
    seconds = time.perf_counter() - start
    await sandbox.close()
    return seconds


async def warm_open(pool: WarmPool, spec: SandboxSpec, pause_s: float) -> float:
    """Takes a ready sandbox; the pool then has time to refill."""
    start = time.perf_counter()
    sandbox = await pool.open(spec, files={"a.csv": b"x\n1\n"}, timeout_s=OPEN_S)
    seconds = time.perf_counter() - start
    await sandbox.close()
    await asyncio.sleep(pause_s)
    return seconds


async def single_operations(backend: DockerBackend | BubblewrapBackend, spec: SandboxSpec, repeat: int) -> dict[str, list[float]]:
    """Seconds of each operation of `backend`, `repeat` times."""
    cold = [await cold_open(backend, spec) for _ in range(repeat)]
    sandbox = await backend.open(spec, timeout_s=OPEN_S)
    true = [await timed(sandbox.exec(["true"], timeout_s=EXEC_S)) for _ in range(repeat)]
    python = [await timed(sandbox.exec(["python3", "-I", "-c", CODE], timeout_s=EXEC_S)) for _ in range(repeat)]
    snippet = [await timed(sandbox.python(CODE, timeout_s=EXEC_S)) for _ in range(repeat)]
    await sandbox.close()
    pool = WarmPool(backend, warm=4)
    await pool.prepare(spec)
    await asyncio.sleep(2.0)
    warm = [await warm_open(pool, spec, 3 * statistics.median(cold)) for _ in range(repeat)]
    return {"open, cold": cold, "open, warm": warm, "exec true": true, "exec python3 -c": python, "python snippet": snippet}


async def docker_cli(tag: str, repeat: int) -> dict[str, list[float]]:
    """Seconds of the same operations through the docker command, with Docker's own defaults."""
    run = [await command("docker", "run", "--rm", "--network=none", tag, "true") for _ in range(repeat)]
    name = f"agentrl-benchmark-{os.getpid()}"
    await command("docker", "run", "--rm", "--detach", "--network=none", "--name", name, tag, "sleep", "600")
    try:
        true = [await command("docker", "exec", name, "true") for _ in range(repeat)]
        python = [await command("docker", "exec", name, "python3", "-I", "-c", CODE) for _ in range(repeat)]
    finally:
        await command("docker", "rm", "--force", name)
    return {"open, cold": run, "open, warm": run, "exec true": true, "exec python3 -c": python, "python snippet": python}


async def many(backend: DockerBackend | BubblewrapBackend, spec: SandboxSpec, count: int, parallel: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds of the whole machine) per sandbox opened, used once and closed."""
    slots = asyncio.Semaphore(parallel)

    async def one() -> None:
        async with slots:
            sandbox = await backend.open(spec, timeout_s=OPEN_S)
            await sandbox.python(CODE, timeout_s=EXEC_S)
            await sandbox.close()

    busy, start = machine_cpu_s(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    wall = time.perf_counter() - start
    await asyncio.sleep(1.0)  # what the daemon clears up afterwards counts too
    return wall / count, (machine_cpu_s() - busy) / count


async def crowd(backend: DockerBackend | BubblewrapBackend, spec: SandboxSpec, count: int) -> tuple[float, list[float]]:
    """(seconds to open `count` sandboxes, seconds of each snippet): all stay open while each runs three, one after the other."""
    sandboxes: list[Sandbox] = []
    start = time.perf_counter()
    try:
        for opened in await asyncio.gather(
            *(backend.open(spec, timeout_s=OPEN_S + 2.0 * count) for _ in range(count)), return_exceptions=True
        ):
            if isinstance(opened, BaseException):
                raise opened
            sandboxes.append(opened)
        opening = time.perf_counter() - start
        return opening, [await answered(sandbox, number) for _ in range(3) for number, sandbox in enumerate(sandboxes)]
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def answered(sandbox: Sandbox, number: int) -> float:
    start = time.perf_counter()
    result = await sandbox.python(f"print({number} * 7)", timeout_s=EXEC_S)
    if result.stdout != f"{number * 7}\n":
        raise SystemExit(f"sandbox {number} answers {result}")
    return time.perf_counter() - start


async def row(backend: DockerBackend | BubblewrapBackend, spec: SandboxSpec, count: int, parallel: int) -> tuple[float, dict[str, int]]:
    """(wall seconds a sandbox, what is left) of `count` sandboxes opened, used and closed, `parallel` at a time."""
    await many(backend, spec, 2 * parallel, parallel)  # connections to the daemon are opened once and kept
    await settled(backend.name)
    before = held()
    wall, _ = await many(backend, spec, count, parallel)
    await settled(backend.name)
    left = {name: number - before[name] for name, number in held().items()}
    return wall, {name: number for name, number in left.items() if number > 0}


async def settled(name: str, timeout_s: float = 30.0) -> None:
    """Gives the daemon time to take away what it removes by itself."""
    deadline = time.monotonic() + timeout_s
    while any(lease() in sandbox.name for sandbox in list_open()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)


def held() -> dict[str, int]:
    """What exists now that sandboxes could leave behind."""
    hierarchy = cgroups.find()
    return {
        "sandboxes": sum(lease() in sandbox.name for sandbox in list_open()),
        "processes": sum(lease() in mounts for mounts in seen_mounts()),
        "control groups": sum(lease() in name for name in hierarchy.names()) if hierarchy is not None else 0,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def seen_mounts() -> Iterator[str]:
    """What each process of the machine sees mounted: those of a sandbox of ours see files from its runtime folder."""
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def machine_cpu_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def show(name: str, ours: dict[str, list[float]], peer: dict[str, list[float]] | None) -> None:
    for operation, seconds in ours.items():
        line = f"{name:11} {operation:16} {1e3 * statistics.median(seconds):8.1f} ms"
        if peer is not None:
            theirs = statistics.median(peer[operation])
            line += f"   docker CLI {1e3 * theirs:8.1f} ms   ratio {theirs / statistics.median(seconds):6.1f}"
        print(line, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=0, metavar="N", help="hold N sandboxes open at once")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="open and close N sandboxes, and count what is left")
    parser.add_argument("--backend", choices=["docker", "bubblewrap"], action="append", help="may be repeated; default: both")
    parser.add_argument("--image", default="sandboxes/tables")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="project root that --image is relative to")
    options = parser.parse_args()
    spec = SandboxSpec(image=options.image)
    peer = None
    failed = False
    for name in options.backend or ("docker", "bubblewrap"):
        try:
            backend = select_backend(name, run_label="benchmark", root=options.root, progress=print)
        except SandboxUnavailable as error:
            print(f"{name}: left out: {error}")
            continue
        try:
            await backend.prepare(spec)
            if options.repeat:
                if name == "docker":
                    peer = await docker_cli(load_image(options.root / options.image).tag, options.repeat)
                show(name, await single_operations(backend, spec, options.repeat), peer)
                wall, cpu = await many(backend, spec, 4 * options.parallel, options.parallel)
                print(
                    f"{name:11} {options.parallel} at once: {1e3 * wall:.0f} ms wall, {1e3 * cpu:.0f} ms CPU for each sandbox", flush=True
                )
            if options.crowd:
                opening, seconds = await crowd(backend, spec, options.crowd)
                median, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
                print(
                    f"{name:11} {options.crowd} open at once after {opening:.0f} s; a snippet takes {median:.1f} ms, at most {most:.0f} ms",
                    flush=True,
                )
            if options.row:
                wall, left = await row(backend, spec, options.row, options.parallel)
                print(f"{name:11} {options.row} in a row: {1e3 * wall:.0f} ms each; left over: {left or 'nothing'}", flush=True)
                failed = failed or bool(left)
        finally:
            await backend.close()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    asyncio.run(main())
