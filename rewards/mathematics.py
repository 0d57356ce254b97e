r"""Mathematics: an expression that equals the truth, as the package math-verify reads and compares it.

    rewards.mathematics:mathematics                      with task.data = {"answer": "\\frac{1}{2}"}

math-verify and sympy compute for hours on some short texts, and their own time limit needs a main thread. They run in a process that is
ended at a deadline (`agentrl.reward.worker`). Each request has one truth and one answer, and gets one verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import SHOWN, Configured, answer_of, need, wrong
from agentrl.reward.worker import PATIENCE_S, AtAnswer, Worker

DEADLINE_S = 3.0
LONGEST = 4000  # characters of a submission
LONGEST_EXPRESSION = 400
_BOX = "\\boxed{"
_INLINE = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SCIENTIFIC = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,4})", re.ASCII)


class Mathematics(Configured):
    r"""1 when the answer equals the truth, else 0. Settings in `task.data["mathematics"]`.

    What is read of a submission is one expression, in LaTeX or as a calculator writes it: in the last `\boxed{}`, else in the last `$...$`,
    else all of it. So naming several answers is answering with a list. An answer in which no mathematics can be read is wrong, as is one
    at which math-verify fails though it judges the truth; a truth in which none can be read is the task's fault, and its episodes have
    no score.
    """

    name: ClassVar[str] = "mathematics"
    timeout_s: ClassVar[float] = PATIENCE_S

    decimals: int = Field(6, ge=0, le=15)
    """Decimal places that are compared of numbers that are not exact."""
    after: str = ""
    """The answer is what follows the last occurrence of this. Empty: all that was submitted."""

    def model_post_init(self, context: Any) -> None:
        need("math_verify")

    async def __call__(self, task: Task, episode: Episode) -> Score:
        rules = self.of(task)
        truth = expression(str(rules.wanted(task)))
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        answer = expression(text)
        if problem or not answer:
            return wrong(problem or "the answer is empty")
        if len(answer) > max(LONGEST_EXPRESSION, 4 * len(truth)):
            return wrong(f"an expression of {len(answer)} characters is too long")
        told = f"answer {answer[:SHOWN]!r}, truth {truth[:SHOWN]!r}"
        request = {"truth": truth, "answer": answer, "decimals": rules.decimals}
        try:
            verdict = await _worker.judge(request, sound=request | {"answer": truth})
        except AtAnswer as error:
            return wrong(f"{told}: at this answer math-verify {error}")
        if verdict == "no truth":
            raise TaskError(f"task {task.id}: no mathematics can be read in its truth {truth[:SHOWN]!r}", fix="write it as LaTeX")
        if verdict == "no answer":
            return wrong(f"{told}: no mathematics can be read in it")
        return Score(value=float(verdict == "equal"), evidence=told)


def expression(text: str) -> str:
    """The one expression that is judged; its LaTeX braces balance."""
    start = text.rfind(_BOX)
    if start >= 0:
        text = text[start + len(_BOX) :]
        text = text[: _closing(text)]
    elif inline := list(_INLINE.finditer(text)):
        text = next(filter(None, inline[-1].groups()), "")
    text = text.strip().removesuffix(".").strip()
    if match := _SCIENTIFIC.fullmatch(text):
        text = f"{match[1]} \\times 10^{{{int(match[2])}}}"
    return text if _closing(text) == len(text) else ""


def _closing(text: str) -> int:
    """Where the brace closes that was open before `text`; its length when none does; -1 when one in it stays open."""
    depth = 0
    for at, letter in enumerate(text):
        if at and text[at - 1] == "\\":
            continue
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return at
    return len(text) if depth == 0 else -1


def prepare() -> None:
    """In the process, before anything is asked."""
    import logging

    import math_verify  # noqa: F401

    logging.disable()


def verdict(request: Mapping[str, Any]) -> str:
    """In the process: "equal", "different", or "no truth" or "no answer" where nothing can be read."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[Any]:
        box = f"{_BOX}{text}}}"
        found: list[Any] = parse(
            box, config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None, raise_on_error=True
        )
        return found

    truth = read(request["truth"]) if request["truth"] else []
    if not truth:
        return "no truth"
    answer = read(request["answer"])
    if not answer:
        return "no answer"
    same = verify(truth, answer, float_rounding=request["decimals"], timeout_seconds=None)
    return "equal" if same else "different"


_worker = Worker(verdict, prepare=prepare, deadline_s=DEADLINE_S, processes=2)
mathematics = Mathematics()
