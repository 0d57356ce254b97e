"""Asking one verifier: whatever it does, there is a score, or a reason for having none, before its deadline."""

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
"""Characters kept of a verifier's evidence."""
MAX_PARTS = 1000
_MAX_FILE = 20_000  # bytes of an output that are searched for words that an error repeats
_CLOSING_S = 30.0  # for a verifier to close its sandboxes at its deadline


class InvalidScore(Exception):
    """A verifier returned something that is not a valid score."""


class VerifierTimeout(InfrastructureError):
    """What a verifier asked gave no answer in time, or was killed: by a fault, or because of what an episode says."""


class MissingTaskData(KeyError):
    """A verifier asked a task's `data` for a key that it does not have: the truth of a task that somebody put together without one."""


class _Data(dict[str, Any]):
    """A task's `data`, whose lacks are told from a verifier's own mistakes with other mappings."""

    def __missing__(self, key: str) -> Any:
        raise MissingTaskData(key)


def with_checked_data(task: Task) -> Task:
    """The same task, as a verifier gets it: `task.data[key]` of a key that is not there raises `MissingTaskData`, which is a KeyError."""
    if isinstance(task.data, _Data):
        return task
    seen = copy.copy(task)
    object.__setattr__(seen, "data", _Data(task.data))
    return seen


def missing_data_error(task: Task, error: BaseException, reader: str) -> TaskError | None:
    """What is wrong with a task that lacks what `reader` reads; None where something else went wrong."""
    if (lack := user_code.first_cause(error, MissingTaskData)) is None:
        return None
    key = user_code.printable(repr(lack.args[0]), 80)
    return TaskError(
        f"task {task.id}: data has no {key}, which {reader} reads",
        fix="put it there: a task that was captured brings no truth of its own; or name a verifier that needs none",
    )


async def call_verifier(
    verifier: Any, what: str, task: Task, episode: Episode, sandboxes: SandboxBackend | None, *, timeout_s: float
) -> Score:
    """The verifier's score, checked and clipped to its bounds; without a value and with a reason if the verifier fails. The blame is the
    policy's if the episode's text may have made the verifier fail; the caller must check that.

    Args:
        what: the verifier's name in the log, such as "verifier rewards.tables:exact_answer".

    Raises:
        InfrastructureError: the verifier raised it, or reported an outage (`agentrl.base.outages`); the caller retries.
        Late: the outage is a server that did not answer in time, or a killed program of the verifier, which the episode may have caused.
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
        return Score(value=None, reason=f"verifier gave no score within {timeout_s:g} s", blame=Blame.POLICY)
    except InvalidScore as error:
        user_code.log_unexpected(what, error, trace=False)
        return Score(value=None, reason=f"verifier gave {user_code.error_text(error, 500)}", blame=Blame.POLICY)
    except BaseException as error:  # user code may raise anything; the episode is then unscored
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
    """What a verifier may repeat of an episode in the text of its errors."""
    messages = [turn.message for trajectory in episode.trajectories for turn in trajectory.turns]
    calls = [call.arguments for message in messages for call in message.tool_calls]
    files = [content[:_MAX_FILE].decode(errors="replace") for content in episode.outputs.values()]
    return [episode.answer or "", *(message.content for message in messages), *calls, *files]


CONTROL_ANSWERS = (None, "", "0")
"""Answers that every working verifier can score."""


def control_episode(episode: Episode, answer: str | None) -> Episode:
    """The episode as if its agent had only submitted `answer`."""
    nothing = (Trajectory(agent="main", turns=(), stop_reason="answered"),)
    return Episode(id=f"{episode.id}.control", task_id=episode.task_id, task_key=episode.task_key, trajectories=nothing, answer=answer)


async def _call(verifier: Any, task: Task, episode: Episode, sandboxes: SandboxBackend | None) -> Any:
    if not needs_sandboxes(verifier):
        return await verifier(task, episode)
    assert sandboxes is not None, "checked by the caller"
    return await verifier(task, episode, sandboxes)


def validate_score(given: object, turns: Sequence[int], *, bounds: tuple[float, float] | None = None) -> Score:
    """The score, cut to its bounds. Raises `InvalidScore`.

    Args:
        turns: number of turns of each trajectory.
        bounds: least and largest value that is one.
    """
    if not isinstance(given, Score):
        raise InvalidScore(f"{type(given).__name__}, not a Score")
    numbers = (given.value or 0.0, *given.parts.values(), *(turn for line in given.turn_rewards for turn in line))
    numbers += tuple(said for said in (*given.branches, *given.without) if said is not None)
    if (odd := next((number for number in numbers if not math.isfinite(number)), None)) is not None:
        raise InvalidScore(f"{odd} for a number")
    if bounds is not None and given.value is not None and not bounds[0] <= given.value <= bounds[1]:
        raise InvalidScore(f"{given.value:g}, and its values go from {bounds[0]:g} to {bounds[1]:g}")
    if len(given.parts) > MAX_PARTS:
        raise InvalidScore(f"{len(given.parts)} parts, at most {MAX_PARTS} are kept")
    if given.turn_rewards and [len(line) for line in given.turn_rewards] != list(turns):
        raise InvalidScore(f"turn rewards that do not fit the episode's turns {list(turns)}")
    if {len(given.branches), len(given.without)} - {0, len(turns)}:
        raise InvalidScore(f"branches or without that do not fit the episode's {len(turns)} trajectories")
    return replace(given, evidence=given.evidence[:MAX_EVIDENCE], reason=given.reason[:2000])


def needs_sandboxes(verifier: object) -> bool:
    return bool(getattr(verifier, "needs_sandboxes", False))


def timeout_of(verifier: object, default_s: float) -> float:
    """Seconds that a verifier may take: what it says itself (`PreparedVerifier.timeout_s`), as one does that waits for a server."""
    said = getattr(verifier, "timeout_s", None)
    return float(said) if isinstance(said, int | float) and 0 < said < math.inf else default_s


def prepare_verifier(verifier: object, *, root: Path, folder: Path | None) -> None:
    """Prepares a `PreparedVerifier`; nothing for any other. Raises `UserError` where it refuses to be used, or would end the command."""
    if (ready := getattr(verifier, "prepare", None)) is None:
        return
    try:
        ready(root=root, folder=folder)
    except (SystemExit, KeyboardInterrupt) as error:
        if user_code.is_interrupt(error):
            raise
        raise PluginError(
            f"prepare() of verifier {type(verifier).__name__} raised {user_code.describe_error(error)} ({raise_location(error)})",
            fix="raise agentrl.errors.UserError there, with what to do",
        ) from error


def bounds_of(verifier: object) -> tuple[float, float] | None:
    """The least and the largest value that a verifier says it gives; None: it says nothing, and any finite value is one."""
    low, high = getattr(verifier, "bounds", None) or (None, None)
    return None if low is None or high is None else (float(low), float(high))
