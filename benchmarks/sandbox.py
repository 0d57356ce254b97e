"""Compares agentrl's sandboxes on this machine with `docker run -d` and `docker exec`: medians, spread and ratios.

    python benchmarks/sandbox.py [--repeat 20] [--parallel 8] [--crowd 200] [--row 1000] [--opening] [--markdown FILE] [--image FOLDER]

Each operation is timed alone. Contenders alternate, so other load slows all of them equally. Then `--parallel` sandboxes at a time are
opened, used once and closed. CPU time is that of the machine: close other programs.

`--opening` times 30 openings in a row and 24 at once, backends in turn (p50 and p95). The backend `cell` is a cell on this machine.

`--crowd N` keeps N sandboxes open at once; each runs a snippet three times. `--row N` opens and closes N sandboxes, then counts leftovers:
processes, containers, folders, control groups, mounts, and this process's descriptors. Both are skipped by default (0). The exit status
is 1 if one of them fails or leaves anything. `--markdown FILE` writes all results to a page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import secrets
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import WarmPool, limits, list_open, select_backend
from agentrl.sandbox.backend import ChannelBackend
from agentrl.sandbox.cell import CellBackend
from agentrl.sandbox.images import load_image
from agentrl.sandbox.lease import lease
from agentrl.sandbox.shared_containers import MAX_IDLE
from benchmarks import stored

CODE = "import csv, json\nprint(sum(range(100)))"
OPEN_S = 120.0
EXEC_S = 30.0
SETTLE_S = 0.5
"""Seconds to wait, so that the daemon's clean-up and a refilling pool are not part of the next measurement."""
PEER = "docker CLI"
IN_A_ROW, AT_ONCE = 30, 24

Backend = ChannelBackend
Operation = Callable[[], Awaitable[float]]
OPERATIONS = {
    "open, cold": "docker run -d",
    "open, cold, no network": "docker run -d --network=none",
    "open, from the warm pool": "docker run -d",
    "exec true": "docker exec true",
    "exec true, each of 20 in a row": "docker exec true",
    "exec python3 -c": "docker exec python3 -c",
    "python snippet": "docker exec python3 -c",
    "python session call": "docker exec python3 -c",
}
"""Operation -> the Docker operation that it is compared with."""


@dataclass(slots=True)
class Results:
    """All measurements, in the order in which they were taken."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # operation -> subject -> seconds of each repeat
    lines: list[str] = field(default_factory=list)  # results outside of tables
    failed: bool = False

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


async def timed(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def timed_in_a_row(call: Callable[[], Awaitable[object]], count: int = 20) -> float:
    """Returns the seconds of each call. Calls follow without a pause, so no call uses anything that is prepared in a pause."""
    start = time.perf_counter()
    for _ in range(count):
        await call()
    return (time.perf_counter() - start) / count


async def command(*argv: str) -> float:
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
    seconds = await timed(asyncio.wait_for(process.wait(), OPEN_S))
    if process.returncode:
        raise SystemExit(f"{shlex.join(argv)} ended with status {process.returncode}")
    return seconds


# Subjects -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ours(backend: Backend, spec: SandboxSpec) -> AsyncIterator[Mapping[str, Operation]]:
    """The operations of a backend."""
    sandbox = await backend.open(spec, timeout_s=OPEN_S)
    pool = WarmPool(backend, warm=2)
    await pool.prepare(spec)
    await asyncio.sleep(2.0)

    async def cold() -> float:
        start = time.perf_counter()
        opened = await backend.open(spec, timeout_s=OPEN_S)
        seconds = time.perf_counter() - start
        await opened.close()
        await asyncio.sleep(SETTLE_S)
        return seconds

    async def warm() -> float:
        start = time.perf_counter()
        opened = await pool.open(spec, files={"a.csv": b"x\n1\n"}, timeout_s=OPEN_S)
        seconds = time.perf_counter() - start
        await opened.close()
        await asyncio.sleep(SETTLE_S)
        return seconds

    try:
        await sandbox.python("pass", timeout_s=EXEC_S, session="benchmark")
        yield {
            "open, cold": cold,
            "open, cold, no network": cold,
            "open, from the warm pool": warm,
            "exec true": lambda: timed(sandbox.exec(["true"], timeout_s=EXEC_S)),
            "exec true, each of 20 in a row": lambda: timed_in_a_row(lambda: sandbox.exec(["true"], timeout_s=EXEC_S)),
            "exec python3 -c": lambda: timed(sandbox.exec(["python3", "-I", "-c", CODE], timeout_s=EXEC_S)),
            "python snippet": lambda: timed(sandbox.python(CODE, timeout_s=EXEC_S)),
            "python session call": lambda: timed(sandbox.python(CODE, timeout_s=EXEC_S, session="benchmark")),
        }
    finally:
        await sandbox.close()


@contextlib.asynccontextmanager
async def docker_cli(tag: str) -> AsyncIterator[Mapping[str, Operation]]:
    """The operations through the Docker command, with Docker's defaults and an unmodified container."""
    numbers = itertools.count()

    async def run(*options: str) -> float:
        name = f"agentrl-benchmark-{os.getpid()}-{next(numbers)}"
        try:
            return await command("docker", "run", "--detach", *options, "--name", name, tag, "sleep", "600")
        finally:
            await command("docker", "rm", "--force", name)
            await asyncio.sleep(SETTLE_S)

    async def execute(*argv: str) -> float:
        seconds = await command("docker", "exec", container, *argv)
        await asyncio.sleep(SETTLE_S)
        return seconds

    container = f"agentrl-benchmark-{os.getpid()}"
    await command("docker", "run", "--detach", "--network=none", "--name", container, tag, "sleep", "86400")
    try:
        yield {
            "docker run -d": run,
            "docker run -d --network=none": lambda: run("--network=none"),
            "docker exec true": lambda: execute("true"),
            "docker exec python3 -c": lambda: execute("python3", "-I", "-c", CODE),
        }
    finally:
        await command("docker", "rm", "--force", container)


async def in_turn(subjects: Mapping[str, Mapping[str, Operation]], repeat: int, results: Results) -> None:
    """Times every operation `repeat` times. Contenders alternate."""
    for operation, peer in OPERATIONS.items():
        seconds = results.seconds[operation] = {name: [] for name in subjects}
        for _ in range(repeat):
            for name, operations in subjects.items():
                seconds[name].append(await operations[peer if name == PEER else operation]())
        show(operation, seconds)


def show(operation: str, seconds: Mapping[str, list[float]]) -> None:
    for name, values in seconds.items():
        ratio = f"   ratio {faster(seconds, name):6.1f}" if PEER in seconds and name != PEER else ""
        print(f"{operation:30} {name:11} {1e3 * statistics.median(values):8.1f} ms  {spread(values):>15}{ratio}", flush=True)


def faster(seconds: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(seconds[PEER]) / statistics.median(seconds[name])


def spread(values: list[float]) -> str:
    """Returns the interquartile range in milliseconds."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{1e3 * low:.1f} to {1e3 * high:.1f}"


async def openings(backends: list[Backend], spec: SandboxSpec, results: Results) -> None:
    """Reports the time of openings in a row, in turn, and of as many at once."""
    alone: dict[str, list[float]] = {backend.name: [] for backend in backends}
    together: dict[str, list[float]] = {backend.name: [] for backend in backends}
    for _ in range(IN_A_ROW):
        for backend in backends:
            seconds, sandbox = await opened(backend, spec)
            await sandbox.close()
            alone[backend.name].append(seconds)
    for backend in backends:
        for seconds, sandbox in await asyncio.gather(*(opened(backend, spec) for _ in range(AT_ONCE))):
            together[backend.name].append(seconds)
            await sandbox.close()
    for what, measured in ((f"{IN_A_ROW} in a row", alone), (f"{AT_ONCE} at once", together)):
        for name, values in measured.items():
            p95 = statistics.quantiles(values, n=20)[-1]
            results.say(f"opening {what:13} {name:11} p50 {1e3 * statistics.median(values):7.1f} ms   p95 {1e3 * p95:7.1f} ms")
    results.say(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


async def opened(backend: Backend, spec: SandboxSpec) -> tuple[float, Sandbox]:
    start = time.perf_counter()
    sandbox = await backend.open(spec, timeout_s=OPEN_S)
    return time.perf_counter() - start, sandbox


@contextlib.contextmanager
def own_cell(root: Path) -> Iterator[CellBackend]:
    """A cell in another process of this machine."""
    key = secrets.token_hex(32)
    command = [sys.executable, "-m", "agentrl", "sandbox", "serve", "--listen", "127.0.0.1:0", "--key", "env:CELL_KEY"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "CELL_KEY": key}) as process:
        assert process.stdout is not None
        port = process.stdout.readline().split()[4].strip(":")
        try:
            yield CellBackend(run_label="benchmark", root=root, addresses=[f"127.0.0.1:{port}"], key=key)
        finally:
            process.terminate()


# Many sandboxes -------------------------------------------------------------------------------------------------------


async def many(backend: Backend, spec: SandboxSpec, count: int, parallel: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds of the whole machine) per sandbox opened, used once and closed."""
    slots = asyncio.Semaphore(parallel)

    async def use_sandbox() -> None:
        async with slots:
            sandbox = await backend.open(spec, timeout_s=OPEN_S)
            await sandbox.python(CODE, timeout_s=EXEC_S)
            await sandbox.close()

    busy, start = machine_cpu_s(), time.perf_counter()
    await asyncio.gather(*(use_sandbox() for _ in range(count)))
    wall = time.perf_counter() - start
    await asyncio.sleep(1.0)  # the daemon's clean-up counts too
    return wall / count, (machine_cpu_s() - busy) / count


async def crowd(backend: Backend, spec: SandboxSpec, count: int) -> tuple[float, list[float]]:
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


async def row(backend: Backend, spec: SandboxSpec, count: int, parallel: int) -> tuple[float, dict[str, int]]:
    """(wall seconds a sandbox, what is left) of `count` sandboxes opened, used and closed, `parallel` at a time."""
    await many(backend, spec, 2 * parallel, parallel)  # connections to the daemon are opened once and reused
    await settled(backend.name)
    before = count_resources()
    wall, _ = await many(backend, spec, count, parallel)
    await settled(backend.name)
    leftovers = {name: number - before[name] for name, number in count_resources().items()}
    return wall, {name: number for name, number in leftovers.items() if number > 0}


async def settled(name: str, timeout_s: float = 30.0) -> None:
    """Waits until the daemon has removed what it removes asynchronously."""
    deadline = time.monotonic() + timeout_s
    while ours_open() and time.monotonic() < deadline:
        await asyncio.sleep(0.2)


def ours_open() -> set[str]:
    """Returns the names of this process's sandboxes, without containers that are kept for later sandboxes."""
    return {sandbox.name for sandbox in list_open() if lease() in sandbox.name and sandbox.backend != "container"}


def count_resources() -> dict[str, int]:
    """Counts all resources of this machine that a sandbox could leave behind."""
    control_groups = limits.find_control_groups()
    shared = {sandbox.name for sandbox in list_open() if lease() in sandbox.name} - ours_open()
    return {
        "sandboxes": len(ours_open()),
        "processes": sum(lease() in mounts and not any(f"/{name}" in mounts for name in shared) for mounts in seen_mounts()),
        "containers": max(0, len(shared) - MAX_IDLE),
        "control groups": sum(lease() in name for name in control_groups.names()) if control_groups is not None else 0,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def seen_mounts() -> Iterator[str]:
    """Yields the mounts of each process of the machine. Processes in our sandboxes have files of its runtime folder mounted."""
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            yield path.read_text()


def machine_cpu_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def crowds(backend: Backend, spec: SandboxSpec, options: argparse.Namespace, results: Results) -> None:
    """Measurements of one backend at a time."""
    name = f"{backend.name:10}"
    if options.repeat:
        wall, cpu = await many(backend, spec, 4 * options.parallel, options.parallel)
        results.say(f"{name} {options.parallel} at once: {1e3 * wall:.0f} ms wall, {1e3 * cpu:.0f} ms CPU for each sandbox")
    if options.crowd:
        opening, seconds = await crowd(backend, spec, options.crowd)
        median, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        times = f"a snippet takes {median:.1f} ms, at most {most:.0f} ms"
        results.say(f"{name} {options.crowd} open at once after {opening:.0f} s, none failed; {times}")
    if options.row:
        wall, leftovers = await row(backend, spec, options.row, options.parallel)
        results.say(f"{name} {options.row} in a row: {1e3 * wall:.0f} ms each; left over: {leftovers or 'nothing'}")
        results.failed = results.failed or bool(leftovers)


# The page -------------------------------------------------------------------------------------------------------------


def page(results: Results) -> str:
    """Returns all measurements as Markdown."""
    text = ["# Sandbox measurements", "", f"Created by `python {shlex.join(sys.argv)}` on {machine()}."]
    if results.seconds:
        names = list(next(iter(results.seconds.values())))
        mine = [name for name in names if name != PEER]
        beside = ["compared with", PEER, *(f"{name} is faster by" for name in mine)] if PEER in names else []
        columns = ["operation", *mine, *beside]
        text += ["", "Medians in milliseconds, with the range of the middle half of the repeats.", ""]
        text += ["| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]
        text += ["| " + " | ".join([operation, *cells(operation, seconds)]) + " |" for operation, seconds in results.seconds.items()]
    if results.lines:
        text += ["", *(f"- {' '.join(line.split())}" for line in results.lines)]
    return "\n".join(text) + "\n"


def cells(operation: str, seconds: Mapping[str, list[float]]) -> Iterator[str]:
    mine = [name for name in seconds if name != PEER]
    for name in mine:
        yield f"{1e3 * statistics.median(seconds[name]):.1f} ({spread(seconds[name])})"
    if PEER in seconds:
        yield f"`{OPERATIONS[operation]}`"
        yield f"{1e3 * statistics.median(seconds[PEER]):.1f} ({spread(seconds[PEER])})"
        yield from (f"{faster(seconds, name):.1f}x" for name in mine)


def machine() -> str:
    """Returns one line with the machine and the versions of the programs."""
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    docker = program_version("docker", "version", "--format", "Docker {{.Server.Version}}")
    runtime = program_version("docker", "info", "--format", "{{.DefaultRuntime}}")
    parts = [
        f"{len(os.sched_getaffinity(0))} cores ({model or platform.machine()}), {memory:.0f} GiB",
        f"Linux {platform.release()}",
        f"cgroup {'v2' if Path('/sys/fs/cgroup/cgroup.controllers').exists() else 'v1'}",
        f"{docker} with {runtime}" if docker and runtime else "",
        program_version("bwrap", "--version"),
        f"Python {platform.python_version()}",
    ]
    return ", ".join(filter(None, parts))


def program_version(*argv: str) -> str:
    """Returns the version that a program prints; empty if it is not installed."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=EXEC_S, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=0, metavar="N", help="keep N sandboxes open at once")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="open and close N sandboxes, and count leftovers")
    parser.add_argument("--backend", choices=["docker", "bubblewrap", "cell"], action="append", help="may be repeated; default: all")
    parser.add_argument("--opening", action="store_true", help=f"time {IN_A_ROW} openings in a row and {AT_ONCE} at once")
    parser.add_argument("--image", default="sandboxes/tables")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="project root that --image is relative to")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a page")
    options = parser.parse_args()
    spec, results = SandboxSpec(image=options.image), Results()
    origin = stored.origin(shlex.join(["python", *sys.argv]), ["agentrl/sandbox", "benchmarks/sandbox.py"])
    async with contextlib.AsyncExitStack() as stack:
        backends: list[Backend] = []
        for name in options.backend or ("docker", "bubblewrap", "cell"):
            try:
                if name == "cell":
                    backends.append(stack.enter_context(own_cell(options.root)))
                else:
                    backends.append(select_backend(name, run_label="benchmark", root=options.root, progress=print))
            except SandboxUnavailable as error:
                results.say(f"{name}: excluded: {error}")
                continue
            stack.push_async_callback(backends[-1].close)
            await backends[-1].prepare(spec)
        if options.repeat:
            async with contextlib.AsyncExitStack() as subject_stack:
                subjects = {backend.name: await subject_stack.enter_async_context(ours(backend, spec)) for backend in backends}
                if "docker" in subjects:
                    subjects[PEER] = await subject_stack.enter_async_context(docker_cli(load_image(options.root / options.image).tag))
                await in_turn(subjects, options.repeat, results)
        if options.opening:
            await openings(backends, spec, results)
        for backend in backends:
            await crowds(backend, spec, options, results)
    if options.markdown is not None:
        options.markdown.write_text(page(results), encoding="utf-8")
        measured = {operation: {name: stored.summary(some) for name, some in sides.items()} for operation, sides in results.seconds.items()}
        stored.keep("sandbox", origin, seconds=measured)
    raise SystemExit(1 if results.failed else 0)


if __name__ == "__main__":
    asyncio.run(main())
