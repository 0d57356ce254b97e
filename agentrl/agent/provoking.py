"""What the policy's own words make of the code that reads them: its tokens are kept, and the episode ends as the policy's.

A template, a tokenizer or a parser may raise anything at what a model says. That is never a way out of being scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl import usercode
from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.errors import InfrastructureError, PluginError, PolicyFault, TaskError
from agentrl.protocols import LiveTrajectory
from agentrl.records import Completion, Message

_NOT_THEIRS = (InfrastructureError, PluginError, TaskError, PolicyFault)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Around code whose input is what the policy said: what it raises becomes `PolicyFault`, but for faults that say whose they are.

    Args:
        what: end of the sentence "What the policy said cannot be ...".
    """
    since = usercode.cancellations()
    try:
        yield
    except Exception as error:
        usercode.let_go(error, since)
        if usercode.cause(error, *_NOT_THEIRS) is not None:
            raise
        usercode.report(f"what a policy said, {what}", error)
        raise PolicyFault(f"what the policy said cannot be {what}: {usercode.describe(error, 1000)}") from error


def read(chat: ChatFormat, line: LiveTrajectory, completion: Completion, schemas: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
    """Reads a completion and adds it to its trajectory as a turn. Raises `PolicyFault` if it cannot be read; the turn is added even so."""
    turns = len(line.turns)
    try:
        with said("read"):
            parsed = chat.parse(completion.token_ids, schemas)
            line.add_turn(completion, parsed.message)
            return parsed
    except PolicyFault:
        if len(line.turns) == turns:
            line.add_turn(completion, Message(role="assistant", content=""))
        raise
