"""The origin of stored results: command, machine, commit and a hash of the measured code, and whether that code has changed since."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentrl.base.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
LOOP = ("agentrl/agent", "agentrl/learner", "agentrl/model", "agentrl/objective", "agentrl/reward", "agentrl/rollout", "agentrl/run")
LOOP += ("agentrl/sandbox", "agentrl/serving", "agentrl/version", "agentrl/weights")
"""The code that a training run measures."""


def origin(command: str, code: Sequence[str], seeds: Sequence[int] = ()) -> dict[str, Any]:
    """The fields that every stored result has. Call it on the machine that measures, while no measurement runs.

    Args:
        code: files and folders, relative to the repository, that the result measures.
    """
    return {
        "command": command,
        "seeds": list(seeds),
        "machine": machine(),
        "commit": commit(),
        "code": {path: digest(path) for path in code},
    }


def keep(name: str, origin: Mapping[str, Any], **data: Any) -> Path:
    """Writes `docs/results/NAME.json`: the fields of `origin`, and what was measured."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"origin": dict(origin), **data}, indent=1) + "\n")
    return path


def put(page: Path, program: str, text: str) -> None:
    """Replaces the text between the two marks of `benchmarks/PROGRAM.py` in a page. Raises `ValueError` if the page has no marks."""
    begin, end = (f"<!-- made by benchmarks/{program}.py: {mark} -->" for mark in ("begin", "end"))
    before, begun, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"{page} does not contain the marks {begin} and {end}")
    write_atomically(page, f"{before}{begin}\n\n{text}\n\n{end}{after}")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns the number of values, their median and their range."""
    return {"n": len(values), "median": statistics.median(values), "low": min(values), "high": max(values)}


def changed(code: Mapping[str, str]) -> list[str]:
    """Paths whose content is not the content that was measured."""
    return sorted(path for path, measured in code.items() if digest(path) != measured)


def digest(path: str, root: Path = ROOT) -> str:
    """A hash of a file, or of all Python files and prompts below a folder with their names. A missing path has the hash of no files."""
    top = root / path
    files = [top] if top.is_file() else sorted(file for file in top.rglob("*") if file.is_file() and not _generated(file))
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(root).as_posix()}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def commit() -> str:
    """The commit of the working tree, with `+` if tracked files differ from it; empty outside a clone."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def machine() -> dict[str, Any]:
    """The machine and how busy it is now: CPU model, float32 speed, load average of a minute, and cores in use over two seconds."""
    processor = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    cores = os.cpu_count() or 1
    return {
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "processor": processor,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "busy_cores": round(psutil.cpu_percent(interval=2.0) / 100 * cores, 2),
        "load": round(os.getloadavg()[0], 2),
        "gflops": round(gflops()),
    }


def describe_machines(machines: Iterable[Mapping[str, Any]]) -> str:
    """Describes the machines of several runs in a line, with the range of their speed and load. Old results lack speed and load."""
    hosts = list(machines)
    processors = [str(host["processor"]).replace("not recorded", "processor not recorded") for host in hosts]
    pairs = zip(hosts, processors, strict=True)
    names = " and ".join(sorted({f"{host['cores']} cores ({processor}), {host['memory_gib']} GiB" for host, processor in pairs}))
    if not all({"gflops", "busy_cores"} <= host.keys() for host in hosts):
        return f"{names}; speed and load not recorded"
    speeds, busy = [host["gflops"] for host in hosts], [host["busy_cores"] for host in hosts]
    return f"{names}; {span(speeds)} GFLOPS, {span(busy, '.1f')} cores busy with other work before each run"


def span(values: Sequence[float], form: str = "g") -> str:
    """`low to high`, or one number if both print alike."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def boot() -> str:
    """An id that a machine keeps until it restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gflops(size: int = 1024, repeat: int = 9) -> float:
    """Measures billions of float32 operations per second in a product of two matrices: the median of `repeat`.

    Machines with the same CPU name differ, and the speed of a shared machine changes. Times are comparable only if these figures agree.
    """
    left, right = np.ones((2, size, size), dtype=np.float32)
    left @ right  # the first product also starts the threads
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / sorted(seconds)[repeat // 2] / 1e9


def _generated(file: Path) -> bool:
    return "__pycache__" in file.parts or file.suffix in (".pyc", ".so")
