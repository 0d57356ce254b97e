"""Errors on the policy's text. A template, a tokenizer or a parser may raise anything on it. The tokens are kept, and the episode is
scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.base import user_code
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, TaskError
from agentrl.protocols import LiveTrajectory
from agentrl.records import Completion, Message

_BLAMED = (InfrastructureError, PluginError, TaskError, PolicyFault)


@contextmanager
def reading_policy_text(what: str) -> Iterator[None]:
    """Converts exceptions of code that processes the policy's text to `PolicyFault`. Faults with a blame pass through.

    Args:
        what: completes the error message "the policy's text cannot be ...".
    """
    since = user_code.cancellation_count()
    try:
        yield
    except Exception as error:
        user_code.reraise_if_fatal(error, since)
        if user_code.first_cause(error, *_BLAMED) is not None:
            raise
        user_code.log_unexpected(f"the policy's text cannot be {what}", error)
        raise PolicyFault(f"the policy's text cannot be {what}: {user_code.describe_error(error, 1000)}") from error


def read_turn(
    chat: ChatFormat, line: LiveTrajectory, completion: Completion, schemas: Sequence[Mapping[str, Any]] = ()
) -> ParsedCompletion:
    """Reads a completion and adds it to its trajectory as a turn. Raises `PolicyFault` if it cannot be read; the turn is added anyway."""
    turns = len(line.turns)
    try:
        with reading_policy_text("read"):
            parsed = chat.parse(completion.token_ids, schemas)
            line.add_turn(completion, parsed.message)
            return parsed
    except PolicyFault:
        if len(line.turns) == turns:
            line.add_turn(completion, Message(role="assistant", content=""))
        raise
