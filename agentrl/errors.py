"""The errors that agentrl raises on purpose. A user error names the fix; an infrastructure error names the part that failed.

The hierarchy has two branches that matter to callers: `UserError` (wrong input that the user can correct: exit code 2) and
`InfrastructureError` (a machine, process or network fault: retried, never scored). Both also inherit a standard-library
type, so code without agentrl's classes can still catch them.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of every error raised on purpose by agentrl."""


class UserError(AgentRLError, ValueError):
    """Wrong input: what is wrong (`message`) and what to do about it (`fix`)."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message if not fix else f"{message}\n  fix: {fix}")
        self.message = message
        self.fix = fix


class RecipeError(UserError):
    """An invalid recipe or override; the message names the key and the allowed values."""


class RunFolderBusy(UserError):
    """Another process drives this run folder."""


class PluginError(UserError):
    """A reference such as `module:attr` or `./file.py:attr` that does not resolve."""


class TaskError(UserError):
    """A broken task (missing file, bad limit, gold solution that fails). Blame: task."""


class ScoreRejected(UserError):
    """A late score that the store does not accept. `cause` is `unknown`, `out_of_range`, `expired`, `contradictory` or `finished`."""

    def __init__(self, message: str, *, cause: str, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.cause = cause


class PolicyFault(AgentRLError):
    """A server, a chat template or a tokenizer failed on the policy's text. The episode is scored."""


class InfrastructureError(AgentRLError, RuntimeError):
    """A fault of a machine, process or network. Never becomes a reward."""


class ToolUnavailable(InfrastructureError):
    """An outage of a tool on this machine, an MCP server or what they call, not provoked by the arguments (`agentrl.base.outages`)."""


class SandboxError(InfrastructureError):
    """The sandbox or its daemon failed, not the program that ran in it."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox layer did not answer before its deadline (a program that times out is an `ExecResult`, not an error)."""


class EnvironmentFault(InfrastructureError):
    """An environment raised an exception, did not answer in time, or returned something that is not an observation or a step."""


class EnvironmentCrash(EnvironmentFault):
    """An operation of an environment ended its process, or did not end in time."""


class NeighborCrash(EnvironmentFault):
    """The process of an environment was ended by the environment of another episode."""


class SandboxUnavailable(UserError):
    """No sandbox backend can be used on this machine. There is no fallback to the host."""


class ServingError(InfrastructureError):
    """The inference server died, rejected a request, or returned a malformed answer."""


class ServerDied(ServingError):
    """The inference server died or was replaced before it answered a request."""


class RequestRefused(ServingError):
    """The inference server rejected a request because of its content (status 400, 413 or 422)."""


class SwapError(ServingError):
    """A weight swap did not finish, or its logprob probe disagreed; the old version keeps serving."""


class LearnerError(InfrastructureError):
    """The learner process ended or cannot continue."""


class LearnerHalted(LearnerError):
    """The learner stopped at a limit of the recipe; restarted, it would stop again."""


class JudgeError(InfrastructureError):
    """A judge's endpoint stayed down or rejected the request, or its budget is spent."""


class PromptRefusedError(JudgeError):
    """A judge's endpoint rejected one request, which may be longer than its model's context."""


class LaunchError(InfrastructureError):
    """A host cannot start or end a part of the run, or does not answer."""


class StoreError(InfrastructureError):
    """The experience store or version registry is unreadable, full or inconsistent."""


class GroupTooLarge(StoreError):
    """A compressed group is larger than the transport's limit."""


class DiskFull(InfrastructureError):
    """A disk that the run writes to is full. A restart would not help."""
