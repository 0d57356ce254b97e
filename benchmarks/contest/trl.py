"""The peer's run: starts a worker with TRL's GRPOTrainer and evaluates its weights with the same command as agentrl's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.base.files import read_json_lines
from agentrl.config import Recipe
from agentrl.errors import InfrastructureError, UserError
from benchmarks.contest.evaluation import evaluated, tail
from benchmarks.contest.outcome import Outcome, Point
from benchmarks.contest.setting import ROOT, Setting
from benchmarks.contest.watch import Progress, Watched, poll, running

_POLL_S = 0.5

OPTIONS: dict[str, Any] = {
    "threads": 2,
    "micro_batch": 32,
    "gradient_checkpointing": False,
    "cache": "",
    "continuous_batching": False,
    "vllm": False,
    "rollouts": "environment",
}
"""Defaults of the TRL settings that `--peer` can change. `micro_batch` 0: a whole step at once."""

ROLLOUTS = ("environment", "together")
"""How several turns are run: by TRL, or by `benchmarks.contest.together`, which runs the calls of all episodes concurrently."""


def rollouts_of(side: str) -> str:
    """The value of `rollouts` for one of `outcome.SIDES`."""
    return "together" if side == "trl-together" else "environment"


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
OTHERS: tuple[dict[str, Any], ...] = (
    {"threads": 1},
    {"gradient_checkpointing": True},
    {"cache": "static"},
    {"continuous_batching": True},
    {"vllm": True},
)
"""Settings that are timed with the fastest micro-batch."""
_TUNING_GROUPS = 4  # groups of a tuning step, few so that it is short


def options_of(items: list[str]) -> dict[str, Any]:
    """Returns `OPTIONS` with `KEY=VALUE` overrides. Raises `UserError`."""
    options = dict(OPTIONS)
    for item in items:
        key, sep, value = item.partition("=")
        if not sep or key not in OPTIONS:
            raise UserError(f"--peer {item}: unknown setting", fix=f"use one of {', '.join(OPTIONS)} as KEY=VALUE")
        try:
            parsed = json.loads(value) if not isinstance(OPTIONS[key], str) else value
        except ValueError:
            parsed = None
        if type(parsed) is not type(OPTIONS[key]):
            raise UserError(
                f"--peer {item}: {value!r} is not of type {type(OPTIONS[key]).__name__}",
                fix=f"use a value such as {key}={json.dumps(OPTIONS[key])}",
            )
        options[key] = parsed
    if options["rollouts"] not in ROLLOUTS:
        raise UserError(f"--peer rollouts={options['rollouts']}: unknown value", fix=f"use {' or '.join(ROLLOUTS)}")
    return options


def check_options(setting: Setting, options: dict[str, Any]) -> None:
    """Raises `UserError` for a micro-batch that does not divide a step."""
    rollout = setting.build_recipe(seed=0).rollout
    episodes = rollout.group.size * rollout.groups_per_step
    if options["micro_batch"] and episodes % options["micro_batch"]:
        raise UserError(f"micro_batch={options['micro_batch']} does not divide the {episodes} episodes of a step", fix="choose a divisor")


_NO_STEP = {"step": 0, "sampled": 0, "trained": 0, "episodes": 0, "faults": 0, "parts": {}}


@dataclass
class Followed:
    """The events that the worker has reported so far, and the replies to it."""

    work: Path
    setting: Setting
    curve: list[Point] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    paused_s: float = 0.0
    _read: int = 0

    def clock(self, watched: Watched) -> float:
        """Seconds of training. Between two steps the worker's clock is slightly behind, by the time that writing the weights takes."""
        return watched.elapsed_s - self.paused_s

    def arrived(self) -> Point | None:
        return next(
            (point for point in self.curve if point.value >= self.setting.target and point.clock_s <= self.setting.minutes * 60), None
        )

    def news(self) -> list[dict[str, Any]]:
        path = self.work / "events.jsonl"
        events: list[dict[str, Any]] = read_json_lines(path) if path.exists() else []
        fresh, self._read = events[self._read :], len(events)
        return [event for event in fresh if event["event"] == "step"]


def run(side: str, setting: Setting, seed: int, work: Path, progress: Progress, options: dict[str, Any]) -> Outcome:
    """Runs the peer. A run without a step within its time is also a result. Raises `InfrastructureError` if the run fails."""
    setting.build_recipe(seed)
    followed = Followed(work, setting)
    with started(setting, seed, work, options, every=setting.every) as watched:

        def step() -> bool:
            for event in followed.news():
                followed.last = event
                if event["asks"]:
                    _evaluate(followed, watched, seed, event, progress)
            at = followed.last.get("step", 0)
            success = f"success {followed.curve[-1].value:.2f} at step {followed.curve[-1].step}" if followed.curve else "not yet evaluated"
            progress.show(followed.clock(watched), f"step {at}, {success}")
            return followed.arrived() is not None or followed.clock(watched) > setting.minutes * 60

        poll(watched, _POLL_S, step)
        clock_s, ended_by_itself = followed.clock(watched), watched.ended()
        watched.finish(grace_s=5.0)
    if ended_by_itself and (watched.process.returncode != 0 or not followed.last):
        raise InfrastructureError(
            f"the peer's run of seed {seed} ended with exit code {watched.process.returncode}: {tail(work / 'worker.log', 20)}"
        )
    return _outcome(side, followed, seed, clock_s, ended_by_itself=ended_by_itself, peak_gib=watched.peak_bytes / 2**30)


def started(setting: Setting, seed: int, work: Path, options: dict[str, Any], *, every: int, more: tuple[str, ...] = ()) -> Any:
    """The worker, as a context (see `watch.running`)."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    job = {"recipe": setting.recipe, "arguments": [*setting.arguments(seed), *more], "every": every, "options": options}
    (work / "job.json").write_text(json.dumps(job, indent=1))
    command = [sys.executable, "-m", "benchmarks.contest.trl_worker", str(work)]
    return running(command, log=work / "worker.log", root=ROOT, stdin=subprocess.PIPE)


def _evaluate(followed: Followed, watched: Watched, seed: int, event: dict[str, Any], progress: Progress) -> None:
    """Evaluates the weights of the waiting worker, then lets it continue or stops it."""
    began = watched.elapsed_s
    step, clock_s = int(event["step"]), float(event["clock_s"])
    progress.say(f"evaluating step {step}, {clock_s / 60:.1f} min of training")
    point = evaluated(followed.setting, seed, followed.work / "weights", followed.work, step=step, clock_s=clock_s)
    followed.curve.append(point)
    followed.paused_s += watched.elapsed_s - began
    progress.say(f"success {point.value:.2f} [{point.ci_low:.2f}, {point.ci_high:.2f}] at step {step}")
    stdin = watched.process.stdin
    assert stdin is not None, "the worker was started with a pipe"
    try:
        stdin.write(b"stop\n" if followed.arrived() else b"go\n")
        stdin.flush()
    except BrokenPipeError:
        return  # the worker has ended; its exit status gives the reason


def _outcome(side: str, followed: Followed, seed: int, clock_s: float, *, ended_by_itself: bool, peak_gib: float) -> Outcome:
    setting, last = followed.setting, followed.last or _NO_STEP
    step = int(last["step"])
    after = followed.curve[-1] if followed.curve and followed.curve[-1].step == step else None
    if after is None and step:
        after = evaluated(setting, seed, followed.work / "weights", followed.work, step=step, clock_s=float(last["clock_s"]))
        followed.curve.append(after)
    arrived = followed.arrived()  # also with the last weights, because the last step may not be an evaluation step
    return Outcome(
        side=side,
        seed=seed,
        ended="arrived" if arrived else "steps" if ended_by_itself else "time",
        arrived_s=arrived.clock_s if arrived else None,
        clock_s=arrived.clock_s if arrived else float(last["clock_s"]) if ended_by_itself else clock_s,
        steps=step,
        curve=tuple(followed.curve),
        after=after,
        tokens_sampled=last["sampled"],
        tokens_trained=last["trained"],
        episodes=last["episodes"],
        faults=last["faults"],
        peak_gib=peak_gib,
        parts=last["parts"],
    )


def tune(setting: Setting, seed: int, base: dict[str, Any], work: Path, *, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Times the peer's settings on small steps without waits: each micro-batch, then `OTHERS` with the fastest.

    Returns:
        `base` with the fastest settings, and every attempt with its seconds. An attempt that fails has its reason.

    Raises:
        InfrastructureError: no micro-batch completed a step.
    """
    recipe = setting.build_recipe(seed)
    more = small_steps(recipe, steps)
    episodes = min(_TUNING_GROUPS, recipe.rollout.groups_per_step) * recipe.rollout.group.size
    quick = replace(setting, wait=(0.0, 0.0))
    attempts: list[dict[str, Any]] = []

    def fastest(changes: Iterable[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        first = len(attempts)
        for change in changes:
            attempts.append(_try(quick, seed, options, change, work / f"try-{len(attempts)}", more))
            print(json.dumps(attempts[-1]), file=sys.stderr, flush=True)
        timed = [attempt for attempt in attempts[first:] if attempt["seconds_a_step"] is not None]
        return min(timed, key=lambda attempt: float(attempt["seconds_a_step"]), default={"change": {}, "seconds_a_step": None})

    best = fastest(({"micro_batch": size} for size in MICRO_BATCHES if episodes % size == 0), base)
    if best["seconds_a_step"] is None:
        raise InfrastructureError(f"no micro-batch of the peer completed a step: {attempts[-1].get('failed')}")
    options = {**base, **best["change"]}
    other = fastest((change for change in OTHERS if any(options[key] != value for key, value in change.items())), options)
    if other["seconds_a_step"] is not None and other["seconds_a_step"] < best["seconds_a_step"]:
        options |= other["change"]
    return options, attempts


def small_steps(recipe: Recipe, steps: int) -> tuple[str, ...]:
    """Overrides of `recipe` for `tune`. TRL weights no tasks, and a recipe of one step may not."""
    groups = min(_TUNING_GROUPS, recipe.rollout.groups_per_step)
    return (f"steps={steps}", f"rollout.groups_per_step={groups}", "evaluation.every=0", "tasks.weighting=false")


def _try(
    setting: Setting, seed: int, options: dict[str, Any], change: dict[str, Any], folder: Path, more: tuple[str, ...]
) -> dict[str, Any]:
    """Seconds of a step with one setting of the peer changed."""
    late = False
    with started(setting, seed, folder, {**options, **change}, every=0, more=more) as watched:
        try:
            watched.process.wait(setting.minutes * 60)
        except subprocess.TimeoutExpired:
            late = True
            watched.finish(grace_s=5.0)
    events = read_json_lines(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    steps = [event for event in events if event["event"] == "step"]
    parts = steps[-1]["parts"] if steps else {}
    seconds = (sum(parts.values()) - parts["start"]) / len(steps) if steps else None
    result = {"change": change, "steps": len(steps), "seconds_a_step": seconds, "parts": parts, "peak_gib": watched.peak_bytes / 2**30}
    if late or not steps:
        lines = [line for line in tail(folder / "worker.log").splitlines() if line.strip()]
        result["failed"] = f"no step in {setting.minutes:g} min" if late else (lines or ["no log"])[-1][:200]
    return result
