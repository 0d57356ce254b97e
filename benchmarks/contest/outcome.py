"""What one run came to, as the JSON that is kept beside the docs: made once, read ever after."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentrl.errors import UserError
from agentrl.files import write

SIDES = ("ours", "trl", "trl-together")
"""Ours, TRL as it ships, and TRL with a rollout function of ours (`benchmarks.contest.together`)."""
PARTS = ("start", "rollout", "wait", "score", "update", "sync", "evaluation", "other")
"""Where a side's seconds go; docs/peers.md says what is counted where."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation: held-out success after so many steps, `clock_s` seconds of training after the command was given."""

    step: int
    clock_s: float
    value: float
    ci_low: float
    ci_high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one side. `arrived_s` is None for one that did not come to the target."""

    side: str  # of `SIDES`
    seed: int
    setting: dict[str, Any]
    command: str
    ended: str  # arrived | time | steps | failed
    arrived_s: float | None
    clock_s: float  # of training, when it ended
    steps: int
    curve: tuple[Point, ...]
    after: Point | None  # `agentrl eval` of the model it left; None: it left none
    tokens_sampled: int
    tokens_trained: int
    episodes: int
    faults: int  # episodes left out, or answered with a fault of the machinery
    peak_gib: float
    parts: dict[str, float]  # of `PARTS`, seconds
    settings: dict[str, Any] = field(default_factory=dict)  # of the peer
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def best(self) -> Point | None:
        return max(self.curve, key=lambda point: point.value, default=None)


def path_of(folder: Path, name: str, side: str, seed: int) -> Path:
    return folder / f"{name}-{side}-seed{seed}.json"


def save(outcome: Outcome, folder: Path, name: str) -> Path:
    """Writes it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, name, outcome.side, outcome.seed)
    write(path, json.dumps(asdict(outcome), indent=1) + "\n")
    return path


def load(path: Path) -> Outcome:
    """Raises `UserError` for a file that holds no outcome."""
    try:
        data = json.loads(path.read_text())
        curve = tuple(Point(**point) for point in data.pop("curve"))
        after = data.pop("after")
        return Outcome(**data, curve=curve, after=Point(**after) if after else None)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no result of this benchmark: {error}", fix="delete it, and run the benchmark again") from error


def all_in(folder: Path) -> list[Outcome]:
    return [load(path) for path in sorted(folder.glob("*-seed*.json"))]


def missing(folder: Path, name: str, setting: dict[str, Any], side: str, seed: int) -> bool:
    """Whether a run is still to be made: there is none, or one that more minutes might have brought to the target.

    Raises `UserError` when it was made with another setting under the same name. Minutes are a bound: a run that arrived within
    them is the same run under any larger one.
    """
    path = path_of(folder, name, side, seed)
    if not path.exists():
        return True
    one = load(path)
    made, minutes = one.setting, float(setting["minutes"])
    bounds = {"minutes"} if one.arrived_s is None or one.arrived_s <= minutes * 60 else set()
    if differing := sorted(key for key in made.keys() | setting.keys() if key not in bounds and made.get(key) != setting.get(key)):
        told = ", ".join(f"{key} {made.get(key)!r} there, {setting.get(key)!r} now" for key in differing)
        raise UserError(f"{path} was made with another setting: {told}", fix="use that setting, another --out, or --again")
    return one.ended == "time" and minutes > float(made["minutes"])


def with_note(outcome: Outcome, note: str) -> Outcome:
    return replace(outcome, note=note)


def gflops(size: int = 1024, repeat: int = 9) -> float:
    """Billions of float32 operations a second that this machine does right now, in a product of two matrices: the median of `repeat`.

    Machines of one name differ, and a shared one differs from hour to hour. Times of two runs compare where these figures do.
    """
    left, right = np.ones((2, size, size), dtype=np.float32)
    left @ right  # the first one also starts the threads
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / sorted(seconds)[repeat // 2] / 1e9


def machine() -> dict[str, Any]:
    """The machine as it is now: call it while no run goes on."""
    processor = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "processor": processor,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "gflops": round(gflops()),
    }
