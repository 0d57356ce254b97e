"""What stands around the arguments of a call in the forms that guided decoding can hold a policy to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text before and after the arguments of a call of one tool, how these are written, and what stands between two calls."""

    begin: str
    end: str
    style: str  # of xgrammar's `json_schema`
    between: str
    excludes: tuple[str, ...] = ()  # texts that no argument may hold: the reader would take them for the end


_FRAMES = {
    "hermes": Frame(
        begin='<tool_call>\n{"name": "%", "arguments": ', end="}\n</tool_call>", style="json", between="\n", excludes=("</tool_call>",)
    ),
    "llama3_json": Frame(begin='{"name": "%", "parameters": ', end="}", style="json", between="; "),
    "qwen3_coder": Frame(
        begin="<tool_call>\n<function=%>\n", end="\n</function>\n</tool_call>", style="qwen_xml", between="\n", excludes=("</",)
    ),
}


def frame(form: str, name: str) -> Frame | None:
    """The frame of a call of the tool with this name; None for a form that no policy can be held to."""
    found = _FRAMES.get(form)
    if found is None:
        return None
    return Frame(begin=found.begin.replace("%", name), end=found.end, style=found.style, between=found.between, excludes=found.excludes)
