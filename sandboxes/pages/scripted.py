"""Three ways to go about a task of `pages`, each what a policy says next after a context in the chat of `agentrl.testing`.

`alone` reads page after page in one context, `splitting` gives every page to a sub-agent, `noting` reads page after page and writes
down which it has seen when it is asked for a summary. For `agentrl.testing.ReadingPolicy`: measuring what each strategy is worth,
and making demonstrations.
"""

from __future__ import annotations

import json
import re

from agentrl.agent.compaction import HEAD
from agentrl.config.rollout import CompactionConfig

NOWHERE = "none"
_ASK = str(CompactionConfig.model_fields["request"].default)


def alone(context: str) -> str:
    """Reads from the first page on, and gives up after the last."""
    task, outputs = _told(context), _shown(context)
    name, pages = _sought(task), _pages(task)
    if number := _found([task.partition(HEAD)[2], *outputs], name):  # in a summary, too
        return _call("submit", answer=number)
    read = _noted(task) + len(outputs)
    return _call("read", page=pages[read]) if read < len(pages) else _call("submit", answer=NOWHERE)


def noting(context: str) -> str:
    """The same; its summary is the number, or the pages that it need not read again."""
    outputs = _shown(context)
    if not outputs or not outputs[-1].endswith(_ASK):
        return alone(context)
    task = _told(context)
    number = _found(outputs, _sought(task))
    return f"{_sought(task)}: {number}" if number else f"{_noted(task) + len(outputs)} pages seen, and it is on none of them."


def splitting(context: str) -> str:
    """A sub-agent for each page, all in one turn; each reads its page."""
    task, outputs = _told(context), _shown(context)
    if len(_pages(task)) == 1:
        return alone(context)
    if not outputs:
        return "".join(_call("delegate", task=f"Which number has {_sought(task)}? Read page {page}.") for page in _pages(task))
    return _call("submit", answer=next((output for output in outputs if output.isdigit()), NOWHERE))


def _told(context: str) -> str:
    return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[0])


def _shown(context: str) -> list[str]:
    return [output.strip() for output in re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)]


def _sought(task: str) -> str:
    return re.findall(r"Which number has (.*?)\?", task)[0]


def _pages(task: str) -> range:
    span = re.findall(r"pages? (\d+)(?: to (\d+))?", task)[0]
    return range(int(span[0]), int(span[1] or span[0]) + 1)


def _noted(task: str) -> int:
    """Pages that a summary says need not be read again."""
    seen = re.findall(r"(\d+) pages seen", task.partition(HEAD)[2])
    return int(seen[0]) if seen else 0


def _found(texts: list[str], name: str) -> str:
    number = re.findall(rf"^{re.escape(name)}: (\d+)$", "\n".join(texts), re.MULTILINE)
    return number[0] if number else ""


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
