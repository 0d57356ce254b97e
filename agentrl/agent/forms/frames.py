"""The text around a call's arguments, for the forms that guided decoding can enforce."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text around the arguments of a call of one tool, the style of the arguments, and the text between two calls."""

    begin: str  # before the arguments
    end: str  # after the arguments
    style: str  # xgrammar's `style` of a `json_schema`
    between: str  # between two calls
    excludes: tuple[str, ...] = ()  # texts that no argument may contain, because the reader would take them for the end


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
    """The frame of a call of the tool with this name; None if guided decoding cannot enforce the form."""
    found = _FRAMES.get(form)
    if found is None:
        return None
    return Frame(begin=found.begin.replace("%", name), end=found.end, style=found.style, between=found.between, excludes=found.excludes)
