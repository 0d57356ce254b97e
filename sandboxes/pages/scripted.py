"""Three strategies for `pages`. A strategy maps a context, in the chat format of `agentrl.testing`, to the next turn.

`alone` reads page after page in one context, `splitting` delegates every page to a sub-agent, and `noting` reads page after page and
lists the pages seen in its summary. The strategies are for `agentrl.testing.ReadingPolicy`, which measures strategies and generates
demonstrations.
"""

from __future__ import annotations

import json
import re

from agentrl.agent.contexts import HEAD, SUMMARY_REQUEST

NOWHERE = "none"


def alone(context: str) -> str:
    """Reads all pages in order, and gives up after the last page."""
    task, outputs = _request(context), _tool_outputs(context)
    name, pages = _sought(task), _pages(task)
    if number := _find_number([task.partition(HEAD)[2], *outputs], name):  # the number may also be in a summary
        return _call("submit", answer=number)
    read = _noted(task) + len(outputs)
    return _call("read", page=pages[read]) if read < len(pages) else _call("submit", answer=NOWHERE)


def noting(context: str) -> str:
    """Reads pages like `alone`. A summary contains the requested number or, if the number was not found, the count of pages seen so far."""
    outputs = _tool_outputs(context)
    if not outputs or not outputs[-1].endswith(SUMMARY_REQUEST):
        return alone(context)
    task = _request(context)
    number = _find_number(outputs, _sought(task))
    return f"{_sought(task)}: {number}" if number else f"{_noted(task) + len(outputs)} pages seen, and it is on none of them."


def splitting(context: str) -> str:
    """Delegates each page to a sub-agent, all in one turn. Each sub-agent reads its page."""
    task, outputs = _request(context), _tool_outputs(context)
    if len(_pages(task)) == 1:
        return alone(context)
    if not outputs:
        return "".join(_call("delegate", task=f"Which number has {_sought(task)}? Read page {page}.") for page in _pages(task))
    return _call("submit", answer=next((output for output in outputs if output.isdigit()), NOWHERE))


def _request(context: str) -> str:
    return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[0])


def _tool_outputs(context: str) -> list[str]:
    return [output.strip() for output in re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)]


def _sought(task: str) -> str:
    return re.findall(r"Which number has (.*?)\?", task)[0]


def _pages(task: str) -> range:
    span = re.findall(r"pages? (\d+)(?: to (\d+))?", task)[0]
    return range(int(span[0]), int(span[1] or span[0]) + 1)


def _noted(task: str) -> int:
    """Returns the number of pages that a summary lists as seen."""
    seen = re.findall(r"(\d+) pages seen", task.partition(HEAD)[2])
    return int(seen[0]) if seen else 0


def _find_number(texts: list[str], name: str) -> str:
    number = re.findall(rf"^{re.escape(name)}: (\d+)$", "\n".join(texts), re.MULTILINE)
    return number[0] if number else ""


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
