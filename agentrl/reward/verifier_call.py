"""Calls one verifier. Whatever the verifier does, its caller gets a score, or a reason for a missing score, before the deadline."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.base import user_code
from agentrl.base.error_text import raise_location
from agentrl.base.outages import outage_of
from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Score, Task, Trajectory

log = logging.getLogger(__name__)

MAX_EVIDENCE = 20_000
"""Maximum length of a verifier's evidence, in characters."""
MAX_PARTS = 1000
_MAX_FILE = 20_000  # bytes of an output that are searched for text repeated in an error
_CLOSING_S = 30.0  # time for a verifier to close its sandboxes after its deadline


class InvalidScore(Exception):
    """A verifier returned something that is not a valid score."""


class VerifierTimeout(InfrastructureError):
    """A verifier's server or subprocess did not answer in time, or was killed. The cause is a fault or the text of the episode."""


class MissingTaskData(KeyError):
    """A verifier read a key of `Task.data` that does not exist, usually the truth of a hand-made task."""


class _Data(dict[str, Any]):
    """`Task.data` with its own error for missing keys, which separates them from a verifier's mistakes with other mappings."""

    def __missing__(self, key: str) -> Any:
        raise MissingTaskData(key)


def with_checked_data(task: Task) -> Task:
    """A copy of the task for a verifier: `task.data[key]` raises `MissingTaskData`, a KeyError, for a missing key."""
    if isinstance(task.data, _Data):
        return task
    seen = copy.copy(task)
    object.__setattr__(seen, "data", _Data(task.data))
    return seen


def missing_data_error(task: Task, error: BaseException, reader: str) -> TaskError | None:
    """The error for a task without a key that `reader` reads; None if the cause of `error` is something else."""
    if (lack := user_code.first_cause(error, MissingTaskData)) is None:
        return None
    key = user_code.printable(repr(lack.args[0]), 80)
    return TaskError(
        f"task {task.id}: data has no {key}, which {reader} reads",
        fix="add the key (a captured task has no truth of its own), or use a verifier that needs no truth",
    )


async def call_verifier(
    verifier: Any, what: str, task: Task, episode: Episode, sandboxes: SandboxBackend | None, *, timeout_s: float
) -> Score:
    """Returns the verifier's score, validated and clipped to its bounds; if the verifier fails, a score without a value and with a reason.

    The blame is the policy's if the text of the episode may have caused the failure; the caller must check that.

    Args:
        what: the verifier's name in the log, such as "verifier rewards.tables:exact_answer".

    Raises:
        InfrastructureError: the verifier raised it, or reported an outage (`agentrl.base.outages`). The caller retries.
        Late: the outage is a server that did not answer in time, or a killed subprocess of the verifier; the episode may be the cause.
    """
    grace_s = _CLOSING_S if needs_sandboxes(verifier) else user_code.GRACE_S
    since = user_code.cancellation_count()
    try:
        seen = with_checked_data(task)
        given = await user_code.call_user_code(
            lambda: _call(verifier, seen, episode, sandboxes), what=what, timeout_s=timeout_s, grace_s=grace_s
        )
        return validate_score(given, [len(trajectory.turns) for trajectory in episode.trajectories], bounds=bounds_of(verifier))
    except user_code.CallTimeout as error:
        user_code.log_unexpected(what, error, trace=False)
        return Score(value=None, reason=f"verifier returned no score within {timeout_s:g} s", blame=Blame.POLICY)
    except InvalidScore as error:
        user_code.log_unexpected(what, error, trace=False)
        return Score(value=None, reason=f"verifier returned {user_code.error_text(error, 500)}", blame=Blame.POLICY)
    except BaseException as error:  # user code may raise anything
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or user_code.cancellation_count() > since:
            raise
        if (fault := user_code.first_cause(error, InfrastructureError)) is not None:
            raise fault from None
        if (broken := user_code.first_cause(error, TaskError) or missing_data_error(task, error, what)) is not None:
            log.warning("%s: %s", what, broken)
            return Score(value=None, reason=user_code.error_text(broken), blame=Blame.TASK)
        if (down := outage_of(error, said=episode_texts(episode))) is not None:
            kind = VerifierTimeout if down.late else InfrastructureError
            raise kind(f"{what} reported an outage: {down.text}") from error
        user_code.log_unexpected(what, error)
        return Score(value=None, reason=f"verifier raised {user_code.describe_error(error, 2000)}", blame=Blame.POLICY)


def episode_texts(episode: Episode) -> list[Any]:
    """The texts of an episode that a verifier's error message may repeat."""
    messages = [turn.message for trajectory in episode.trajectories for turn in trajectory.turns]
    calls = [call.arguments for message in messages for call in message.tool_calls]
    files = [content[:_MAX_FILE].decode(errors="replace") for content in episode.outputs.values()]
    return [episode.answer or "", *(message.content for message in messages), *calls, *files]


CONTROL_ANSWERS = (None, "", "0")
"""Control answers: every working verifier can score them."""


def control_episode(episode: Episode, answer: str | None) -> Episode:
    """A control episode: the same task, but the agent only submitted `answer`."""
    nothing = (Trajectory(agent="main", turns=(), stop_reason="answered"),)
    return Episode(id=f"{episode.id}.control", task_id=episode.task_id, task_key=episode.task_key, trajectories=nothing, answer=answer)


async def _call(verifier: Any, task: Task, episode: Episode, sandboxes: SandboxBackend | None) -> Any:
    if not needs_sandboxes(verifier):
        return await verifier(task, episode)
    assert sandboxes is not None, "checked by the caller"
    return await verifier(task, episode, sandboxes)


def validate_score(given: object, turns: Sequence[int], *, bounds: tuple[float, float] | None = None) -> Score:
    """Returns the score with its texts truncated. Raises `InvalidScore` if it is invalid.

    Args:
        turns: number of turns of each trajectory.
        bounds: smallest and largest valid value.
    """
    if not isinstance(given, Score):
        raise InvalidScore(f"{type(given).__name__}, not a Score")
    numbers = (given.value or 0.0, *given.parts.values(), *(turn for line in given.turn_rewards for turn in line))
    numbers += tuple(said for said in (*given.branches, *given.without) if said is not None)
    if (odd := next((number for number in numbers if not math.isfinite(number)), None)) is not None:
        raise InvalidScore(f"{odd} instead of a finite number")
    if bounds is not None and given.value is not None and not bounds[0] <= given.value <= bounds[1]:
        raise InvalidScore(f"{given.value:g}, outside its bounds {bounds[0]:g} to {bounds[1]:g}")
    if len(given.parts) > MAX_PARTS:
        raise InvalidScore(f"{len(given.parts)} parts, more than {MAX_PARTS}")
    if given.turn_rewards and [len(line) for line in given.turn_rewards] != list(turns):
        raise InvalidScore(f"turn rewards that do not match the episode's turns {list(turns)}")
    if {len(given.branches), len(given.without)} - {0, len(turns)}:
        raise InvalidScore(f"branches or without that do not match the episode's {len(turns)} trajectories")
    return replace(given, evidence=given.evidence[:MAX_EVIDENCE], reason=given.reason[:2000])


def needs_sandboxes(verifier: object) -> bool:
    """Whether the verifier takes a sandbox backend as a third argument."""
    return bool(getattr(verifier, "needs_sandboxes", False))


def timeout_of(verifier: object, default_s: float) -> float:
    """The deadline of a verifier in seconds: its own `timeout_s` if it has one (`PreparedVerifier`), else `default_s`."""
    said = getattr(verifier, "timeout_s", None)
    return float(said) if isinstance(said, int | float) and 0 < said < math.inf else default_s


def prepare_verifier(verifier: object, *, root: Path, folder: Path | None) -> None:
    """Calls `prepare` of a `PreparedVerifier`. Raises `UserError` if the verifier cannot be used, also if it tries to exit the process."""
    if (ready := getattr(verifier, "prepare", None)) is None:
        return
    try:
        ready(root=root, folder=folder)
    except (SystemExit, KeyboardInterrupt) as error:
        if user_code.is_interrupt(error):
            raise
        raise PluginError(
            f"prepare() of verifier {type(verifier).__name__} raised {user_code.describe_error(error)} ({raise_location(error)})",
            fix="raise agentrl.errors.UserError there, with a fix",
        ) from error


def bounds_of(verifier: object) -> tuple[float, float] | None:
    """The smallest and largest value that a verifier declares; None means any finite value."""
    low, high = getattr(verifier, "bounds", None) or (None, None)
    return None if low is None or high is None else (float(low), float(high))
