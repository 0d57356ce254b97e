"""Recognises answers without content. Such answers score 0 without a call to a judge.

Judges have given full marks for a colon or for "Let's solve this step by step." (Zhao et al. 2025, "One Token to Fool LLM-as-a-Judge").
"""

from __future__ import annotations

import re
import unicodedata

_LONGEST = 400  # maximum length, in characters, of an answer that counts as an opening phrase
_LONGEST_ECHO = 50_000
_OPENINGS = (
    r"(?:(?:sure|okay|ok|of course|certainly|well|so|now) )*(?:here(?:'s| is| s) |below is )?(?:my |the |your |final )*"
    r"(?:answer|solution|thought process|reasoning|response|result|conclusion|verdict|score|explanation)"
    r"(?: is| follows| below| as follows)*",
    r"(?:(?:first|okay|ok|well|hmm) )*(?:let me|allow me to) (?:think|see|start|begin|check|explain|answer|solve)"
    r"(?: (?:this|the|about|through|on|it|that|by|problem|question|task|out|carefully|step by step))*",
    r"(?:to|in order to) (?:solve|answer) (?:this|the|that)(?: (?:problem|question|task))?",
    r"in conclusion|therefore|thus|hence|in summary|to summarize",
    r"(?:let'?s|let us|i will|i'?ll|we will|we can|we) (?:now )?(?:solve|think|work|reason|begin|start|answer|go)"
    r"(?: (?:this|the|about|through|on|it|that|by|problem|question|task|out|carefully|step by step|step-by-step))*",
    "\u89e3|\u7b54\u6848|\u7b54|\u304b\u3044\u305b\u3064|respuesta|soluci\u00f3n|l\u00f6sung|antwort|r\u00e9ponse|\u043e\u0442\u0432\u0435\u0442",
)
_OPENING = re.compile("|".join(f"(?:{pattern})" for pattern in _OPENINGS))
_SAYING = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Nl", "No", "Sm", "Sc", "So"))  # letters, digits, symbols with a meaning
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0\ufffc\ufffd")  # characters of these categories that are invisible or replacements
_WORDLESS = re.compile(r"[^\w' -]+|_+")
_MARKS = "?!.,:;\"'`*_>\u201c\u201d\u2018\u2019"
_AROUND = re.compile(rf"(?<![{_MARKS}])[{_MARKS}]++(?=\s|$)|(?<!\S)[{_MARKS}]++")  # matches marks around words; linear time on long "..."


def non_answer_reason(answer: str | None, *, question: str = "", reference: str | None = None) -> str:
    """Returns the reason why an answer has no content; empty if the answer must be judged.

    An answer that equals the reference is always judged. Any other answer is judged if it contains a letter, digit or symbol, unless the
    answer is a known opening phrase or repeats the question.
    """
    if answer is None:
        return "no answer was submitted"
    plain = _plain(answer[:_LONGEST])
    if reference is not None and (answer.strip() == reference.strip() or plain == _plain(reference[:_LONGEST]) != ""):
        return ""
    if not any(unicodedata.category(char) in _SAYING for char in answer if char not in _BLANK):
        return "the answer has no letter, digit or symbol"
    if len(answer) <= _LONGEST and _OPENING.fullmatch(plain):
        return "the answer is only an opening phrase"
    if _echoes(answer, question):
        return "the answer repeats the question"
    return ""


def _echoes(answer: str, question: str) -> bool:
    """Whether an answer consists only of the question, once or repeatedly, ignoring case and punctuation."""
    plain_answer, plain_question = (" ".join(_AROUND.sub("", text[:_LONGEST_ECHO].casefold()).split()) for text in (answer, question))
    if not plain_question:
        return question.strip() != "" and answer.strip() == question.strip()
    return plain_answer != "" and not plain_answer.replace(plain_question, "").strip()


def _plain(text: str) -> str:
    return " ".join(_WORDLESS.sub(" ", text.casefold()).split())
