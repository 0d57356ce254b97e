"""An exception becomes a `Failure`, with the blame decided once: here."""

from __future__ import annotations

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, SandboxError, ServingError, TaskError, UserError
from agentrl.records import Blame, Failure


def task_fault(error: BaseException, *, turn: int | None = None) -> Failure:
    """A broken task: trying again would not help."""
    return Failure(stage="task", blame=Blame.TASK, kind=_kind(error), message=_message(error), turn=turn)


def failure_from_error(error: BaseException, *, stage: str, turn: int | None = None) -> Failure:
    """The failure for an exception that leaves an episode: a fault of the task or the policy if its type says so, else infrastructure.

    One that is none of ours is a bug, whose traceback is logged; it costs this episode and no other.

    Args:
        stage: what was going on, for an error that does not tell by itself.
    """
    if (found := user_code.first_cause(error, TaskError, PluginError)) is not None:
        return task_fault(found, turn=turn)
    if (said := user_code.first_cause(error, PolicyFault)) is not None and user_code.first_cause(error, InfrastructureError) is None:
        return Failure(stage=stage, blame=Blame.POLICY, kind="not_taken", message=_message(said), turn=turn)
    known = user_code.first_cause(error, InfrastructureError)
    if known is None:
        user_code.log_unexpected(f"episode ({stage})", error)
    elif isinstance(known, SandboxError | ServingError):
        stage = "sandbox" if isinstance(known, SandboxError) else "generate"
    error = known or error
    return infrastructure_fault(stage, _kind(error), _message(error), turn=turn)


def infrastructure_fault(stage: str, kind: str, message: str, *, turn: int | None = None) -> Failure:
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message=message, turn=turn, retryable=True)


def _kind(error: BaseException) -> str:
    return type(error).__name__[:64]


def _message(error: BaseException) -> str:
    return (
        user_code.error_text(error)
        if isinstance(error, UserError | InfrastructureError | PolicyFault)
        else user_code.describe_error(error, 2000)
    )
