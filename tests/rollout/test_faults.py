"""The failure for each kind of exception that leaves an episode."""

from __future__ import annotations

import pytest

from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, SandboxError, ServingError, TaskError, UserError
from agentrl.records import Blame
from agentrl.rollout.faults import failure_from_error, infrastructure_fault, task_fault


class Unreachable(InfrastructureError):
    """Of neither the sandboxes nor the server."""


@pytest.mark.parametrize(
    ("error", "stage", "blame", "kind"),
    [
        (ServingError("x"), "generate", Blame.INFRASTRUCTURE, "ServingError"),
        (SandboxError("x"), "sandbox", Blame.INFRASTRUCTURE, "SandboxError"),
        (Unreachable("x"), "tool", Blame.INFRASTRUCTURE, "Unreachable"),
        (KeyError("x"), "tool", Blame.INFRASTRUCTURE, "KeyError"),
        (ExceptionGroup("g", [SandboxError("x")]), "sandbox", Blame.INFRASTRUCTURE, "SandboxError"),
        (PolicyFault("x"), "tool", Blame.POLICY, "not_taken"),
        (ExceptionGroup("g", [PolicyFault("x"), ServingError("y")]), "generate", Blame.INFRASTRUCTURE, "ServingError"),
        (TaskError("x"), "task", Blame.TASK, "TaskError"),
        (PluginError("x"), "task", Blame.TASK, "PluginError"),
        (ExceptionGroup("g", [ServingError("x"), TaskError("y")]), "task", Blame.TASK, "TaskError"),
    ],
)
def test_who_is_to_blame(error: Exception, stage: str, blame: Blame, kind: str) -> None:
    failure = failure_from_error(error, stage="tool", turn=3)
    assert (failure.stage, failure.blame, failure.kind, failure.turn) == (stage, blame, kind, 3)
    assert failure.retryable == (blame is Blame.INFRASTRUCTURE)


def test_only_a_bug_is_logged_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(user_code, "log_unexpected", lambda what, error: reported.append((what, error)))
    bug = KeyError("x")
    for error in (ServingError("x"), SandboxError("x"), PolicyFault("x"), TaskError("x"), bug):
        failure_from_error(error, stage="tool")
    assert reported == [("episode (tool)", bug)]


def test_names_and_texts_are_cut() -> None:
    kind = type("K" * 100, (Exception,), {})
    failure = task_fault(kind("x" * 5000))
    assert failure.kind == "K" * 64 and len(failure.message) == 2000 and failure.message.startswith("KKK")
    assert task_fault(UserError("a\nb", fix="c")).message == "a\nb\n  fix: c", "its lines are kept"
    assert infrastructure_fault("tool", "k", "m").turn is None
