"""Compares text exactly: after stripping, the answer must equal the truth or one of several truths.

rewards.exact:exact                                  with task.data = {"answer": "north"}; or ["north", "the north"]
name = Exact(case=False, after="Answer:")            in rewards/mine.py, referenced as rewards.mine:name
"""

from __future__ import annotations

import unicodedata
from typing import ClassVar

from pydantic import Field

from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, MAX_ANSWER_CHARS, ConfiguredVerifier, answer_of, zero_score


class Exact(ConfiguredVerifier):
    """Scores 1 if the answer equals a truth, else 0. Unicode is compared in composed form (NFC). Settings are in `task.data["exact"]`."""

    name: ClassVar[str] = "exact"

    case: bool = True
    """Whether the comparison is case-sensitive."""
    spaces: bool = True
    """Whether a run of white space within the text differs from a single space."""
    after: str = ""
    """The answer is the text after the last occurrence of this string. Empty: the answer is the full submission."""
    longest: int = Field(MAX_ANSWER_CHARS, gt=0)
    """Maximum length in characters; a longer answer is wrong."""

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the answer. Raises `TaskError` if the truth or a setting is invalid."""
        rules = self.for_task(task)
        truth = rules.truth_of(task)
        truths = truth if isinstance(truth, list) else [truth]
        if not truths or not all(isinstance(text, str | int | float) and rules._plain(str(text)) for text in truths):
            raise TaskError(f"task {task.id}: the truth of an exact answer must be a non-empty string, or a list of such strings")
        if (least := min(len(rules._plain(str(text))) for text in truths)) > rules.longest:
            raise TaskError(f"task {task.id}: its shortest truth has {least} characters, but an answer may have at most {rules.longest}")
        answer, problem = answer_of(episode, after=rules.after, longest=rules.longest)
        if problem:
            return zero_score(problem)
        right = rules._plain(answer) in {rules._plain(str(text)) for text in truths}
        return Score(value=float(right), evidence=f"answer {answer[:EVIDENCE_CHARS]!r}, truth {str(truths[0])[:EVIDENCE_CHARS]!r}")

    def _plain(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text.strip())
        if not self.spaces:
            text = " ".join(text.split())
        return text if self.case else text.casefold()


exact = Exact()
