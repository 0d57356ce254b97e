"""Every error agentrl raises on purpose. A user error names the fix; an infrastructure error names the part that failed.

The hierarchy has two branches that matter to callers: `UserError` (something the person can change: exit code 2) and
`InfrastructureError` (a machine, process or network fault: retried, never scored). Both also inherit a standard-library
type, so code that knows nothing of agentrl can still catch them.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Base of every error raised on purpose by agentrl."""


class UserError(AgentRLError, ValueError):
    """Wrong input: says what is wrong (`message`) and what to do about it (`fix`)."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message if not fix else f"{message}\n  fix: {fix}")
        self.message = message
        self.fix = fix


class RecipeError(UserError):
    """A recipe or an override that does not validate; the message names the key and the allowed values."""


class RunFolderBusy(UserError):
    """Another process drives this run folder."""


class PluginError(UserError):
    """A reference such as `module:attr` or `./file.py:attr` that does not resolve."""


class TaskError(UserError):
    """A task that is wrong in itself (missing file, bad limit, gold solution that fails). Blame: task."""


class InfrastructureError(AgentRLError, RuntimeError):
    """A fault of a machine, process or network. Never becomes a reward."""


class SandboxError(InfrastructureError):
    """The sandbox or its daemon failed, as opposed to the program that ran in it."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox layer itself gave no answer before its deadline (a slow program is an `ExecResult`, not an error)."""


class SandboxUnavailable(UserError):
    """No sandbox backend can be used on this machine. There is no fallback to the host."""


class ServingError(InfrastructureError):
    """The inference server died, refused or gave a malformed answer."""


class SwapError(ServingError):
    """A weight swap that did not finish or whose logprob probe disagrees; the old version keeps serving."""


class LearnerError(InfrastructureError):
    """The learner process ended or cannot go on."""


class LearnerHalted(LearnerError):
    """The learner stopped on purpose, by a limit of the recipe: starting it again would only stop it again."""


class VerifierError(InfrastructureError):
    """A verifier raised or gave something that is not a `Score`. The episode is left out, not scored 0."""


class StoreError(InfrastructureError):
    """The experience store or version registry is unreadable, full or inconsistent."""


class DiskFull(InfrastructureError):
    """There is no room left on a disk that the run writes to. Nothing that starts again would find more."""
