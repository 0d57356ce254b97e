"""The figures of README.md, computed from the stored results.

    python -m benchmarks.claims

Prints each figure and the origin of its result: command, seeds, machine and commit, and whether the measured code has changed since.
The exit status is 1 if README.md does not contain one of the computed figures.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.sandbox.attacks import load_attacks
from benchmarks import stored
from benchmarks.contest.comparison import published

README = stored.ROOT / "README.md"
REAL_MODEL = stored.ROOT / "docs" / "a-real-model"
PEERS = stored.ROOT / "docs" / "peers"
_SEEDS = (0, 1, 2)  # of SmolLM2


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Text that README.md must contain, and where its figures come from.

    Args:
        origin: of `benchmarks.stored.origin`; None means that the figure is computed from the code itself.
    """

    text: str
    source: str
    origin: Mapping[str, Any] | None = None

    def state(self) -> str:
        if self.origin is None:
            return "computed from the code"
        older = stored.changed(self.origin["code"])
        return f"OLDER than the code: {', '.join(older)}" if older else "current"


def claims() -> list[Claim]:
    """Returns the claims of all stored results."""
    all_claims = [Claim(text=_attacks(), source="agentrl/sandbox/attacks"), _real_model()]
    for name, text in _TEXTS.items():
        if (path := stored.RESULTS / f"{name}.json").exists():
            result = json.loads(path.read_text())
            all_claims.append(Claim(text=text(result), source=_relative(path), origin=result["origin"]))
    for name, comparison in published(PEERS).items():
        for peer in comparison.sides[1:] if all(run.arrived_s is not None for run in comparison.of("ours")) else ():
            all_claims.append(Claim(text=str(comparison.ratio(peer)), source=f"docs/peers/{name}.json ({peer})", origin=comparison.origin))
    return all_claims


def missing(page: str, some: Sequence[Claim]) -> list[Claim]:
    """Claims whose text a page does not contain."""
    return [claim for claim in some if claim.text not in page]


def _quickstart(result: dict[str, Any]) -> str:
    before, after = ([run[f"heldout_{when}"]["value"] for run in result["runs"]] for when in ("before", "after"))
    minutes = stored.span([round(run["minutes"], 1) for run in result["runs"]], ".1f")
    first, last = _percent(statistics.median(before)), _percent(statistics.median(after))
    return f"held-out success {first} → {last} in {minutes} minutes on two cores (medians of {len(before)} seeds)"


def _real_model() -> Claim:
    runs = [json.loads((REAL_MODEL / f"smollm2-seed{seed}.json").read_text()) for seed in _SEEDS]

    def rates(split: str) -> list[str]:
        values = [[run["phases"][when][split]["value"] for when in ("before", "after")] for run in runs]
        return [f"{_percent(before)} → {_percent(after)}" for before, after in values]

    minutes = [f"{run['wall_s'] / 60:.0f}" for run in runs]
    text = (
        f"held-out success {_list(rates('heldout'))} on three seeds, kinds never trained {_list(rates('heldout_real'))}, "
        f"in {_list(minutes)} minutes on two cores"
    )
    return Claim(text=text, source="docs/a-real-model/smollm2-seed*.json", origin=runs[0].get("origin"))


def _sandbox(result: dict[str, Any]) -> str:
    def times(operation: str) -> float:
        row = result["seconds"][operation]
        return float(row["docker CLI"]["median"] / row["bubblewrap"]["median"])

    warm = 1000 * result["seconds"]["open, from the warm pool"]["bubblewrap"]["median"]
    alone, row = times("exec true"), times("exec true, each of 20 in a row")
    return f"a call {alone:.0f} to {row:.0f} times faster than `docker exec`, and a warm sandbox in {warm:.1f} ms, with bubblewrap"


def _sandbox_step(result: dict[str, Any]) -> str:
    def times(way: str) -> str:
        return f"{result['ways']['docker command']['wall_s']['median'] / result['ways'][way]['wall_s']['median']:.0f}"

    return f"a step's sandboxes {times('agentrl, docker')} times faster with Docker and {times('agentrl, bubblewrap')} with bubblewrap"


def _gate(result: dict[str, Any]) -> str:
    blocked = result["blocked"]
    unchanged = [round(100 * rate, 1) for name, rate in blocked.items() if name.startswith("unchanged")]
    drop = blocked["0.95 -> 0.85 in every case"]
    return (
        f"{result['evaluations']} simulated evaluations of {result['cases']} cases, {result['repeats']} attempts each: a drop from 95% to "
        f"85% is blocked in {drop:.1%} and passes in {1 - drop:.1%}; an unchanged policy is blocked in {stored.span(unchanged)}%"
    )


def _weakness(result: dict[str, Any]) -> str:
    before, after = ([run[phase]["value"] for run in result["runs"]] for phase in ("before", "final"))
    return f"held-out {_percents(before)} → {_percents(after)} on {len(before)} seeds"


def _turns(result: dict[str, Any]) -> str:
    ours, peer = result["sides"]["agentrl"], result["sides"]["verifiers train"]
    times = peer["cpu_times"]
    return (
        f"{ours['cpu_ms']['median']:.2f} ms of CPU a turn; `verifiers` with exact tokens takes {times['median']:.1f} times as much "
        f"({times['low']:.1f} to {times['high']:.1f}, n={times['n']})"
    )


def _idle(result: dict[str, Any]) -> str:
    return f"{result['kib_an_episode']:.0f} KiB for an episode that waits"


def _crowd(result: dict[str, Any]) -> str:
    few, many = result["runs"]
    added = [f"{1000 * run['added_99_s']:.0f} ms" for run in (few, many)]
    return (
        f"the driver adds {added[1]} to the p99 turn of {many['episodes']:,} episodes at once, and {added[0]} to that of {few['episodes']}"
    )


def _learner(result: dict[str, Any]) -> str:
    ratios = []
    for cases in result["models"].values():
        for case in cases:
            pairs = zip(case["seconds"]["TRL GRPOTrainer"], case["seconds"]["agentrl"], strict=True)
            ratios.append(statistics.median(theirs / mine for theirs, mine in pairs))
    return f"TRL's update takes {min(ratios):.1f} to {max(ratios):.1f} times as long, each with its fastest batch"


def _learner_smollm2(result: dict[str, Any]) -> str:
    [[case]] = result["models"].values()
    ratios = [theirs / mine for theirs, mine in zip(case["seconds"]["TRL GRPOTrainer"], case["seconds"]["agentrl"], strict=True)]
    return f"{statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f}, n={len(ratios)}) on a group of SmolLM2-135M"


def _attacks() -> str:
    hundreds = len(load_attacks()) // 100 * 100
    return f"more than {hundreds} attacks"


_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "quickstart": _quickstart,
    "sandbox": _sandbox,
    "sandbox-step": _sandbox_step,
    "gate-50x4": _gate,
    "weakness": _weakness,
    "rollout-turns": _turns,
    "rollout-idle": _idle,
    "rollout-crowd": _crowd,
    "learner": _learner,
    "learner-smollm2": _learner_smollm2,
}
"""Maps the name of a stored result to the function that renders its claim."""


def _percent(value: float) -> str:
    """A rate in percent, rounded to two decimals first, as in docs/."""
    return f"{100 * float(f'{value:.2f}'):.0f}%"


def _percents(values: Sequence[float]) -> str:
    return f"{_percent(min(values))} to {_percent(max(values))}"


def _list(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _relative(path: Path) -> str:
    return path.relative_to(stored.ROOT).as_posix()


def _described(origin: Mapping[str, Any] | None) -> str:
    if origin is None:
        return ""
    machine = origin["machine"]
    speed = f", {machine['gflops']} GFLOPS, {machine['busy_cores']} cores busy" if "gflops" in machine else ""
    seeds = f"; seeds {', '.join(map(str, origin['seeds']))}" if origin["seeds"] else ""
    note = f"\n  {origin['note']}" if origin.get("note") else ""
    return f"\n  {origin['command']}{seeds}; {machine['cores']} cores ({machine['processor']}{speed}); commit {origin['commit']}{note}"


def main() -> int:
    all_claims = claims()
    for claim in all_claims:
        print(f"{claim.text}\n  {claim.source}: {claim.state()}{_described(claim.origin)}")
    absent = missing(README.read_text(), all_claims)
    for claim in absent:
        print(f"README.md does not contain: {claim.text}\n  computed from {claim.source}\n  fix: update README.md", file=sys.stderr)
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
