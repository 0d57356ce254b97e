"""Harmony, the form of gpt-oss: a turn consists of messages on channels, and a message with a recipient is a call.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.python <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from typing import Any

from agentrl.agent.calls import MAX_CALLS, MAX_NAME, CallError, build_call, scan_json, skip_space
from agentrl.agent.forms.base import CallForm, Collected, Reading, Schemas
from agentrl.records import ToolCall

START, MESSAGE = "<|start|>", "<|message|>"
_CLOSE = re.compile(r"<\|(?:end|call|return|start)\|>")
_END = re.compile(r"\s*\Z")
_MOST_HEADER = MAX_NAME + 128  # characters
_HEADER = re.compile(
    r"(?P<role>[a-z]*)(?: ?to=(?P<early>[^\s<]+))?(?:<\|channel\|>(?P<channel>[a-z]+))?(?: ?to=(?P<late>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?(?P<kind>\w*)\s*"
)
_NO_MESSAGE = "a message was started but has no <|message|>"
_NAME = re.compile(r"functions\.([A-Za-z0-9_.-]+)")


def read_harmony(text: str, schemas: Schemas) -> Reading:
    """Parses a turn. Messages on the channel `analysis` are reasoning, and other messages without a recipient are content. If a turn starts
    no message, all of it is content."""
    collected = Collected()
    if MESSAGE not in text:
        if START not in text and "<|channel|>" not in text:
            return collected.reading(text)
        collected.errors.append(_NO_MESSAGE)
        return collected.reading()
    thinking: list[str] = []
    content: list[str] = []
    at = 0
    while not _END.match(text, at):
        start = text.find(MESSAGE, at)
        if start < 0:
            collected.errors.append(_NO_MESSAGE)
            break
        try:
            channel, recipient = _parse_header(text[at:start], first=at == 0)
        except CallError as error:
            collected.errors.append(str(error))
            break
        body = start + len(MESSAGE)
        end = _take(text, body, recipient, collected) if recipient else body
        closed = _CLOSE.search(text, end)
        if not recipient:
            (thinking if channel == "analysis" else content).append(text[body : closed.start() if closed else len(text)])
        at = len(text) if closed is None else closed.start() if closed[0] == START else closed.end()
    return collected.reading("\n".join(content), thinking="\n".join(thinking))


def _parse_header(header: str, *, first: bool) -> tuple[str, str]:
    """Returns the channel and recipient of a message.

    Raises `CallError` if the header is invalid, or if the message is not from the assistant: the model must not write tool results.
    """
    if len(header) > _MOST_HEADER:
        raise CallError(f"the header of a message has {len(header)} characters; the maximum is {_MOST_HEADER}")
    started = header.strip().startswith(START)
    if not started and not first:
        raise CallError("the end of a message must be followed by <|start|>assistant or the end of the turn")
    match = _HEADER.fullmatch(header.strip().removeprefix(START))
    if match is None:
        raise CallError(f"the header of a message is invalid: {ascii(header)[:120]}")
    if match["role"] != ("assistant" if started else ""):
        raise CallError(f"a turn may contain messages from the assistant only, not from {match['role'][:40] or 'no role'}")
    if match["early"] and match["late"]:
        raise CallError("a message must have one recipient")
    recipient = match["early"] or match["late"] or ""
    if match["channel"] not in (None, "analysis", "commentary", "final"):
        raise CallError(f"the channel must be analysis, commentary or final, not {match['channel'][:40]}")
    if recipient and match["kind"] not in ("", "json"):
        raise CallError(f"the arguments of a call must be json, not {match['kind'][:40]}")
    return match["channel"] or "", recipient


def _take(text: str, at: int, recipient: str, collected: Collected) -> int:
    """Reads the call whose arguments start at a position. Returns the position from which to search for the end of the message."""
    if collected.tried >= MAX_CALLS:
        collected.add(None)
        return at
    try:
        arguments, end = scan_json(text, at)
        end = skip_space(text, end)
        if end < len(text) and not _CLOSE.match(text, end):
            raise CallError(f"unexpected text after the arguments of a call: {text[end : end + 40]!a}", at=end)
    except CallError as error:
        collected.add(error)
        return max(at, error.at)
    collected.build(lambda: _call(recipient, arguments))
    return end


def _call(recipient: str, arguments: Any) -> ToolCall:
    name = _NAME.fullmatch(recipient)
    if name is None:
        raise CallError(f"the recipient of a call must be functions.NAME, not {ascii(recipient)[:80]}")
    return build_call(name[1], arguments)


HARMONY = CallForm(
    name="harmony",
    about="a message to `functions.NAME` on the channel commentary, ended by `<|call|>` (gpt-oss)",
    read=read_harmony,
    opens=("to=functions.",),
    ends=("<|call|>", "<|return|>"),
    inner=(START, "<|end|>", MESSAGE, "<|channel|>"),
)
