"""Harmony, the form of gpt-oss: a turn of several messages with channels, of which those with a recipient are calls.

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
_NAME = re.compile(r"functions\.([A-Za-z0-9_.-]+)")


def read_harmony(text: str, schemas: Schemas) -> Reading:
    """Text of the channel analysis is thinking, that of the others content. A turn without any message is content as a whole."""
    found = Collected()
    if MESSAGE not in text:
        told = ["a message was begun but has no <|message|>"] if START in text or "<|channel|>" in text else []
        found.errors += told
        return found.reading("" if told else text)
    thinking: list[str] = []
    content: list[str] = []
    at = 0
    while not _END.match(text, at):
        begun = text.find(MESSAGE, at)
        if begun < 0:
            found.errors.append("a message was begun but has no <|message|>")
            break
        try:
            channel, recipient = _head(text[at:begun], first=at == 0)
        except CallError as error:
            found.errors.append(str(error))
            break
        body = begun + len(MESSAGE)
        end = _take(text, body, recipient, found) if recipient else body
        closed = _CLOSE.search(text, end)
        if not recipient:
            (thinking if channel == "analysis" else content).append(text[body : closed.start() if closed else len(text)])
        at = len(text) if closed is None else closed.start() if closed[0] == START else closed.end()
    return found.reading("\n".join(content), thinking="\n".join(thinking))


def _head(header: str, *, first: bool) -> tuple[str, str]:
    """Channel and recipient of a message. Raises `CallError` for one that is not the assistant's: results of tools are nobody's to
    write."""
    if len(header) > _MOST_HEADER:
        raise CallError(f"the header of a message has {len(header)} characters; it may have {_MOST_HEADER}")
    started = header.strip().startswith(START)
    if not started and not first:
        raise CallError("after the end of a message comes <|start|>assistant, or the end of the turn")
    found = _HEADER.fullmatch(header.strip().removeprefix(START))
    if found is None:
        raise CallError(f"the header of a message cannot be read: {ascii(header)[:120]}")
    if found["role"] != ("assistant" if started else ""):
        raise CallError(f"a turn holds messages of the assistant alone, not of {found['role'][:40] or 'nobody'}")
    if found["early"] and found["late"]:
        raise CallError("a message has one recipient")
    recipient = found["early"] or found["late"] or ""
    if found["channel"] not in (None, "analysis", "commentary", "final"):
        raise CallError(f"the channels are analysis, commentary and final; {found['channel'][:40]} is none of them")
    if recipient and found["kind"] not in ("", "json"):
        raise CallError(f"the arguments of a call are json, not {found['kind'][:40]}")
    return found["channel"] or "", recipient


def _take(text: str, at: int, recipient: str, found: Collected) -> int:
    """Reads the call whose arguments start at a position; returns the position at which the search for the message's end starts."""
    if found.tried >= MAX_CALLS:
        found.add(None)
        return at
    try:
        arguments, end = scan_json(text, at)
        end = skip_space(text, end)
        if end < len(text) and not _CLOSE.match(text, end):
            raise CallError(f"unexpected text after the arguments of a call: {text[end : end + 40]!a}", at=end)
    except CallError as error:
        found.add(error)
        return max(at, error.at)
    found.take(lambda: _call(recipient, arguments))
    return end


def _call(recipient: str, arguments: Any) -> ToolCall:
    name = _NAME.fullmatch(recipient)
    if name is None:
        raise CallError(f"tools are called as functions.NAME, not as {ascii(recipient)[:80]}")
    return build_call(name[1], arguments)


HARMONY = CallForm(
    name="harmony",
    about="a message to `functions.NAME` on the channel commentary, ended by `<|call|>` (gpt-oss)",
    read=read_harmony,
    opens=("to=functions.",),
    ends=("<|call|>", "<|return|>"),
    inner=(START, "<|end|>", MESSAGE, "<|channel|>"),
)
