"""Base class of verifiers with settings. A task can override the settings in its `data`.

class Near(ConfiguredVerifier):
    name: ClassVar[str] = "near"
    within: float = Field(0.1, gt=0)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.for_task(task)  # with task.data["near"] = {"within": 0.5}, rules.within is 0.5
        ...
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError

from agentrl.base.error_text import validation_text
from agentrl.base.installation import install_command
from agentrl.config.section import Section
from agentrl.errors import PluginError, TaskError
from agentrl.records import Episode, Score, Task

MAX_ANSWER_CHARS = 10_000
"""Default maximum length of an answer, in characters. A longer answer counts as wrong."""
EVIDENCE_CHARS = 80  # characters of an answer that the evidence quotes
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_INFO = re.compile(r"[ \t]*[\w+#.-]*\s*")  # the language of a code block
_LETTERS = string.ascii_letters


class ConfiguredVerifier(Section):
    """A verifier whose fields are its settings. A task may override each of them in `task.data[name]`."""

    name: ClassVar[str]
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    truth: str = Field("answer", min_length=1)
    """Key of `task.data` that holds the truth."""

    def for_task(self, task: Task) -> Self:
        """Returns this verifier with the settings of the task. Raises `TaskError` if a setting is unknown or its value is invalid."""
        settings = task.data.get(self.name)
        if settings is None:
            return self
        if not isinstance(settings, Mapping):
            raise TaskError(f"task {task.id}: data.{self.name} is not an object", fix=f"see the fields of {type(self).__name__}")
        chosen = {field.alias or key: getattr(self, key) for key, field in type(self).model_fields.items()}
        try:
            return type(self).model_validate(chosen | dict(settings))
        except ValidationError as error:
            raise TaskError(f"task {task.id}: data.{self.name}: {validation_text(error)}", fix="correct the settings in the task") from None

    def truth_of(self, task: Task) -> Any:
        """Returns the task's truth, which is a JSON value. Raises `TaskError` if the task has no truth."""
        if self.truth not in task.data:
            raise TaskError(f"task {task.id}: data has no {self.truth!r}", fix=f"add the truth, or set truth=... of {self.name}")
        return task.data[self.truth]


def answer_of(episode: Episode, *, after: str = "", longest: int = MAX_ANSWER_CHARS) -> tuple[str, str]:
    """Returns the stripped answer, and the reason why it is wrong whatever the truth is. The reason is empty if the answer must be compared
    with the truth.

    Args:
        after: marker such as "Answer:". Only the text after its last occurrence in `episode.answer` is returned; a submitted text without
            the marker is wrong. If `after` is empty (the default), the complete submitted text is returned.
        longest: maximum length of `episode.answer` in characters; a longer text is wrong.
    """
    text = episode.answer
    if text is None:
        return "", "no answer was submitted"
    if len(text) > longest:
        return "", f"the answer has {len(text)} characters, more than {longest}"
    if after:
        _, separator, text = text.rpartition(after)
        if not separator:
            return "", f"the answer does not contain {after!r}"
    text = text.strip().strip("\ufeff").strip()  # Python does not count a byte order mark as white space
    return text, "" if text else "the answer is empty"


def strip_code_fence(text: str, *languages: str) -> str:
    """Returns the content of a string that is one fenced CommonMark code block, and returns any other string unchanged.

    An unclosed block ends with the string. The content may also start on the line of the fence, optionally after one of `languages`. A
    string with several blocks, or with text around its block, is not one block.
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
    """Returns a score of 0 with the reason as evidence."""
    return Score(value=0.0, parts=parts, evidence=evidence)


def require_package(package: str, extra: str = "rewards") -> None:
    """Raises `PluginError` if `package` is not installed. Does not import the package."""
    try:
        installed = find_spec(package) is not None
    except (ImportError, ValueError):
        installed = False
    if not installed:
        raise PluginError(f"{package} is not installed", fix=install_command(extra))
