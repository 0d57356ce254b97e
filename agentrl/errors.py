"""The errors that agentrl raises on purpose. A user error names the fix; an infrastructure error names the part that failed.

The hierarchy has two branches that matter to callers: `UserError` (wrong input that the user can correct: exit code 2) and
`InfrastructureError` (a machine, process or network fault: retried, never scored). `UserError` is also a `ValueError`, and
`InfrastructureError` is also a `RuntimeError`, so code that does not import agentrl can catch them.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of every error raised on purpose by agentrl."""


class UserError(AgentRLError, ValueError):
    """The user's input is wrong: `message` describes the problem, and `fix` tells the user how to correct it."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message if not fix else f"{message}\n  fix: {fix}")
        self.message = message
        self.fix = fix


class RecipeError(UserError):
    """An invalid recipe or override; the message names the key and the allowed values."""


class RunFolderBusy(UserError):
    """Another agentrl process is using the run folder."""


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
    """A server, a chat template or a tokenizer failed on the policy's text.

    The episode is scored, because the policy caused the failure.
    """


class InfrastructureError(AgentRLError, RuntimeError):
    """A machine, process or network failed. The failure is never converted into a reward."""


class ToolUnavailable(InfrastructureError):
    """A tool, an MCP server or a service that they call has an outage that the call's arguments did not cause (`agentrl.base.outages`)."""


class SandboxError(InfrastructureError):
    """The sandbox or its daemon failed, not the program that ran in it."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox layer did not respond before its deadline (a program that times out is an `ExecResult`, not an error)."""


class EnvironmentFault(InfrastructureError):
    """An environment raised an exception, did not respond in time, or returned something that is not an observation or a step."""


class EnvironmentCrash(EnvironmentFault):
    """An operation of an environment terminated the environment's process or did not return before its deadline."""


class NeighborCrash(EnvironmentFault):
    """An environment lost its process because of another episode's environment in the same process."""


class SandboxUnavailable(UserError):
    """No sandbox backend can be used on this machine. There is no fallback to the host."""


class ServingError(InfrastructureError):
    """The inference server died, rejected a request, or returned a malformed response."""


class ServerDied(ServingError):
    """The inference server died or was replaced before it responded to a request."""


class RequestRefused(ServingError):
    """The inference server rejected a request because of its content (status 400, 413 or 422)."""


class SwapError(ServingError):
    """A weight swap failed, or the logprob probe of the new version disagreed; the server keeps serving the old version."""


class LearnerError(InfrastructureError):
    """The learner process exited or cannot continue."""


class LearnerHalted(LearnerError):
    """The learner stopped at a limit of the recipe; a restarted learner would stop again."""


class JudgeError(InfrastructureError):
    """A judge's endpoint stayed unavailable or rejected the request, or the judge's budget is exhausted."""


class PromptRefusedError(JudgeError):
    """A judge's endpoint rejected one request; the prompt may be longer than the context of the judge's model."""


class LaunchError(InfrastructureError):
    """A host cannot start or stop a part of the run, or does not respond."""


class StoreError(InfrastructureError):
    """The experience store or version registry is unreadable, full or inconsistent."""


class GroupTooLarge(StoreError):
    """A compressed group is larger than the transport's limit."""


class DiskFull(InfrastructureError):
    """A disk that the run writes to is full. Restarting the run would not help."""
