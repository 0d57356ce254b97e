"""Results as the tables of docs/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import stored

SHARE, DRIVER_P99_S, KIB, POINTS = 0.2, 0.05, 100.0, 5.0


def page(results: dict[str, Any]) -> tuple[str, bool]:
    """Returns the tables of the measured parts, and whether every figure meets its target."""
    sections = [(name, *part(results[name])) for name, part in _PARTS.items() if name in results]
    texts = [f"{text}\n\nMeasured on {results[name]['machine']}{_noted(results[name]['note'])}.\n" for name, text, _ in sections]
    return "\n".join(texts), all(met for *_, met in sections)


def merge_sections(old: str, new: str) -> str:
    """Returns a page in which new sections replace those with the same heading."""
    sections = {heading: text for part in (old, new) for heading, text in _sections(part)}
    return "\n".join(sections.values())


def _sections(text: str) -> list[tuple[str, str]]:
    parts = [f"### {part.strip()}\n" for part in f"\n{text}".split("\n### ")[1:]]
    return [(part.partition("\n")[0], part) for part in parts]


def _noted(note: str) -> str:
    return f"; {note}" if note else ""


def _turns(result: dict[str, Any]) -> tuple[str, bool]:
    bare = statistics.median(result["bare_ms"])
    sides: dict[str, list[dict[str, float]]] = result["sides"]
    ours = sides["agentrl"]
    rows = [
        "### Cost of a turn",
        "",
        f"Episodes of {result['turns']} turns and {result['tokens']} tokens, {result['episodes']} in each of {len(ours)} repeats; medians"
        " (range). CPU time is the driver's with 16 concurrent episodes. Latency is that of one turn without load, minus the"
        f" {bare:.2f} ms of a bare exchange with the server. Ratios are medians over paired repeats.",
        "",
        "| side | CPU ms a turn | ratio to agentrl | latency ms a turn | ratio to agentrl |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    met = True
    for side, runs in sides.items():
        cpu = [run["cpu_ms"] / own["cpu_ms"] for run, own in zip(runs, ours, strict=True)]
        late = [(run["alone_ms"] - bare) / (own["alone_ms"] - bare) for run, own in zip(runs, ours, strict=True)]
        if side == "verifiers train":
            met = statistics.median(cpu) >= 1 / SHARE and statistics.median(late) >= 1 / SHARE
        rows.append(
            f"| {side} | {_spread([run['cpu_ms'] for run in runs])} | {_spread(cpu, 1)}"
            f" | {_spread([run['alone_ms'] - bare for run in runs])} | {_spread(late, 1)} |"
        )
    rows += ["", f"Target: at most a fifth of the peer's, for exact tokens on both sides. {_reached(met)}"]
    return "\n".join(rows), met


def turn_figures(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the stored figures of the part `turns`: CPU time and latency per turn, and their ratios to agentrl's, by repeat."""
    bare, ours = statistics.median(result["bare_ms"]), result["sides"]["agentrl"]
    sides = {}
    for side, runs in result["sides"].items():
        pairs = list(zip(runs, ours, strict=True))
        sides[side] = {
            "cpu_ms": stored.summary([run["cpu_ms"] for run in runs]),
            "cpu_times": stored.summary([run["cpu_ms"] / own["cpu_ms"] for run, own in pairs]),
            "latency_ms": stored.summary([run["alone_ms"] - bare for run in runs]),
            "latency_times": stored.summary([(run["alone_ms"] - bare) / (own["alone_ms"] - bare) for run, own in pairs]),
        }
    return {"sides": sides, "turns": result["turns"], "episodes": result["episodes"], "tokens": result["tokens"]}


def _in_flight_section(result: dict[str, Any]) -> tuple[str, bool]:
    small_run, large_run = result["runs"]
    low, high = result["delay_s"]
    rows = [
        "### Episodes in flight",
        "",
        f"One process on one core; the server answers after {low:g} to {high:g} s. The driver's latency is the time of a turn, from one"
        " completion to the next, minus the server's time: parsing, the tool, the next prompt, both network transfers, and waiting for"
        " the core. A full garbage collection stops the event loop. A run has one every 5 minutes; the last column is its duration.",
        "",
        "| episodes | turns measured | core in use | driver p50 ms | driver p99 ms | full collection ms |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows += [
        f"| {run['episodes']:,} | {run['turns']:,} | {run['cpu_share']:.0%} | {1000 * run['added_50_s']:.1f}"
        f" | {1000 * run['added_99_s']:.1f} | {1000 * run['collection_s']:.0f} |"
        for run in (small_run, large_run)
    ]
    target_met = large_run["added_99_s"] <= DRIVER_P99_S and large_run["in_flight"] > 0.95 * large_run["episodes"]
    rows += ["", f"Target: at most {1000 * DRIVER_P99_S:.0f} ms at the p99 with {large_run['episodes']:,} episodes. {_reached(target_met)}"]
    return "\n".join(rows), target_met


def _idle(result: dict[str, Any]) -> tuple[str, bool]:
    rows = [
        "### Memory of a waiting episode",
        "",
        f"After {result['after']} turns, with about {result['tokens']} tokens in its context and a request in flight.",
        "",
        "| episodes | memory of the process, MiB |",
        "| ---: | ---: |",
    ]
    rows += [f"| {count:,} | {kib / 1024:.0f} |" for count, kib in zip(result["episodes"], result["rss_kib"], strict=True)]
    met = result["kib_an_episode"] <= KIB
    rows += [
        "",
        f"Target: at most 100 KiB an episode. Measured: {result['kib_an_episode']:.0f} KiB, the slope of this table. {_reached(met)}",
    ]
    return "\n".join(rows), met


def _prefix(result: dict[str, Any]) -> tuple[str, bool]:
    rows, short = [], {}
    for name, row in result["rows"].items():
        total, sizes = row["prompt_tokens"], row["sizes"]
        bound, hit = 1 - row["unique_tokens"] / total, row["hit_tokens"] / total
        short[name] = 100 * (bound - hit)
        tokens = " / ".join(str(sizes[kind]) for kind in ("prompt", "instruction", "told", "said", "shown"))
        cells = (name, tokens, f"{total:,}", f"{row['unique_tokens']:,}", f"{bound:.1%}", f"{hit:.1%}", f"{short[name]:.1f} points")
        rows.append(f"| {' | '.join(cells)} |")
    missed = [name for name, points in short.items() if points > POINTS]
    lines = [
        "### Prompt tokens from the prefix cache",
        "",
        result["workload"],
        "",
        "Sizes are tokens of a task's prompt / sub-agents' instruction / a sub-agent's task / a completion / a tool's output.",
        "",
        "| workload | sizes | prompt tokens | first seen | bound | from the cache | below the bound by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        f"Target: within {POINTS} points of the bound 1 - unique/total. {_reached(not missed)}"
        + (f" Missed by: {', '.join(missed)}." if missed else ""),
    ]
    return "\n".join(lines), not missed


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _reached(met: bool) -> str:
    return "Reached." if met else "Not reached."


_PARTS = {"turns": _turns, "crowd": _in_flight_section, "idle": _idle, "prefix": _prefix}
