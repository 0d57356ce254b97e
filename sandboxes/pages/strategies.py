"""Four strategies for `questions`. Each maps a context, in the chat format of the base policies, to the next turn.

`splitting` delegates every page to a helper. `alone` works through page after page in one context. `at_once` reads all pages in one turn
and writes one short program for all of them, which needs the smallest context. `handing_on` delegates all pages to one helper. The
strategies are for `agentrl.testing.ReadingPolicy`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agentrl.records import Task
from sandboxes.pages.demonstrations import call
from sandboxes.pages.questions import program, request


def request_text(context: str) -> str:
    """Returns the request that the agent received."""
    return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[0])


def tool_outputs(context: str) -> list[str]:
    """Returns the results of the tool calls so far."""
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)


def given(context: str) -> list[int]:
    """Returns the pages whose questions the agent has to answer."""
    pages = [int(word) for word in request_text(context).rstrip(".").split() if word.isdigit()]
    return list(range(pages[0], pages[-1] + 1))


def splitting(task: Task) -> Callable[[str], str]:
    """Delegates each page to a helper."""

    def reads(context: str) -> str:
        pages, outputs = given(context), tool_outputs(context)
        if len(pages) == 1:
            return alone(task)(context)
        if not outputs:
            return "\n".join(call("delegate", task=request(page, page)) for page in pages)
        return call("submit", answer="\n".join(outputs))

    return reads


def alone(task: Task) -> Callable[[str], str]:
    """Reads and answers page after page."""

    def reads(context: str) -> str:
        pages, outputs = given(context), tool_outputs(context)
        page, ran = divmod(len(outputs), 2)
        if page == len(pages):
            return call("submit", answer="\n".join(outputs[1::2]))
        return call("python", code=program(task.data["questions"][pages[page] - 1])) if ran else call("read", page=pages[page])

    return reads


def at_once(task: Task) -> Callable[[str], str]:
    """Reads all pages in one turn, then writes one short program for all of them."""

    def reads(context: str) -> str:
        outputs = tool_outputs(context)
        if not outputs:
            return "\n".join(call("read", page=page) for page in given(context))
        if len(outputs) == len(given(context)):
            bodies = [program(question).removeprefix("import csv\n").removeprefix("import json\n") for question in task.data["questions"]]
            return call("python", code="import csv,json\n" + "\n".join(bodies))
        return call("submit", answer=outputs[-1])

    return reads


def handing_on(task: Task) -> Callable[[str], str]:
    """Delegates all pages to one helper."""

    def reads(context: str) -> str:
        outputs = tool_outputs(context)
        if "delegate" not in context.partition("<|im_end|>")[0]:
            return alone(task)(context)
        return call("submit", answer=outputs[-1]) if outputs else call("delegate", task=request_text(context))

    return reads
