"""Measures how the learner steps of a recipe spend their time: runs a few steps, and reads the timeline of the steps to measure.

The run continues until the measured steps are recorded, so that the pipeline is as full as in a long run, and is then stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from agentrl.base.files import read_json_lines
from agentrl.cluster.nsight import NsightSessions
from agentrl.config.recipe import Recipe
from agentrl.errors import InfrastructureError, StoreError
from agentrl.experience import open_store
from agentrl.observe import Summary
from agentrl.observe.timeline import PREFIX, STEP, time_by_state
from agentrl.records import ScoredEpisode
from agentrl.run.loop import train
from agentrl.session.ending import ended_by_user
from agentrl.session.folder import RunStart
from agentrl.session.preflight import PreflightResult

_LOOK_S = 0.1
Line = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How the time of some learner steps was spent, in seconds."""

    recipe: str
    first_step: int
    steps: int
    wall_s: float
    """Wall time of the steps."""
    cpus: int
    start_s: dict[str, float]
    """Stage before the first step -> seconds. They are not included in `wall_s`."""
    busy_at_once: dict[str, float]
    """Parts that were busy at the same time -> seconds. The seconds add up to `wall_s`."""
    parts: dict[str, dict[str, float]]
    """Part -> state -> seconds. For each part, the seconds add up to `wall_s`."""
    learner: dict[str, float]
    """Kind of work in the learner -> seconds. The seconds add up to the time during which the learner ran."""
    cpu_s: dict[str, float]
    """Part -> CPU seconds used by its processes. Together with `idle`, they add up to `cpus` times `wall_s`. Linux only."""
    episode: dict[str, float]
    """Mean seconds per episode. `sampling`, `tools` and `other` add up to `all`, unless several agents of an episode act at the same
    time."""
    figures: dict[str, float]
    """Other metrics: name -> mean over the steps."""

    @classmethod
    def of(cls, recipe: str, lines: Sequence[Line], episodes: Sequence[ScoredEpisode], start_s: Mapping[str, float]) -> Self:
        """Returns the profile of some steps.

        Args:
            lines: the metrics of the steps.
            episodes: the episodes that the steps used.
            start_s: seconds spent in each stage before the first step.

        Raises `StoreError` if there are no steps or a step has no timeline.
        """
        if not lines or not all("step_s" in line for line in lines):
            raise StoreError("the steps have no timeline: the driver ended before it recorded them")
        return cls(
            recipe=recipe,
            first_step=int(lines[0]["step"]),
            steps=len(lines),
            wall_s=sum(line["step_s"] for line in lines),
            cpus=os.cpu_count() or 1,
            start_s=dict(start_s),
            busy_at_once=_sums(lines, f"{PREFIX}{STEP}/"),
            parts=time_by_state([dict(line) for line in lines]),
            learner=_sums(lines, "learner_s/"),
            cpu_s=_sums(lines, "cpu_s/"),
            episode=_episode_times(episodes),
            figures={name: fmean(line[name] for line in lines) for name in _FIGURES if all(name in line for line in lines)},
        )

    def to_data(self) -> dict[str, Any]:
        """Returns the profile as JSON data."""
        return asdict(self)


_FIGURES = ("tokens_per_s", "tokens_sampled", "tokens_trained", "episodes", "update_s", "swap_total_ms", "swap_stall_ms", "loop_lag_ms_p99")


async def profile_steps(
    recipe: Recipe, start: RunStart, checked: PreflightResult, *, root: Path, wanted: range, nsight: NsightSessions | None = None
) -> Profile:
    """Runs a recipe until the `wanted` steps are recorded, stops it, and returns the profile of these steps.

    Args:
        wanted: numbers of the steps, counted from 1; the first must be at least 2.
        nsight: records the `wanted` steps. The launch plan in `checked` must use its method `wrap`.

    Raises `ValueError` if `wanted` is empty or starts before step 2, the errors of `agentrl.run.loop.train`, `InfrastructureError` if the
    run ends before these steps are recorded, and `KeyboardInterrupt` if the user interrupts it.
    """
    if not wanted or wanted[0] < 2:
        raise ValueError(
            f"cannot profile steps {wanted}: give at least one step, and start at step 2 or later, because step 1 starts the pipeline"
        )
    training = asyncio.create_task(train(recipe, start, checked, root=root, console=False))
    try:
        await _recording(training, start.folder, wanted[0] - 1)
        if nsight is not None and not training.done():
            await nsight.start()
        await _recording(training, start.folder, wanted[-1])
        if nsight is not None and not training.done():
            await nsight.stop()
    finally:
        training.cancel()
        await asyncio.wait({training})
    if not training.cancelled() and (error := training.exception()) is not None and not ended_by_user(error):
        raise error
    if not training.cancelled() and training.exception() is None and training.result().interrupted:
        raise KeyboardInterrupt
    lines = _recorded(start.folder)
    if missing := [step for step in wanted if step not in lines]:
        raise InfrastructureError(f"the run ended before step {missing[0]}, so there is nothing to measure")
    episodes = await asyncio.to_thread(_episodes, recipe, start.folder, wanted)
    return Profile.of(recipe.name, [lines[step] for step in wanted], episodes, _before_training(start.folder))


async def _recording(training: asyncio.Task[Any], folder: Path, step: int) -> None:
    """Returns when a step is recorded or the run ends."""
    while not training.done() and step not in _recorded(folder):
        await asyncio.sleep(_LOOK_S)


def _recorded(folder: Path) -> dict[int, Line]:
    lines: list[Any] = []
    with suppress(FileNotFoundError):
        lines = read_json_lines(folder / "metrics.jsonl", "step")
    return {line["step"]: {key: value for key, value in line.items() if value is not None} for line in lines}


def _episodes(recipe: Recipe, folder: Path, steps: range) -> list[ScoredEpisode]:
    """Returns the scored episodes of the groups that the given steps used."""
    store = open_store(folder, recipe)
    try:
        indices = [entry.index for step in steps for entry in store.entries(step=step - 1) if not entry.is_residual]
        return [scored for group in store.groups(indices) for scored in group.scored]
    finally:
        store.close()


def _before_training(folder: Path) -> dict[str, float]:
    with suppress(FileNotFoundError, StoreError):
        return {name: seconds for name, seconds in Summary.read(folder).wall_s.items() if name in ("prepare", "start")}
    return {}


def _sums(lines: Sequence[Line], prefix: str) -> dict[str, float]:
    """Returns the sums of the metrics whose names start with a prefix, the largest first. The prefix is removed from the names."""
    sums: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                sums[name] = sums.get(name, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _episode_times(episodes: Sequence[ScoredEpisode]) -> dict[str, float]:
    """Returns the mean times per episode by kind; empty if there are no episodes."""
    if not episodes:
        return {}
    turns = [[turn for trajectory in scored.episode.trajectories for turn in trajectory.own_turns] for scored in episodes]
    whole = fmean(scored.episode.wall_s for scored in episodes)
    sampling = fmean(sum(turn.generate_s for turn in episode_turns) for episode_turns in turns)
    tools = fmean(sum(turn.tool_s for turn in episode_turns) for episode_turns in turns)
    return {"all": whole, "sampling": sampling, "tools": tools, "other": max(0.0, whole - sampling - tools)}


_WIDTH = 26  # number of characters in a full bar
_NAME = 34  # number of characters in a name


def render_profile(profile: Profile) -> str:
    """Returns the profile as text, in which each table ends with its sum."""
    steps = f"steps {profile.first_step} to {profile.first_step + profile.steps - 1}"
    lines = [f"{profile.recipe}: {steps} took {profile.wall_s:.2f} s of wall time on {profile.cpus} CPUs"]
    lines += [f"before the first step: {name} {seconds:.1f} s" for name, seconds in profile.start_s.items()]
    lines += _table("parts that compute at the same time", profile.busy_at_once, profile.wall_s)
    for part, states in profile.parts.items():
        lines += _table(part, dict(sorted(states.items(), key=lambda item: -item[1])), profile.wall_s)
    lines += _table("work of the learner process", profile.learner, profile.wall_s, rest="not running")
    lines += _table(f"CPU seconds of {profile.cpus} CPUs", profile.cpu_s, profile.cpus * profile.wall_s, rest="not counted")
    if profile.episode:
        times = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in profile.episode.items() if name != "all")
        lines += ["", f"an episode took {profile.episode['all']:.2f} s on average:  {times}"]
    if profile.figures:
        lines += ["", "  ".join(f"{name} {value:,.4g}" for name, value in profile.figures.items())]
    return "\n".join(lines)


def _table(title: str, seconds: Mapping[str, float], whole: float, *, rest: str = "") -> list[str]:
    """Returns the lines of a table, including its sum. `rest`: name of the row for the part of `whole` that the other rows do not cover."""
    if not seconds:
        return []
    rows = dict(seconds)
    if rest and (missing := whole - sum(rows.values())) > 0.005 * whole:
        rows[rest] = missing
    lines = ["", title]
    for name, value in rows.items():
        share = value / whole if whole > 0 else 0.0
        lines.append(f"  {name[:_NAME]:{_NAME}} {value:9.2f} s {share:6.1%}  {'#' * round(share * _WIDTH)}".rstrip())
    return [*lines, f"  {'sum':{_NAME}} {sum(rows.values()):9.2f} s"]
