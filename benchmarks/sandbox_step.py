"""Compares the sandbox work of one quickstart step with plain Docker commands and with agentrl: wall and CPU seconds, with ratios.

    python benchmarks/sandbox_step.py [--episodes 128] [--parallel 64] [--repeat 3] [--calls 2] [--markdown FILE]

An episode opens a sandbox with its task's files, runs the task's gold program `--calls` times, and closes the sandbox. As many episodes run
concurrently as in the quickstart. The plain contender uses the Docker command: `docker run -d`, `docker cp` for the files, `docker exec ...
python3 -c`, `docker rm -f`. Contenders alternate, so other load slows all of them equally. CPU time is that of the machine, including the
daemon: close other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import platform
import statistics
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentrl.config import TasksConfig
from agentrl.protocols import SandboxBackend
from agentrl.records import SandboxSpec, Split, Task
from agentrl.sandbox import WarmPool, select_backend
from agentrl.sandbox.images import load_image
from agentrl.task import open_family
from benchmarks import stored

TIMEOUT_S = 120.0
Episode = Callable[[Task], Awaitable[None]]
Way = tuple[float, float]  # wall and CPU seconds of one step


def by_hand(tag: str, programs: dict[str, str], calls: int) -> Episode:
    """One episode through the docker command, with limits like those of the task's sandbox."""

    async def run(*argv: str, stdin: bytes | None = None) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL if stdin is None else pipe, stdout=pipe, stderr=pipe
        )
        output, errors = await asyncio.wait_for(process.communicate(stdin), TIMEOUT_S)
        if process.returncode:
            raise SystemExit(f"{' '.join(argv)} ended with status {process.returncode}: {errors.decode(errors='replace')}")
        return output

    async def episode(task: Task) -> None:
        spec = task.sandbox
        limits = [f"--memory={spec.memory_mb}m", f"--pids-limit={spec.processes}", f"--cpus={spec.cpus}", "--network=none"]
        container = (await run("docker", "run", "-d", *limits, "--workdir=/tmp", tag, "sleep", "600")).decode().strip()
        try:
            await run("docker", "cp", "-", f"{container}:/tmp", stdin=archive(task))
            for _ in range(calls):
                await run("docker", "exec", container, "python3", "-I", "-c", programs[task.id])
        finally:
            await run("docker", "rm", "--force", container)

    return episode


def by_agentrl(sandboxes: SandboxBackend, programs: dict[str, str], calls: int) -> Episode:
    async def episode(task: Task) -> None:
        files = {path: text.encode() for path, text in task.files.items()}
        sandbox = await sandboxes.open(task.sandbox, files=files, timeout_s=TIMEOUT_S)
        try:
            for _ in range(calls):
                result = await sandbox.python(programs[task.id], timeout_s=task.limits.tool_timeout_s)
                if not result.ok:
                    raise SystemExit(f"{task.id}: {result}")
        finally:
            await sandbox.close()

    return episode


def archive(task: Task) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in task.files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def one_step(episode: Episode, tasks: list[Task], parallel: int) -> Way:
    slots = asyncio.Semaphore(parallel)

    async def run_task(task: Task) -> None:
        async with slots:
            await episode(task)

    busy, start = machine_cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as running:
        for task in tasks:
            running.create_task(run_task(task))
    wall = time.perf_counter() - start
    await asyncio.sleep(2.0)  # clean-up by the daemon and preparation by the pool count too
    return wall, machine_cpu_s() - busy


def machine_cpu_s() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def table(results: dict[str, list[Way]], options: argparse.Namespace) -> str:
    plain_wall, plain_cpu = (statistics.median(way[part] for way in results["docker command"]) for part in (0, 1))
    lines = [
        f"Command: `python benchmarks/sandbox_step.py --episodes {options.episodes} --parallel {options.parallel} "
        f"--repeat {options.repeat} --calls {options.calls}`. Machine: {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}. Medians of {options.repeat} turns, range in brackets.",
        "",
        "| way | wall s a step | CPU s a step | wall, times faster | CPU, times less |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, ways in results.items():
        walls, cpus = [way[0] for way in ways], [way[1] for way in ways]
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        lines.append(
            f"| {name} | {wall:.1f} [{min(walls):.1f}, {max(walls):.1f}] | {cpu:.1f} [{min(cpus):.1f}, {max(cpus):.1f}] "
            f"| {plain_wall / wall:.1f} | {plain_cpu / cpu:.1f} |"
        )
    return "\n".join(lines) + "\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--calls", type=int, default=2, help="programs that each episode runs")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    root = Path.cwd()
    command = f"python benchmarks/sandbox_step.py --episodes {options.episodes} --parallel {options.parallel} --repeat {options.repeat}"
    origin = stored.origin(command, ["agentrl/sandbox", "benchmarks/sandbox_step.py"])
    family = open_family(TasksConfig(family="sandboxes.tables:Tables"), seed=0)
    tasks = [family.task(Split.TRAIN, index) for index in range(options.episodes)]
    programs = {task.id: family.gold(task) for task in tasks}
    spec: SandboxSpec = tasks[0].sandbox
    backends = {name: select_backend(name, run_label="benchmark", root=root, progress=print) for name in ("docker", "bubblewrap")}
    pools = {f"agentrl, {name}": WarmPool(backend, warm=8, max_open=options.parallel) for name, backend in backends.items()}
    try:
        for pool in pools.values():
            await pool.prepare(spec)
        ways = {"docker command": by_hand(load_image(root / spec.image).tag, programs, options.calls)}
        ways |= {name: by_agentrl(pool, programs, options.calls) for name, pool in pools.items()}
        results: dict[str, list[Way]] = {name: [] for name in ways}
        for _ in range(options.repeat):
            for name, episode in ways.items():
                wall, cpu = await one_step(episode, tasks, options.parallel)
                results[name].append((wall, cpu))
                print(f"{name:20} {wall:6.1f} s wall, {cpu:6.1f} s CPU", flush=True)
    finally:
        for pool in pools.values():
            await pool.close()
    text = table(results, options)
    print("\n" + text)
    if options.markdown:
        options.markdown.write_text(text)
        measured = {name: [stored.summary([way[part] for way in ways]) for part in (0, 1)] for name, ways in results.items()}
        stored.keep("sandbox-step", origin, ways={name: {"wall_s": wall, "cpu_s": cpu} for name, (wall, cpu) in measured.items()})


if __name__ == "__main__":
    asyncio.run(main())
