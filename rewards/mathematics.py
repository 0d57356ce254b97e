r"""Scores mathematics: the answer must be an expression that equals the truth, in evaluated form.

    rewards.mathematics:mathematics                      with task.data = {"answer": "\\frac{1}{2}"}

`rewards.notation` parses expressions, and `rewards.algebra` compares them. The package math-verify parses integrals, sums and limits. Such
expressions are allowed as truths and, with `unevaluated`, as answers. Some short expressions take hours to compute, so parsing and
comparing run in a subprocess with a deadline (`agentrl.reward.worker`). Each request contains one truth and one answer, and receives one
verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, ConfiguredVerifier, answer_of, require_package, zero_score
from agentrl.reward.worker import QUEUE_TIMEOUT_S, AnswerFault, SubprocessWorker
from rewards.asked import names_word, requests_word
from rewards.extract import expression, formulas
from rewards.notation import read
from rewards.scalars import Node
from rewards.signs import Unreadable, plain
from rewards.units import unit

DEADLINE_S = 3.0
LONGEST = 4000  # maximum length of a submission in characters
LONGEST_EXPRESSION = 400
LONGEST_PROMPT = 20_000
MOST_FORMULAS = 50  # maximum number of formulas in a prompt
_LOOSE = r"(?:\s|[{}$]|\\(?:[,;:! ]|quad|qquad|displaystyle))"  # allowed anywhere in an expression
_WORD_OR_VARIABLES = re.compile(r"\d\s+([A-Za-z]{2,3})(?![A-Za-z])")
IsWord = Callable[[str, str], bool]
"""Whether letters after a number are a word, given the question and the letters."""


class Mathematics(ConfiguredVerifier):
    r"""Scores 1 if the answer equals the truth and is in evaluated form, else 0. Settings are in `task.data["mathematics"]`.

    One expression in the submission is parsed, in LaTeX or calculator notation: the last `\boxed{}` or the text after the last `####`,
    otherwise the text after the last "answer is", otherwise the full submission (`rewards.extract`). If this text contains `$...$`, only
    the last `$...$` counts. Several answers must therefore be written as a list. An answer is wrong if it cannot be parsed, or if parsing
    or comparing fails for the answer but succeeds for the truth. A truth that cannot be parsed is a task fault.

    Evaluated form means the following. If the truth is a number, the answer must be a number: digits, optionally with a sign, a fraction
    line, a power of ten or a percent sign. Otherwise, the answer may use roots, constants and variables, and those functions, factorials
    and similar operations that the truth uses. Numbers, like terms and common factors must be combined, and the answer must not repeat an
    expression from the question in a form that differs from the truth's. A leading `x =` is allowed. A chain of equations is not a value.
    Words are compared as words, and numerals are compared with their base. The answer may omit the unit. If it has a unit, this must be the
    truth's unit or, if the truth has no unit, a unit that the question names. 5\% equals 0.05, and also 5 if the question asks for a
    percentage.
    """

    name: ClassVar[str] = "mathematics"
    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S

    decimals: int = Field(6, ge=0, le=15)
    """Number of decimal places (for numbers below 0.1, significant digits) that are compared if either number is a decimal."""
    unevaluated: bool = False
    """Whether an answer with the correct value may have any form: 2+3, 5!, an integral, the question's expression."""
    after: str = ""
    """The answer is the text after the last occurrence of this string. Empty: the answer is the full submission."""

    def model_post_init(self, context: Any) -> None:
        """Raises `PluginError` if the package is missing."""
        require_package("math_verify")

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the answer. Raises `TaskError` if the truth or a setting is invalid."""
        rules = self.for_task(task)
        truth = expression(str(rules.truth_of(task)))
        text, problem = answer_of(episode, after=rules.after, longest=LONGEST)
        answer = expression(text)
        if problem or not answer:
            return zero_score(problem or "the answer is empty")
        if len(answer) > max(LONGEST_EXPRESSION, 4 * len(truth)):
            return zero_score(f"an expression of {len(answer)} characters is too long")
        evidence = f"answer {answer[:EVIDENCE_CHARS]!r}, truth {truth[:EVIDENCE_CHARS]!r}"
        prompt = "\n".join(message.content for message in task.prompt)[-LONGEST_PROMPT:]
        request = {"truth": truth, "answer": answer, "decimals": rules.decimals, "unevaluated": rules.unevaluated, "prompt": prompt}
        try:
            verdict, why = await _worker.evaluate(request, control=request | {"answer": truth})
        except AnswerFault as error:
            return zero_score(f"{evidence}: the comparison with this answer {error}")
        if verdict == "no truth":
            raise TaskError(
                f"task {task.id}: its truth cannot be read as mathematics: {truth[:EVIDENCE_CHARS]!r}: {why}", fix="write it as LaTeX"
            )
        return Score(value=float(verdict == "equal"), evidence=f"{evidence}{why and ': ' + why}"[:500])


def prepare() -> None:
    """Imports the large modules. Runs in the subprocess before the first request."""
    import logging

    import math_verify  # noqa: F401

    import rewards.algebra  # noqa: F401

    logging.disable()


def verdict(request: Mapping[str, Any]) -> tuple[str, str]:
    """Returns ("equal", "different", or "no truth" if the truth cannot be parsed; the reason). Runs in the subprocess."""
    outcome = _verdict(request, _is_requested)
    if outcome[0] == "different":
        texts = f"{request['truth']}\n{request['answer']}"
        is_word = partial(_is_mentioned, texts=texts)
        if any(is_word(request["prompt"], word) != _is_requested(request["prompt"], word) for word in _WORD_OR_VARIABLES.findall(texts)):
            return _verdict(request, is_word)
    return outcome


def _is_requested(prompt: str, word: str) -> bool:
    return unit(word) is not None or requests_word(prompt, word)


def _is_mentioned(prompt: str, word: str, *, texts: str) -> bool:
    """Whether letters are a known unit, unless the truth or the answer contains them as variables (`2cd^2`, `2 c d^2`), or are a word of
    the question, or of a `\\text{}` in the truth or the answer."""
    letters = word.partition("^")[0]
    if unit(word) is not None:
        spaced = r"(?:\s|\*|\\cdot)+".join(letters)
        return re.search(rf"\d(?:{letters}|\s*{spaced})(?![A-Za-z])", texts) is None
    return names_word(prompt, word) or re.search(rf"\\(?:text|mathrm|mbox)\s*\{{\s*{letters}\s*\}}", texts) is not None


def _verdict(request: Mapping[str, Any], is_word: IsWord) -> tuple[str, str]:
    from rewards.algebra import Comparison, alike

    truth, answer, prompt = request["truth"], request["answer"], request["prompt"]
    wanted, problem = _read(truth, prompt, is_word, wide=True)
    if wanted is None:
        return "no truth", problem
    given, problem = _read(answer, prompt, is_word, wide=request["unevaluated"])
    if given is None and " ".join(answer.split()) != " ".join(truth.split()):
        return "different", f"no value can be read in the answer: it has {problem}"
    given = given or wanted  # the answer equals the truth; the truth is still computed, because a truth that takes too long is a task fault
    comparison = Comparison(request["decimals"], any_form=request["unevaluated"], prompt=prompt)
    if not comparison.same(wanted, given):
        return "different", "it equals the truth but is not evaluated" if comparison.unfinished else ""
    if given.kind != wanted.kind and given.kind in ("unit", "percent"):  # a number with a unit or a percent sign counts as a number
        bare = given.parts[0]
        given = bare if given.kind == "unit" or comparison.same(wanted, bare) else given
    if not request["unevaluated"] and _restates(given, answer, prompt) and not alike(wanted, given):
        return "different", "it equals the truth but copies an expression of the question"
    return "equal", ""


def _read(text: str, prompt: str, is_word: IsWord, *, wide: bool) -> tuple[Node | None, str]:
    """Returns (tree, "") or (None, reason). If `wide` is true, also parses expressions that only math-verify can parse."""
    from rewards.algebra import read_wide

    try:
        return _resolved(read(text), prompt, is_word), ""
    except (Unreadable, ZeroDivisionError) as error:
        problem = str(error)
    return (read_wide(text) if wide else None), problem


def _resolved(node: Node, prompt: str, is_word: IsWord) -> Node:
    """Replaces letters after a number that may be a word or variables: `5 men` has a unit only if `men` is a word, as `is_word` decides."""
    if node.kind == "unit" and len(node.parts) > 1:
        return node._replace(parts=node.parts[:1]) if is_word(prompt, str(node.value)) else node.parts[1]
    return node._replace(parts=tuple(_resolved(part, prompt, is_word) for part in node.parts))


def _squeezed(text: str) -> str:
    return re.sub(_LOOSE, "", _starred(text))


def _starred(text: str) -> str:
    return plain(text).replace("\\cdot", "*").replace("\\times", "*")


def _restates(given: Node, answer: str, prompt: str) -> bool:
    """Whether the answer is an expression that the question contains. A number, a word or a variable does not count."""
    from rewards.algebra import alike

    if not given.parts or (given.kind == "neg" and not given.parts[0].parts):
        return False
    pattern = f"{_LOOSE}*".join(map(re.escape, _squeezed(answer)))
    if re.search(rf"(?<![\w.^\\])(?:{pattern})(?![\w^]|\.\d)", _starred(prompt), re.ASCII):
        return True
    written = formulas(prompt)[:MOST_FORMULAS]
    return any(
        alike(given, tree)
        for tree, _ in (_read(text[:LONGEST_EXPRESSION], prompt, _is_requested, wide=False) for text in written)
        if tree is not None
    )


_worker = SubprocessWorker(verdict, prepare=prepare, deadline_s=DEADLINE_S, processes=2)
mathematics = Mathematics()
