"""Four ways to go about a task of `questions`, each what a policy says next after a context in the chat of the base policies.

`splitting` gives every page to a helper; `alone` works through page after page in one context; `at_once` reads all pages in one turn and
writes one short program for all of them, the least that one context can do with; `handing_on` gives all pages to one helper. For
`agentrl.testing.ReadingPolicy`: they show what the family can be solved by.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agentrl.records import Task
from sandboxes.pages.demonstrations import call
from sandboxes.pages.questions import program, request


def asked(context: str) -> str:
    return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", context, re.DOTALL)[0])


def shown(context: str) -> list[str]:
    """What the calls gave so far."""
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)


def given(context: str) -> list[int]:
    """The pages that the agent of a context is to answer for."""
    pages = [int(word) for word in asked(context).rstrip(".").split() if word.isdigit()]
    return list(range(pages[0], pages[-1] + 1))


def splitting(task: Task) -> Callable[[str], str]:
    """A helper for each page."""

    def reads(context: str) -> str:
        pages, outputs = given(context), shown(context)
        if len(pages) == 1:
            return alone(task)(context)
        if not outputs:
            return "\n".join(call("delegate", task=request(page, page)) for page in pages)
        return call("submit", answer="\n".join(outputs))

    return reads


def alone(task: Task) -> Callable[[str], str]:
    """Page after page, each read and answered."""

    def reads(context: str) -> str:
        pages, outputs = given(context), shown(context)
        page, ran = divmod(len(outputs), 2)
        if page == len(pages):
            return call("submit", answer="\n".join(outputs[1::2]))
        return call("python", code=program(task.data["questions"][pages[page] - 1])) if ran else call("read", page=pages[page])

    return reads


def at_once(task: Task) -> Callable[[str], str]:
    """All pages in one turn, then one short program for all of them: the least that one context can do with."""

    def reads(context: str) -> str:
        outputs = shown(context)
        if not outputs:
            return "\n".join(call("read", page=page) for page in given(context))
        if len(outputs) == len(given(context)):
            bodies = [program(question).removeprefix("import csv\n").removeprefix("import json\n") for question in task.data["questions"]]
            return call("python", code="import csv,json\n" + "\n".join(bodies))
        return call("submit", answer=outputs[-1])

    return reads


def handing_on(task: Task) -> Callable[[str], str]:
    """One helper for all pages."""

    def reads(context: str) -> str:
        outputs = shown(context)
        if "delegate" not in context.partition("<|im_end|>")[0]:
            return alone(task)(context)
        return call("submit", answer=outputs[-1]) if outputs else call("delegate", task=asked(context))

    return reads
