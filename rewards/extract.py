r"""Extracts the final answer from a submission: the last `\boxed{}` or the text after the last `####`, else after the last "answer is".

Only these marks count, so exactly one answer is scored. Without a mark, the answer is the full submission.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = "####"  # as in GSM8K; the answer is on the same line
_SAID = re.compile(r"\banswer\W{0,4}(?:(?:is|equals|would be|will be)\b|:|=)[ \t]*:?[ \t]*", re.IGNORECASE)
_INLINE = re.compile(r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BOLD = re.compile(r"\*\*([^*]+)\*\*\.?")  # bold text in Markdown


def final(text: str) -> str:
    """Returns the text at the last mark, or the full text if there is no mark. Strips white space, bold marks and a final full stop.

    The result is empty if the last box is not closed.
    """
    box = max((match.end() for match in _BOX.finditer(text)), default=-1)
    if (hashes := text.rfind(_HASHES)) > box:
        text = text[hashes + len(_HASHES) :].strip().partition("\n")[0]
    elif box >= 0:
        text = text[box : box + closing(text[box:])] if closing(text[box:]) >= 0 else ""
    elif marks := list(_SAID.finditer(text)):
        text = text[marks[-1].end() :]
    return bare(text)


def expression(text: str) -> str:
    """Returns the expression to score: the last `$...$` in the final answer, otherwise the full answer; empty if its braces do not
    balance."""
    text = final(text)
    if inline := list(_INLINE.finditer(text)):
        text = bare(next(filter(None, inline[-1].groups()), ""))
    return text if closing(text) == len(text) else ""


def formulas(text: str) -> list[str]:
    r"""Returns the formulas in a string: what is inside `$...$`, `\(...\)` and `\[...\]`."""
    return [next(filter(None, match.groups()), "") for match in _INLINE.finditer(text)]


def bare(text: str) -> str:
    """Returns the text without surrounding white space, Markdown's bold and a final full stop."""
    text = text.strip()
    if text.count("**") == 1:  # the bold text started before the mark, as in **Answer: 5**
        text = text.removesuffix(".").removesuffix("**").removeprefix("**").strip()
    if (bold := _BOLD.fullmatch(text)) is not None:
        text = bold[1].strip()
    return text.removesuffix(".").strip()


def closing(text: str) -> int:
    """Returns the index of the brace in `text` that closes a brace opened before `text`.

    If there is no such brace, returns the length of `text`, or -1 if `text` opens a brace that it does not close.
    """
    depth, escaped = 0, False
    for at, letter in enumerate(text):
        if not escaped:
            depth += (letter == "{") - (letter == "}")
        escaped = letter == "\\" and not escaped
        if depth < 0:
            return at
    return len(text) if depth == 0 else -1
