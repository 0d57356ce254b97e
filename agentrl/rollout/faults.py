"""Turns exceptions into `Failure` records and decides the blame."""

from __future__ import annotations

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, SandboxError, ServingError, TaskError, UserError
from agentrl.records import Blame, Failure

NOT_TAKEN = "not_taken"
"""`Failure.kind` of an episode that ended because a server, a chat template or a tokenizer rejected the policy's output."""


def task_fault(error: BaseException, *, turn: int | None = None) -> Failure:
    """Returns the failure of a broken task, which is not retryable."""
    return Failure(stage="task", blame=Blame.TASK, kind=_kind(error), message=_message(error), turn=turn)


def failure_from_error(error: BaseException, *, stage: str, turn: int | None = None) -> Failure:
    """Returns the failure for an exception that an episode did not handle. The exception's type decides the blame.

    The blame is the task, the policy or, for all other exceptions, the infrastructure. An unknown exception is a bug: its traceback is
    logged, and only this episode is lost.

    Args:
        stage: the episode's current stage, used if the exception does not determine the stage.
    """
    if (task_error := user_code.first_cause(error, TaskError, PluginError)) is not None:
        return task_fault(task_error, turn=turn)
    if (policy_error := user_code.first_cause(error, PolicyFault)) is not None and user_code.first_cause(
        error, InfrastructureError
    ) is None:
        return Failure(stage=stage, blame=Blame.POLICY, kind=NOT_TAKEN, message=_message(policy_error), turn=turn)
    known = user_code.first_cause(error, InfrastructureError)
    if known is None:
        user_code.log_unexpected(f"episode ({stage})", error)
    elif isinstance(known, SandboxError | ServingError):
        stage = "sandbox" if isinstance(known, SandboxError) else "generate"
    error = known or error
    return infrastructure_fault(stage, _kind(error), _message(error), turn=turn)


def infrastructure_fault(stage: str, kind: str, message: str, *, turn: int | None = None) -> Failure:
    """Returns a retryable infrastructure failure."""
    return Failure(stage=stage, blame=Blame.INFRASTRUCTURE, kind=kind, message=message, turn=turn, retryable=True)


def _kind(error: BaseException) -> str:
    return type(error).__name__[:64]


def _message(error: BaseException) -> str:
    return (
        user_code.error_text(error)
        if isinstance(error, UserError | InfrastructureError | PolicyFault)
        else user_code.describe_error(error, 2000)
    )
