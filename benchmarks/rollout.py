"""Measures the driver's cost of a turn, its latency with many concurrent episodes, and the memory of a waiting episode.

    python benchmarks/rollout.py --work /tmp/rollout [--repeat 5] [--out docs/results.md]
    python benchmarks/rollout.py --work /tmp/rollout --only turns        # crowd, idle, prefix

turns   CPU time and latency of a turn, compared with the package `verifiers` 0.4. Both use the same scripted model server and tool, and
        alternate. The peer's environment is created in --work on first use (pip).
crowd   The driver's latency with 4,000 and with 100 episodes whose turns wait 10 to 30 s for the server, in one process on one core.
idle    Memory of the process while up to 4,000 episodes wait for their sixth completion.
prefix  Share of prompt tokens that a vLLM server takes from its prefix cache, compared with the share that is common to earlier prompts
        (takes minutes; needs vLLM).

The tool is a function on the host, so no sandbox is measured. Results are stored in docs/results, and every measured value in --work. A
measurement replaces its section of the page. The exit status is 1 if a figure misses its target.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.error_text import clip_text  # noqa: E402
from agentrl.errors import InfrastructureError, UserError  # noqa: E402
from benchmarks import stored  # noqa: E402
from benchmarks.load import script as scripted  # noqa: E402
from benchmarks.load.ours import schema  # noqa: E402
from benchmarks.load.tables import merge_sections, page, turn_figures  # noqa: E402

PARTS = ("turns", "crowd", "idle", "prefix")
PEER = "verifiers==0.4.0"
CODE = ("agentrl/agent", "agentrl/rollout", "agentrl/serving", "agentrl/base/processes.py", "benchmarks/load")
TURNS = 8
CROWD, FEW, DELAY_S, RAMP_S, WINDOW_S = 4000, 100, (10.0, 30.0), 20.0, 30.0
IDLE, IDLE_AFTER = (500, 1000, 2000, 4000), 5


@contextmanager
def serving(folder: Path, *, turns: int = TURNS, core: int | None = None, **delays: Any) -> Iterator[tuple[int, int]]:
    """Starts the scripted server. Returns its port and the number of tokens of an episode."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = scripted.write(folder, scripted.Script.of(turns), schema(), **delays)
    command = [sys.executable, str(ROOT / "benchmarks" / "load" / "server.py"), str(folder / "script.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        try:
            yield int(process.stdout.readline()), tokens
        finally:
            process.stdin.close()


def run_json(command: list[str], *, timeout_s: float = 900.0, **options: Any) -> dict[str, Any]:
    """Runs a side and returns the JSON that it prints. Raises `InfrastructureError` if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    if process.returncode:
        raise InfrastructureError(f"{' '.join(command[:4])} failed:\n{process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def ours(kind: str, port: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load.ours", kind, "--port", str(port), *more]
    return run_json(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def peer_python(work: Path) -> str:
    """Returns the Python of the peer's environment. Creates the environment if it does not exist."""
    folder = work / "peer"
    python = folder / "bin" / "python"
    if not (folder / "whole").exists():
        print(f"installing {PEER} into {folder}", file=sys.stderr)
        for command in ([sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", "-q", PEER]):
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                raise InfrastructureError(f"{' '.join(command)} failed: {clip_text(process.stderr[-1000:])}")
        (folder / "whole").write_text(PEER)
    return str(python)


def turns(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs the sides alternately, each in a separate process. Yields the results after each repeat."""
    python, folder = peer_python(args.work), args.work / "turns"
    amount = ["--turns", str(TURNS), "--episodes", str(args.episodes), "--alone", str(max(1, args.episodes // 8))]
    sides: dict[str, list[dict[str, float]]] = {"agentrl": [], "verifiers train": [], "verifiers eval": []}
    bare: list[float] = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with serving(folder) as (port, tokens):
        for number in range(args.repeat):
            print(f"turns: {number + 1} of {args.repeat}", file=sys.stderr)
            sides["agentrl"].append(ours("turns", port, *amount))
            for client in ("train", "eval"):
                own = ["--script", str(folder / "script.json"), "--tokenizer", str(folder / "tokenizer"), "--client", client]
                command = [python, str(ROOT / "benchmarks" / "load" / "peer.py"), *own, "--port", str(port), *amount]
                sides[f"verifiers {client}"].append(run_json(command, env=environment, cwd=folder))
            bare.append(_bare_ms(port, tokens))
            yield {"sides": sides, "bare_ms": bare, "tokens": tokens, "turns": TURNS, "episodes": args.episodes}


def _bare_ms(port: int, tokens: int) -> float:
    """Returns the time of one exchange with the server, at half the tokens of an episode. It is not overhead of either side."""
    body = json.dumps({"token_ids": [7] * (tokens // 2), "request_id": "r-0"})
    link, took = http.client.HTTPConnection("127.0.0.1", port, timeout=60), []
    for _ in range(100):
        began = time.perf_counter()
        link.request("POST", scripted.GENERATE, body, {"Content-Type": "application/json"})
        link.getresponse().read()
        took.append(time.perf_counter() - began)
    link.close()
    return 1000 * statistics.median(took)


def crowd(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    runs = []
    cores = sorted(os.sched_getaffinity(0))
    for number in (FEW, CROWD):
        print(f"crowd: {number} episodes", file=sys.stderr)
        times = ["--delay", *map(str, DELAY_S), "--ramp", str(RAMP_S), "--window", str(WINDOW_S)]
        with serving(args.work / "crowd", core=cores[-1], delay_s=DELAY_S) as (port, _):
            runs.append(ours("crowd", port, "--episodes", str(number), "--core", str(cores[0]), *times))
    yield {"runs": runs, "delay_s": DELAY_S}


def idle(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    print(f"idle: {', '.join(map(str, IDLE))} episodes", file=sys.stderr)
    with serving(args.work / "idle", delay_s=(86400.0, 86400.0), delay_from=IDLE_AFTER) as (port, tokens):
        result = ours("idle", port, "--episodes", *map(str, IDLE), "--after", str(IDLE_AFTER))
    slope = statistics.linear_regression(result["episodes"], result["rss_kib"]).slope
    yield {**result, "kib_an_episode": slope, "after": IDLE_AFTER, "tokens": tokens * IDLE_AFTER // TURNS}


def prefix(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from benchmarks.load.prefix import measure

    yield measure(args.work / "prefix")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the peer's environment and the results")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"parts to measure: {', '.join(PARTS)}"
    )
    parser.add_argument("--repeat", type=int, default=5, help="repeats of the part turns; each runs both sides")
    parser.add_argument("--episodes", type=int, default=64, help="episodes of the part turns, per repeat and side")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md", help="page to write the tables to")
    parser.add_argument("--note", default="", help="a sentence about the machine, stored with the result")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    results_path = args.work / "results.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.exists() else {}
    machine = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    for part in args.only:
        origin = stored.origin(f"python benchmarks/rollout.py --only {part}", CODE)
        for result in {"turns": turns, "crowd": crowd, "idle": idle, "prefix": prefix}[part](args):
            results[part] = {**result, "machine": f"{machine}; {stored.describe_machines([origin['machine']])}", "note": args.note}
            results_path.write_text(json.dumps(results, indent=1))
            stored.keep(f"rollout-{part}", origin, **(turn_figures(result) if part == "turns" else result))
    text, met = page(results)
    print(text)
    begin, end = "<!-- made by benchmarks/rollout.py: begin -->", "<!-- made by benchmarks/rollout.py: end -->"
    before, _, rest = args.out.read_text().partition(begin)
    old, _, after = rest.partition(end)
    args.out.write_text(f"{before}{begin}\n\n{merge_sections(old, text)}\n{end}{after}")
    return 0 if met else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, InfrastructureError) as error:
        sys.exit(f"error: {error}")
