"""Calls one verifier, with a deadline. If the verifier fails, the call returns a score with a reason and no value. If a service that the
verifier needs fails, the call raises `InfrastructureError`, and the caller retries the call.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.base import user_code
from agentrl.base.error_text import raise_location
from agentrl.base.outages import outage_of
from agentrl.errors import InfrastructureError, PluginError, TaskError
from agentrl.protocols import SandboxBackend
from agentrl.records import Blame, Episode, Score, Task, Trajectory

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_EVIDENCE = 20_000  # maximum length of a verifier's evidence, in characters
MAX_PARTS = 1000
_MAX_FILE = 20_000  # bytes of an output file that are searched for text that an error repeats
_CLOSING_S = 30.0  # time for a verifier to close its sandboxes after its deadline


class InvalidScore(Exception):
    """A verifier returned something that is not a valid score."""


class VerifierTimeout(InfrastructureError):
    """A verifier's server or subprocess did not respond in time, or was killed. A fault or the text of the episode may be the cause."""


class MissingTaskData(KeyError):
    """A verifier read a key of `Task.data` that does not exist, usually the truth of a hand-written task."""


class _Data(dict[str, Any]):
    """`Task.data` that raises a separate error if a key is missing, to distinguish this case from a missing key in other mappings."""

    def __missing__(self, key: str) -> Any:
        raise MissingTaskData(key)


def with_checked_data(task: Task) -> Task:
    """Returns a copy of the task for a verifier. If a key is missing, `task.data[key]` raises `MissingTaskData`, a KeyError."""
    if isinstance(task.data, _Data):
        return task
    copied = copy.copy(task)
    object.__setattr__(copied, "data", _Data(task.data))
    return copied


def missing_data_error(task: Task, error: BaseException, reader: str) -> TaskError | None:
    """Returns the error for a task that lacks a key that `reader` reads; None if `error` has a different cause."""
    if (missing := user_code.first_cause(error, MissingTaskData)) is None:
        return None
    key = user_code.printable(repr(missing.args[0]), 80)
    return TaskError(
        f"task {task.id}: data has no {key}, which {reader} reads",
        fix="add the key (a captured task has no truth), or use a verifier that needs no truth",
    )


async def call_verifier(
    verifier: Any, what: str, task: Task, episode: Episode, sandboxes: SandboxBackend | None, *, timeout_s: float
) -> Score:
    """Returns the verifier's valid score or, if the verifier fails, a score without a value. Raises the errors of `call_scoring_code`.

    Args:
        what: the verifier's name in the log, such as "verifier rewards.tables:exact_answer".
    """
    with_sandboxes = needs_sandboxes(verifier)
    assert sandboxes is not None or not with_sandboxes, "checked by the caller"
    checked_task = with_checked_data(task)

    def call() -> Awaitable[object]:
        result: Awaitable[object] = verifier(checked_task, episode, *([sandboxes] if with_sandboxes else []))
        return result

    return await call_scoring_code(
        call,
        lambda result: validate_score(result, episode, bounds=bounds_of(verifier)),
        what=what,
        task=task,
        episodes=[episode],
        timeout_s=timeout_s,
        grace_s=_CLOSING_S if with_sandboxes else user_code.GRACE_S,
    )


async def call_scoring_code(
    call: Callable[[], Awaitable[object]],
    validate: Callable[[object], T],
    *,
    what: str,
    task: Task,
    episodes: Sequence[Episode],
    timeout_s: float,
    grace_s: float = user_code.GRACE_S,
) -> T | Score:
    """Calls a verifier or group judge and returns its validated result. If the call fails, returns a score with a reason and no value.

    The failure is blamed on the policy if the text of an episode may have caused it. The caller must check whether the text did cause it.

    Raises:
        InfrastructureError: the called code raised it, or reported an outage (`agentrl.base.outages`). The caller retries.
        VerifierTimeout: the outage is a server that did not respond in time, or a killed subprocess. The text may be the cause.
    """
    role = "group judge" if what.startswith("group judge") else "verifier"
    with user_code.fault_boundary() as fault:
        return validate(await user_code.call_user_code(call, what=what, timeout_s=timeout_s, grace_s=grace_s))
    error = fault.error
    assert error is not None
    if isinstance(error, user_code.CallTimeout | InvalidScore):
        user_code.log_unexpected(what, error, trace=False)
        problem = user_code.error_text(error, 500) if isinstance(error, InvalidScore) else f"no score within {timeout_s:g} s"
        return Score(value=None, reason=f"{role} returned {problem}", blame=Blame.POLICY)
    if (outside := user_code.first_cause(error, InfrastructureError)) is not None:
        raise outside from None
    if (task_fault := user_code.first_cause(error, TaskError) or missing_data_error(task, error, what)) is not None:
        log.warning("%s: %s", what, task_fault)
        return Score(value=None, reason=user_code.error_text(task_fault), blame=Blame.TASK)
    if (outage := outage_of(error, model_text=[text for episode in episodes for text in _episode_texts(episode)])) is not None:
        kind = VerifierTimeout if outage.late else InfrastructureError
        raise kind(f"{what} reported an outage: {outage.text}") from error
    user_code.log_unexpected(what, error)
    return Score(value=None, reason=f"{role} raised {user_code.describe_error(error, 2000)}", blame=Blame.POLICY)


def _episode_texts(episode: Episode) -> list[Any]:
    """Returns the strings of an episode that a verifier's error message may repeat."""
    messages = [turn.message for trajectory in episode.trajectories for turn in trajectory.turns]
    calls = [call.arguments for message in messages for call in message.tool_calls]
    files = [content[:_MAX_FILE].decode(errors="replace") for content in episode.outputs.values()]
    return [episode.answer or "", *(message.content for message in messages), *calls, *files]


CONTROL_ANSWERS = (None, "", "0")  # every working verifier can score these answers


def control_episode(episode: Episode, answer: str | None) -> Episode:
    """Returns a control episode. It has the same task, but the agent only submitted `answer`."""
    nothing = (Trajectory(agent="main", turns=(), stop_reason="answered"),)
    return Episode(id=f"{episode.id}.control", task_id=episode.task_id, task_key=episode.task_key, trajectories=nothing, answer=answer)


def validate_score(score: object, episode: Episode, *, bounds: tuple[float, float] | None = None) -> Score:
    """Returns the score of an episode with long strings truncated. Raises `InvalidScore` if the score is invalid.

    `bounds` are the smallest and the largest valid value.
    """
    if not isinstance(score, Score):
        raise InvalidScore(f"{type(score).__name__}, not a Score")
    numbers = (
        score.value,
        *score.parts.values(),
        *(value for turns in score.turn_rewards for value in turns),
        *score.branches,
        *score.without,
    )
    if (invalid := next((number for number in numbers if number is not None and not math.isfinite(number)), None)) is not None:
        raise InvalidScore(f"{invalid} instead of a finite number")
    if bounds is not None and score.value is not None and not bounds[0] <= score.value <= bounds[1]:
        raise InvalidScore(f"{score.value:g}, outside its bounds {bounds[0]:g} to {bounds[1]:g}")
    if len(score.parts) > MAX_PARTS:
        raise InvalidScore(f"{len(score.parts)} parts, more than {MAX_PARTS}")
    turns = [len(trajectory.turns) for trajectory in episode.trajectories]
    if score.turn_rewards and [len(rewards) for rewards in score.turn_rewards] != turns:
        raise InvalidScore(f"turn rewards that do not match the episode's turns {turns}")
    if {len(score.branches), len(score.without)} - {0, len(turns)}:
        raise InvalidScore(f"values of branches or without that do not match the episode's {len(turns)} trajectories")
    return replace(score, evidence=score.evidence[:MAX_EVIDENCE], reason=score.reason[:2000])


def needs_sandboxes(verifier: object) -> bool:
    """Whether the verifier accepts a sandbox backend as a third argument."""
    return bool(getattr(verifier, "needs_sandboxes", False))


def timeout_of(verifier: object, default_s: float) -> float:
    """Returns the deadline of a verifier in seconds: its `timeout_s` if positive and finite (`PreparedVerifier`), otherwise `default_s`."""
    declared = getattr(verifier, "timeout_s", None)
    return float(declared) if isinstance(declared, int | float) and 0 < declared < math.inf else default_s


def prepare_verifier(verifier: object, *, root: Path, folder: Path | None) -> None:
    """Calls the `prepare` method of a `PreparedVerifier`, which raises `UserError` if the verifier cannot be used. Raises `PluginError` if
    the method tries to exit the process."""
    if (method := getattr(verifier, "prepare", None)) is None:
        return
    with user_code.raising_as(
        lambda error: PluginError(
            f"prepare() of verifier {type(verifier).__name__} raised {user_code.describe_error(error)} ({raise_location(error)})",
            fix="raise agentrl.errors.UserError there, with a fix",
        ),
        but=(Exception,),
    ):
        method(root=root, folder=folder)


def bounds_of(verifier: object) -> tuple[float, float] | None:
    """Returns the smallest and the largest valid `Score.value` from the verifier's attribute `bounds`. Returns None if the attribute or one
    of its values is missing; every finite value is then valid."""
    low, high = getattr(verifier, "bounds", None) or (None, None)
    return None if low is None or high is None else (float(low), float(high))
