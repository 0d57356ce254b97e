"""Turns exceptions into `Failure` records and decides the blame."""

from __future__ import annotations

from agentrl import usercode
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, SandboxError, ServingError, TaskError, UserError
from agentrl.records import Blame, Failure


def task_fault(error: BaseException, *, turn: int | None = None) -> Failure:
    """Returns the failure of a broken task. A retry would not help."""
    return Failure(stage="task", blame=Blame.TASK, kind=_kind(error), message=_message(error), turn=turn)


def fault(error: BaseException, *, stage: str, turn: int | None = None) -> Failure:
    """Returns the failure for an exception that left an episode. Its type decides the blame: task, policy, or else infrastructure.

    An unknown exception is a bug: its traceback is logged, and it costs only this episode.

    Args:
        stage: stage of the episode, used if the exception does not determine it.
    """
    if (found := usercode.cause(error, TaskError, PluginError)) is not None:
        return task_fault(found, turn=turn)
    if (said := usercode.cause(error, PolicyFault)) is not None and usercode.cause(error, InfrastructureError) is None:
        return Failure(stage=stage, blame=Blame.POLICY, kind="not_taken", message=_message(said), turn=turn)
    known = usercode.cause(error, InfrastructureError)
    if known is None:
        usercode.report(f"episode ({stage})", error)
    elif isinstance(known, SandboxError | ServingError):
        stage = "sandbox" if isinstance(known, SandboxError) else "generate"
    error = known or error
    return infrastructure_fault(stage, _kind(error), _message(error), turn=turn)


def infrastructure_fault(stage: str, kind: str, message: str, *, turn: int | None = None) -> Failure:
    """Returns a retryable failure of the infrastructure."""
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message=message, turn=turn, retryable=True)


def _kind(error: BaseException) -> str:
    return type(error).__name__[:64]


def _message(error: BaseException) -> str:
    return usercode.text_of(error) if isinstance(error, UserError | InfrastructureError | PolicyFault) else usercode.describe(error, 2000)
