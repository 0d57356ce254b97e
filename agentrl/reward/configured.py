"""Verifiers with settings: those that one is made with, and for one task those that its `data` give.

class Near(Configured):
    name: ClassVar[str] = "near"
    within: float = Field(0.1, gt=0)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)  # with task.data["near"] = {"within": 0.5}, within is 0.5 here
        ...
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError

from agentrl.base.installation import install_command
from agentrl.base.validation import validation_text
from agentrl.config.section import Section
from agentrl.errors import PluginError, TaskError
from agentrl.records import Episode, Score, Task

MAX_ANSWER_CHARS = 10_000
"""Characters of an answer that are looked at, unless a verifier says otherwise; a longer one is wrong."""
EVIDENCE_CHARS = 80  # characters of an answer quoted as evidence
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_INFO = re.compile(r"[ \t]*[\w+#.-]*\s*")  # the language of a block
_LETTERS = string.ascii_letters


class ConfiguredVerifier(Section):
    """A verifier whose fields are its settings; each has a default that a task may replace in `task.data[name]`."""

    name: ClassVar[str]
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    truth: str = Field("answer", min_length=1)
    """Key of `task.data` that holds the truth."""

    def for_task(self, task: Task) -> Self:
        """These settings with those of the task. Raises `TaskError` for one that does not exist or has no such value."""
        given = task.data.get(self.name)
        if given is None:
            return self
        if not isinstance(given, Mapping):
            raise TaskError(f"task {task.id}: data.{self.name} is no object of settings", fix=f"see the fields of {type(self).__name__}")
        chosen = {field.alias or key: getattr(self, key) for key, field in type(self).model_fields.items()}
        try:
            return type(self).model_validate(chosen | dict(given))
        except ValidationError as error:
            raise TaskError(f"task {task.id}: data.{self.name}: {validation_text(error)}", fix="correct the settings in the task") from None

    def truth_of(self, task: Task) -> Any:
        """The truth, a JSON value. Raises `TaskError` when the task has none."""
        if self.truth not in task.data:
            raise TaskError(f"task {task.id}: data has no {self.truth!r}", fix=f"put the truth there, or set truth=... of {self.name}")
        return task.data[self.truth]


def answer_of(episode: Episode, *, after: str = "", longest: int = MAX_ANSWER_CHARS) -> tuple[str, str]:
    """The answer without white space at its ends, and why it is wrong whatever it says (empty: it is not).

    Args:
        after: the answer is what follows the last occurrence of this, such as "Answer:"; an answer without it is wrong.
        longest: characters; a longer answer is wrong.
    """
    text = episode.answer
    if text is None:
        return "", "no answer was submitted"
    if len(text) > longest:
        return "", f"answer of {len(text)} characters is longer than {longest}"
    if after:
        _, found, text = text.rpartition(after)
        if not found:
            return "", f"nothing follows {after!r} in the answer"
    text = text.strip().strip("\ufeff").strip()  # a byte order mark is no white space to Python
    return text, "" if text else "the answer is empty"


def strip_code_fence(text: str, *languages: str) -> str:
    """The content of a text that is one fenced code block of CommonMark; any other text unchanged.

    An unclosed block ends with the text. The content may also start on the line of the fence, optionally after one of `languages`. A text
    with several blocks, or with anything around its block, is not one block.
    """
    opening = _FENCE.match(text)
    if opening is None:
        return text
    fence, inside = opening[1], text[opening.end() :].rstrip()
    info, _, rest = inside.partition("\n")
    if not rest or not _INFO.fullmatch(info):  # the content starts on the line of the fence
        inside, info = inside.lstrip(), info.lstrip()
        word = info[: len(info) - len(info.lstrip(_LETTERS))]
        return inside[len(word) if word.lower() in languages else 0 :].removesuffix(fence).strip()
    lines = rest.split("\n")
    closing = re.compile(rf" {{0,3}}{fence[0]}{{{len(fence)},}}\s*")
    at = next((number for number, line in enumerate(lines) if closing.fullmatch(line)), None)
    if at is None:
        return rest.removesuffix(fence).strip()
    return "\n".join(lines[:at]).strip() if at == len(lines) - 1 else text


def zero_score(evidence: str, **parts: float) -> Score:
    """A score of 0 and why."""
    return Score(value=0.0, parts=parts, evidence=evidence)


def require_package(package: str, extra: str = "rewards") -> None:
    """Raises `PluginError` unless `package` is installed, without importing it."""
    try:
        found = find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise PluginError(f"{package} is not installed", fix=install_command(extra))
