"""A judge that classifies traces that no triage rule can classify.

For the first error in a trace, it reports the class, the turn and a confidence.

# triage/reader.py
from agentrl.judge import Endpoint
from agentrl.judge.failure_judge import FailureJudge

reader = FailureJudge(endpoint=Endpoint(url="http://127.0.0.1:8000/v1", model="qwen3-8b"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.errors import JudgeError, PluginError, UserError
from agentrl.failure.trace import Tag
from agentrl.failure.triage import TAXONOMY, UNCLASSIFIED, check_tag_name
from agentrl.judge import verdict
from agentrl.judge.ledger import FILE, JudgeLedger
from agentrl.judge.model import JudgeBase
from agentrl.judge.query import WORDING, ChatQuery, digest
from agentrl.judge.untrusted import truncate_middle
from agentrl.plugins.references import resolve

MAX_TRACE = 40_000  # maximum length of the trace in the prompt, in characters
_MOST_TURN = 100_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FailureJudge(JudgeBase):
    """An `agentrl.failure.triage.TriageJudge` that queries a model.

    Replies are cached by content and counted in judges.sqlite in the run folder. `budget` limits the calls, tokens and cost. An unreadable
    verdict, or a verdict with a confidence below `least`, counts as an abstention. Tags from the judge have the author judge:NAME.
    """

    classes: Mapping[str, str] = field(default_factory=dict)  # additional classes -> description; see `TAXONOMY`
    least: float = 0.5  # minimum confidence of a tag

    def __post_init__(self) -> None:
        try:
            for name in self.classes:
                check_tag_name(name)
        except ValueError as error:
            raise UserError(f"FailureJudge.classes: {error}", fix="use a name such as wrong_unit") from None
        if not 0 <= self.least <= 1:
            raise UserError(f"FailureJudge.least must be from 0 to 1, got {self.least}", fix="use a value such as 0.5")

    @property
    def identity(self) -> str:
        """See `JudgeBase.identity`."""
        kind = {"kind": type(self).__name__, "wording": WORDING, "endpoint": self.endpoint.identity()}
        return digest({**kind, "instructions": self._instructions(), "least": self.least})

    def prepare(self, folder: Path) -> None:
        """Uses the ledger in the run folder. Call this method before the judge reads the first trace."""
        self._state.ledger = JudgeLedger(folder / FILE)

    async def __call__(self, text: str) -> Tag | None:
        """Returns the tag of a rendered trace; None if the judge abstains.

        Raises `JudgeError` if the model does not reply or the budget is exhausted.
        """
        query = ChatQuery(instructions=self._instructions(), data={"trace": truncate_middle(text, MAX_TRACE)}, schema=self._schema())
        answer = await self._client().ask(query, self._read)
        if answer.unavailable:
            raise JudgeError(answer.reason)
        tag: Tag | None = answer.verdict
        return tag if tag is not None and tag.confidence >= self.least else None

    def _names(self) -> dict[str, str]:
        return {**{name: meaning for name, meaning in TAXONOMY.items() if name != UNCLASSIFIED}, **self.classes}

    def _instructions(self) -> str:
        names = "\n".join(f"- {name}: {meaning}" for name, meaning in self._names().items())
        return (
            "You read the trace of an agent that failed at a task, and name the first thing that went wrong: what goes wrong later is most "
            f"often its consequence, and a mistake that the agent put right is none. The names are:\n{names}\n"
            "turn is the number of the turn where it shows first, as the trace counts them, or 0 where it is no single one. trajectory "
            "is the number in parentheses behind the agent's name, 0 where there is none. confidence is how sure you are, 0 to 100. "
            "Abstain where the trace does not show what went wrong. Keep the reasoning short."
        )

    def _schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 0}
        name = {"type": "string", "enum": list(self._names())}
        return verdict.schema({"name": name, "turn": number, "trajectory": number, "confidence": {**number, "maximum": 100}})

    def _read(self, fields: dict[str, Any]) -> Tag:
        name = verdict.choice(fields, "name", list(self._names()))
        turn = verdict.whole_number(fields.get("turn"), low=0, high=_MOST_TURN, name="turn")
        trajectory = verdict.whole_number(fields.get("trajectory"), low=0, high=_MOST_TURN, name="trajectory")
        sure = verdict.whole_number(fields.get("confidence"), low=0, high=100, name="confidence")
        tag = Tag(name=name, by=f"judge:{self.name}", confidence=sure / 100, note=verdict.reasoning(fields)[:400])
        return replace(tag, trajectory=trajectory, turn=turn - 1) if turn else tag


def load_failure_judge(reference: str) -> FailureJudge:
    """Loads the `FailureJudge` to which a plug-in reference refers. Raises `PluginError` if there is no such `FailureJudge`."""
    judge = resolve(reference)
    if not isinstance(judge, FailureJudge):
        raise PluginError(f"{reference!r} is not a FailureJudge", fix="refer to an object such as FailureJudge(endpoint=Endpoint(...))")
    return judge
