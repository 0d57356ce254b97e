"""Measures operations on large trees of files, which agents may create: snapshot, restore, collecting outputs, closing the sandbox.

    python benchmarks/sandbox_trees.py [--backend bubblewrap] [--repeat 3] [--image sandboxes/tables]

Each tree is created in a fresh sandbox. A row has its number of names, its depth, and the median seconds of each operation. If an operation
fails, because the working directory is too large for a snapshot, the row has the reason and the time until the error.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from agentrl.errors import SandboxError
from agentrl.protocols import Sandbox
from agentrl.records import SandboxSpec
from agentrl.sandbox import select_backend
from agentrl.task.outputs import collect_outputs

T = TypeVar("T")
MAKE_S, OPEN_S = 120.0, 120.0
DOWN = "import os\nfor _ in range({depth}):\n    os.mkdir('d' * {name})\n    os.chdir('d' * {name})\n"
FILES = "for number in range({names}):\n    open('f%05d' % number, 'w').write('x')\n"
EACH = "import os\nfor number in range({names}):\n    os.makedirs('a%02d/b%02d' % (number % 50, number // 50 % 40), exist_ok=True)\n"
SPREAD = EACH + "    open('a%02d/b%02d/f%05d' % (number % 50, number // 50 % 40, number), 'w').write('x')\n"

TREES = {
    "a few files": FILES.format(names=10),
    "flat, 15,000 files": FILES.format(names=15_000),
    "15,000 files in 2,050 folders": SPREAD.format(names=15_000),
    "10,000 files 60 levels down": DOWN.format(depth=60, name=1) + FILES.format(names=10_000),
    "10,000 files 60 levels down, long names": DOWN.format(depth=60, name=60) + FILES.format(names=10_000),
    "100 files 60 levels down, longest names": DOWN.format(depth=60, name=255) + FILES.format(names=100),
    "5,000 levels": DOWN.format(depth=5_000, name=100),
    "18,000 levels of one letter": DOWN.format(depth=18_000, name=1),
    "20,400 links": "import os\nfor number in range(20_400): os.symlink('x', 'l%05d' % number)",
}


async def timed(work: Awaitable[T]) -> tuple[float, T | None, str]:
    """Returns the seconds, the result, and the reason if there is no result."""
    start = time.perf_counter()
    try:
        result: T | None = await work
    except (ValueError, SandboxError) as error:
        return time.perf_counter() - start, None, f"{type(error).__name__}: {error}"
    return time.perf_counter() - start, result, ""


async def measure_tree(name: str, program: str, options: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Measures one tree: the seconds of each operation, or the reason for its failure."""
    spec = SandboxSpec(image=options.image, memory_mb=512)
    backend = select_backend(options.backend, run_label="benchmark", root=Path(__file__).resolve().parent.parent)
    took: dict[str, tuple[float, str]] = {}
    try:
        sandbox: Sandbox = await backend.open(spec, timeout_s=OPEN_S)
        created = await sandbox.python(program, timeout_s=MAKE_S)
        if not created.ok:
            raise SystemExit(f"{name}: {created}")
        seconds, archive, refused = await timed(sandbox.snapshot())
        took["snapshot"] = seconds, refused or f"{len(archive or b'') / 1e6:.1f} MB"
        if archive is not None:
            seconds, copy, refused = await timed(backend.open(spec, snapshot=archive, timeout_s=OPEN_S))
            took["open"] = seconds, refused
            if copy is not None:
                await copy.close()
        seconds, collected, refused = await timed(collect_outputs(sandbox, ("**",)))
        problem = next(iter(collected.refused.values()), "") if collected else ""
        took["collect"] = seconds, refused or f"{len(collected.files) if collected else 0} files; {problem[:60]}"
        seconds, _, refused = await timed(sandbox.close())
        took["close"] = seconds, refused
    finally:
        await backend.close()
    return took


async def measure(options: argparse.Namespace) -> None:
    print("| tree | snapshot | open from it | collect | close |\n| --- | --- | --- | --- | --- |", flush=True)
    for name, program in TREES.items():
        rounds = [await measure_tree(name, program, options) for _ in range(options.repeat)]
        cells = []
        for step in ("snapshot", "open", "collect", "close"):
            times = [took[step] for took in rounds if step in took]
            note = times[-1][1] if times else ""
            cells.append(f"{statistics.median(seconds for seconds, _ in times):.2f} s{f' ({note[:120]})' if note else ''}" if times else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="bubblewrap", choices=("bubblewrap", "docker"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--image", default="sandboxes/tables")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
