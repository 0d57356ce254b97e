"""A scripted customer, for tests, baselines and training without a second model, and the buttons for an agent that chooses messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.environment.dialogue import AGENT, END, USER
from agentrl.records import ToolCall

PATIENCE = 6
"""Number of replies after which the customer leaves."""
BUTTONS = {
    "v": "Please tell me the e-mail address of the order.",
    "f": "look_up",
    "o": "refund",
    "x": "cancel",
    "k": "change_address",
    "C": "I have done what you asked for.",
    "1": "I am sorry, but the rules of the shop do not allow it.",
}
"""Letters to which the small policy in `recipes/desk.py` assigns similar probabilities before training."""
_EMAIL = re.compile(r"[\w.]+@[\w.]*\w")
_OVER = re.compile(r"\b(done|refunded|cancel+ed|changed|sorry|cannot|can't|not possible|not allow)", re.IGNORECASE)


def customer(brief: str, transcript: Sequence[tuple[str, str]]) -> str:
    """Returns the next message of a customer who answers questions about the e-mail address and the new address, leaves when the request is
    granted or declined or after `PATIENCE` replies, and otherwise repeats the request."""
    wish = _after(brief, "You want: ")
    last, replies = transcript[-1][1], sum(speaker == USER for speaker, _ in transcript)
    if "mail" in last.lower():
        return f"It is {_after(brief, 'Your e-mail address: ')}"
    if "address" in last.lower() and "New address: " in brief:
        return f"It is {_after(brief, 'New address: ')}"
    if _OVER.search(last) or replies > PATIENCE:
        return f"Goodbye. {END}"
    return wish


def press(action: str, transcript: Sequence[tuple[str, str]]) -> str | ToolCall:
    """Returns the action of a button: a message, or a call with the order, the e-mail address and the new address from the customer."""
    text = BUTTONS[action]
    if " " in text:
        return text
    customer_texts = [words for speaker, words in transcript if speaker != AGENT]
    arguments = {"order": _last(r"order (\d+)", customer_texts)}
    if text == "look_up":
        arguments["email"] = _last(_EMAIL.pattern, customer_texts)
    if text == "change_address":
        arguments["address"] = _last(r"\bto (\d+ \w+ Street)", customer_texts)
    return ToolCall(name=text, arguments=arguments)


def _after(brief: str, label: str) -> str:
    return brief.partition(label)[2].partition("\n")[0]


def _last(pattern: str, texts: Sequence[str]) -> str:
    matches = [match for text in texts for match in re.findall(pattern, text)]
    return str(matches[-1]) if matches else ""
