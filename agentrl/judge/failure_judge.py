"""A judge that names failures where no rule is sure: which failure came first, at which turn, how sure that is, or that it cannot tell.

# triage/reader.py
from agentrl.judge.failure_judge import FailureJudge
from agentrl.judge import Endpoint

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
from agentrl.judge.endpoint import Endpoint
from agentrl.judge.ledger import FILE, Budget, JudgeLedger, JudgeUsage
from agentrl.judge.query import WORDING, ChatQuery, JudgeClient, digest
from agentrl.judge.untrusted import truncate_middle
from agentrl.plugins.references import resolve

MAX_TRACE = 40_000
"""Characters of a trace that are shown."""
_CLOSING_S = 60.0
_MOST_TURN = 100_000


@dataclass(slots=True)
class _State:
    ledger: JudgeLedger = field(default_factory=lambda: JudgeLedger(None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FailureJudge:
    """An `agentrl.failure.triage.TriageJudge` that asks a model.

    Answers are kept by content, and counted, in judges.sqlite of the run folder; a budget is held against it. A verdict that cannot be read
    and one with less than `least` confidence are abstentions.
    """

    endpoint: Endpoint
    name: str = "judge"  # in the tag: judge:NAME
    classes: Mapping[str, str] = field(default_factory=dict)  # names of yours with what they mean, beside `TAXONOMY`
    least: float = 0.5  # confidence of a tag that is given
    budget: Budget = field(default_factory=Budget)
    _state: _State = field(default_factory=_State, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            for one in self.classes:
                check_tag_name(one)
        except ValueError as error:
            raise UserError(f"FailureJudge.classes: {error}", fix="write it as wrong_unit") from None
        if not 0 <= self.least <= 1:
            raise UserError(f"FailureJudge.least lies between 0 and 1, got {self.least}", fix="such as 0.5")

    @property
    def identity(self) -> str:
        """A hash of all that decides about its verdicts: model, parameters, prompt."""
        kind = {"kind": type(self).__name__, "wording": WORDING, "endpoint": self.endpoint.identity()}
        return digest({**kind, "instructions": self._instructions(), "least": self.least})

    @property
    def timeout_s(self) -> float:
        """How long a verdict may take: a judge that is down delays."""
        return self.endpoint.patience_s + _CLOSING_S

    def prepare(self, folder: Path) -> None:
        """Called before the first trace, with the run folder."""
        self._state.ledger = JudgeLedger(folder / FILE)

    def spent(self) -> JudgeUsage:
        """What it has been asked and has cost."""
        return self._state.ledger.spent(self.identity)

    async def close(self) -> None:
        """Closes its connections and its ledger."""
        await self.endpoint.close()
        self._state.ledger.close()

    async def __call__(self, text: str) -> Tag | None:
        """The tag of a trace, told as text; None where it abstains. Raises `JudgeError` where nobody answers, or the budget is spent."""
        asker = JudgeClient(endpoint=self.endpoint, ledger=self._state.ledger, budget=self.budget, judge=self.identity)
        question = ChatQuery(instructions=self._instructions(), data={"trace": truncate_middle(text, MAX_TRACE)}, schema=self._schema())
        heard = await asker.ask(question, self._read)
        if heard.unavailable:
            raise JudgeError(heard.reason)
        tag: Tag | None = heard.verdict
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

    def _read(self, said: dict[str, Any]) -> Tag:
        name = verdict.choice(said, "name", list(self._names()))
        turn = verdict.whole_number(said.get("turn"), low=0, high=_MOST_TURN, name="turn")
        trajectory = verdict.whole_number(said.get("trajectory"), low=0, high=_MOST_TURN, name="trajectory")
        sure = verdict.whole_number(said.get("confidence"), low=0, high=100, name="confidence")
        tag = Tag(name=name, by=f"judge:{self.name}", confidence=sure / 100, note=verdict.reasoning(said)[:400])
        return replace(tag, trajectory=trajectory, turn=turn - 1) if turn else tag


def load_failure_judge(reference: str) -> FailureJudge:
    """The judge that a reference names. Raises `PluginError` for anything else."""
    found = resolve(reference)
    if not isinstance(found, FailureJudge):
        raise PluginError(f"{reference!r} is no judge of failures", fix="name an object such as FailureJudge(endpoint=Endpoint(...))")
    return found
