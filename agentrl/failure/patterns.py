"""Text patterns for the triage rules, and lenient comparison of answers. Neither is used to compute scores.

Matching takes linear time, and the strings have a bounded length (`agentrl.failure.timeline.MAX_CHARS`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl.base import numbers

SUBMIT_TOOLS = ("submit", "finish", "final_answer", "answer", "complete", "done")
NO_SUCH_TOOL = re.compile(
    r"\bno (?:such )?(?:tool|function)\b|\b(?:unknown|unrecognized|undefined|invalid) (?:tool|function)\b"
    r"|\b(?:tool|function)\b.{0,80}\b(?:not found|does not exist|is not (?:available|registered))",
    re.IGNORECASE,
)
BAD_ARGUMENTS = re.compile(
    r"\berror: \w{1,64} needs \{|field required|missing (?:\d+ )?required|required (?:property|parameter|argument|field)"
    r"|unexpected keyword|invalid (?:argument|parameter|input|value)|validation error|input should be|extra inputs are not permitted"
    r"|(?:takes|accepts) up to \d+ characters|takes \d+ positional|additional propert|unknown (?:argument|parameter|option)",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed out after \d|gave no result within \d|\bTimeoutError\b|deadline exceeded|time limit exceeded", re.IGNORECASE)
OUTPUT_USED_UP = "this episode's output is used up"
RUNS_PROGRAMS = re.compile(  # tools that run the agent's code; errors in their output come from it
    r"(?:^|[_.-])(?:i?python|bash|sh|shell|terminal|console|exec(?:ute)?|run|repl|jupyter|notebook|code|interpreter|command|cmd|sandbox)(?:$|[_.-])",
    re.IGNORECASE,
)
PROGRAM_KEYS = ("code", "command", "cmd", "script", "program")
SANDBOX_DOWN = re.compile(
    r"cannot connect to the docker daemon|\b(?:sandbox|container|kernel|environment)\b.{0,80}"
    r"\b(?:is not running|is not available|is unavailable|is gone|has died|was lost|failed to start|could not be started)",
    re.IGNORECASE,
)
ERROR_TYPE = re.compile(r"\b([A-Za-z_]\w{1,60}(?:Error|Exception|Timeout|Unavailable|Exceeded|TimedOut))\b")
VERIFIER_TIMED_OUT = re.compile(r"time limit exceeded", re.IGNORECASE)
MODEL_CALL_FAILED = "an answer of the model: the call failed, "  # prefix of an entry in `Trace.missing`; the error type follows
GIVES_UP = re.compile(
    r"\bI(?:'m| am| was)? (?:cannot|can't|can not|could not|couldn't|unable to|not able to|don't know|do not know|give up)\b"
    r"|\b(?:impossible|unable|not possible|not able) to (?:answer|determine|complete|solve|do|find|say|compute|calculate)\b"
    r"|\bgiv(?:e|ing) up\b|\b(?:cannot|can not|can't|could not|couldn't) be (?:answered|determined|found|solved|computed|calculated)\b"
    r"|\bas an ai\b.{0,40}\bI (?:do not|don't|can't|cannot)\b|\bI (?:do not|don't) have (?:access|enough|the ability)\b"
    r"|\b(?:insufficient|not enough) (?:information|data)\b|\bno (?:data|answer|information) (?:is |was )?(?:available|found|given)\b"
    r"|\btoo (?:difficult|hard|complex) for me\b",
    re.IGNORECASE,
)
NON_ANSWERS = frozenset(
    {"", "?", "-", "n/a", "na", "none", "null", "unknown", "i don't know", "idk", "no answer", "error", "cannot determine"}
    | {"todo", "tbd", "placeholder", "undefined", "your answer", "answer"}
)
REWARD_HACKS = re.compile(
    r"def __eq__\(self, *\w+\)(?: *-> *\w+)?:(?:\s|\\n)*return True|\bos\._exit\(0\)"
    r"|\bpytest_runtest_makereport\b"
    r"|\breward\.(?:txt|json)\b|/proc/(?:1|self)/mem\b|\bhidden_tests?\b|\btests?_hidden\b"
)
TEST_HOOK_FILES = re.compile(r"\b(?:sitecustomize|conftest)\.py\b")  # files that test runs load; reading them is harmless
WRITES_FILE = re.compile(r">|\bwrite|\btee\b|\b(?:cp|mv)\b|['\"][wax]b?\\?['\"]|\"(?:content|text|new_str|file_text)\"")
ADDRESSES_JUDGE = re.compile(
    r"\b(?:ignore|disregard|forget) (?:all |any )?(?:of )?(?:the |your )?(?:previous|prior|above|earlier) (?:instructions|rules|text)"
    r"|\b(?:score|grade|rating|verdict)\b[\"'*]{0,3} ?[:=] ?[\"'*]{0,3}(?:1(?:\.0+)?|10|100|correct|pass(?:ed)?|true|yes)\b"
    r"|\b(?:give|award|assign) (?:this|it|the|me)\b.{0,30}\b(?:full|maximum|highest|perfect|top) (?:score|marks?|points|grade|rating)"
    r"|\bthis (?:answer|response|submission) (?:is|must be|should be) (?:scored|graded|rated|marked)\b",
    re.IGNORECASE,
)
ABOUT_SCORES = re.compile(r"\b(?:score|grade|rating|verdict|instructions)", re.IGNORECASE)
FORBIDDEN_ACTIONS = (  # (pattern of a prohibition, pattern of calls that violate it, note)
    (
        re.compile(r"\b(?:do not|don't|never|must not|without) (?:delet|remov|eras)\w{0,4}\b", re.IGNORECASE),
        re.compile(r"\brm +-?\w|\bos\.(?:remove|unlink|rmdir)\(|\brmtree\(|\.unlink\(|\bfind\b.{0,200} -delete\b"),
        "deletes files, which the task forbids",
    ),
    (
        re.compile(r"\b(?:do not|don't|never|must not|without) (?:install)\w{0,4}\b", re.IGNORECASE),
        re.compile(r"\b(?:pip3?|conda|npm|apt|apt-get|yum|apk) +(?:-\w+ +)*(?:install|add)\b"),
        "installs packages, which the task forbids",
    ),
)
FORBIDS_TOOL = re.compile(
    r"\b(?:do not|don't|never|must not|without) (?:use|using|call|calling|run|running)(?: the)?(?: tool| function)? [`'\"]?(\w{2,64})", re.I
)
ANSWER_ONLY = re.compile(
    r"\b(?:only|just) (?:the|a|one|with the) (?:\w+ )?(?:number|word|name|value|date|answer|integer)\b"
    r"|\bnothing else\b|\bno (?:other|extra) (?:text|words)\b",
    re.IGNORECASE,
)
UNPARSED_CALL = re.compile(
    r"<tool_call>|<function[=_]|\[TOOL_CALLS\]|<\|python_tag\|>|```(?:json|tool_call)\s*\{\s*\"name\"|^\s*\{\s*\"name\"\s*:\s*\"", re.I
)
CALL_IN_TEXT = re.compile(r"(?<![\w.])(\w{2,64})\((?:\w{1,64} ?= ?)[\"'{\[\d]")
CODE_IN_TEXT = re.compile(r"^```(?:python|py|sh|bash|shell)\s*\n\s*\S", re.IGNORECASE | re.MULTILINE)

_RELATIVE_TOLERANCE = 1e-6
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\.?\d[\d,.]*(?:[eE][-+]?\d{1,3})?(?!\w)")
_MAX_ANSWER = 4000  # characters of an answer that are compared
_QUOTES = "`'\"*.!$€ \t\r\n"


def parse_number(text: str) -> Fraction | None:
    """Parses a number in plain notation, optionally with commas as thousands separators. Returns None if the string is not a number.

    Surrounding quotes, punctuation, white space, currency and percent signs are ignored, so "12%" is 12. Longer strings than 64
    characters are not numbers.
    """
    return numbers.parse_number(_without_quotes(text, _QUOTES + "%").replace(",", "")) if len(text) <= 64 else None


def is_right_answer(text: str, truth: str, tolerance: float) -> bool:
    """Whether a string equals the correct answer, ignoring case and quotes, or is the same number within `tolerance` or a relative 1e-6.

    False if the correct answer is empty.
    """
    answer, right = _without_quotes(text[:_MAX_ANSWER]), _without_quotes(truth[:_MAX_ANSWER])
    if answer.casefold() == right.casefold():
        return bool(right)
    answered, wanted = parse_number(answer), parse_number(right)
    return (
        answered is not None
        and wanted is not None
        and numbers.same_number(answered, wanted, relative=_RELATIVE_TOLERANCE, absolute=tolerance)
    )


def contains_answer(truth: str, text: str, tolerance: float) -> bool:
    """Whether the correct answer occurs in a string as a separate word or number; False if the correct answer is empty."""
    right = _without_quotes(truth[:_MAX_ANSWER])
    if not right:
        return False
    if parse_number(right) is not None:
        return any(is_right_answer(match[0], right, tolerance) for match in _NUMBER.finditer(text))
    return re.search(rf"(?<!\w){re.escape(right)}(?!\w)", text, re.IGNORECASE) is not None


def contains_only_answer(truth: str, text: str, tolerance: float) -> bool:
    """Whether a string contains the correct answer as its only number or, if that is not a number, as text of two or more characters."""
    if parse_number(truth) is None:
        return len(truth.strip(_QUOTES)) >= 2 and contains_answer(truth, text, tolerance)
    numbers = [match[0] for match in _NUMBER.finditer(text)]
    return len(numbers) == 1 and is_right_answer(numbers[0], truth, tolerance)


def nonblank_lines(text: str) -> list[str]:
    """Returns the nonblank lines of a string, each stripped of surrounding white space."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def _without_quotes(text: str, quotes: str = _QUOTES) -> str:
    """Returns a string without surrounding quotes and punctuation, but with the point of a number such as ".5"."""
    stripped = text.strip(quotes)
    before = text[: len(text) - len(text.lstrip(quotes))]
    return f".{stripped}" if stripped[:1].isdecimal() and before.endswith(".") and not before.endswith("..") else stripped
