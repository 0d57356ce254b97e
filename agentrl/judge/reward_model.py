"""A reward model as a judge: one number for an episode, brought to 0 to 1. Served by vLLM's `/classify`.

mine = RewardModel(endpoint=ScoreEndpoint(url=served("mine"), model="mine"))     # with judge_servers={"mine": {"model": "models/reward"}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentrl.errors import UserError
from agentrl.judge.endpoint import CHARS_PER_TOKEN, Endpoint, Reply, token_usage
from agentrl.judge.model import ModelJudge, unscored
from agentrl.judge.non_answers import non_answer_reason
from agentrl.judge.rendering import reference_text, user_text
from agentrl.judge.reward_record import RewardRecord, episode_tokens, load_record, reward_model_text
from agentrl.judge.servers import ServedUrl
from agentrl.judge.verdict import Unreadable
from agentrl.records import Episode, Score, Task

_ROUTE = "classify"
_MOST = 1e30  # a number further from 0 is none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreEndpoint(Endpoint):
    """Where a reward model answers: the route `/classify` of a vLLM server, which `url` names with or without `/v1`.

    Patience, back-off, connections and bounds are an `Endpoint`'s; what shapes the words of an answer does nothing here.
    """

    temperature: float | None = None
    structured: Literal["auto", "always", "never"] = "never"

    def __post_init__(self) -> None:
        Endpoint.__post_init__(self)
        usual = {"temperature": None, "structured": "never", "max_tokens": 1024, "tokens_name": "max_tokens", "seed": None}
        if odd := [name for name, value in usual.items() if getattr(self, name) != value]:
            raise UserError(f"ScoreEndpoint.{odd[0]} does nothing: a reward model samples no words", fix="leave it out")

    def _address(self) -> str:
        return f"{self._base().removesuffix('/v1')}/{_ROUTE}"

    def _body(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
        # The plain number, before the sigmoid that a reward model of one class is given by default. A text that is too long loses its
        # beginning: were it refused, who writes enough would not be judged.
        fixed = {"use_activation": False, "truncate_prompt_tokens": -1, "truncation_side": "left"}
        return {"model": self.model, "input": messages[0]["content"], **self.options, **more, **fixed}

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> Reply:
        return parse_classification(content, self.max_bytes, asked=len(messages[0]["content"]) // CHARS_PER_TOKEN)


def parse_classification(content: bytes, most: int, *, asked: int) -> Reply:
    """The number in the body of a 200 of `/classify`, as the JSON object `{"number": ...}`. What cannot be read is kept, with the problem.

    Args:
        most: bytes that an answer may have.
        asked: tokens of the question, as an estimate.
    """
    text = content[:most].decode(errors="replace")
    nothing: dict[str, Any] = {"prompt_tokens": asked, "completion_tokens": 0, "counted": False}
    if len(content) > most:
        return Reply(text=text, problem=f"an answer of more than {most:,} bytes", **nothing)
    try:
        body = json.loads(text)
        numbers = [one["probs"] for one in body["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Reply(text=text, problem="an answer that is no classification", **nothing)
    cost = token_usage(body.get("usage"), asked, "")
    if len(numbers) != 1 or not isinstance(numbers[0], list) or len(numbers[0]) != 1:
        return Reply(text=text, problem="not one number, as a reward model gives", **cost)
    number = numbers[0][0]
    if isinstance(number, bool) or not isinstance(number, int | float) or not -_MOST < number < _MOST:
        return Reply(text=text, problem="a number that is none", **cost)
    return Reply(text=json.dumps({"number": float(number)}), **cost)


def parse_reward(said: Mapping[str, Any]) -> float:
    """The number of a reply. Raises `Unreadable`."""
    number = said.get("number")
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise Unreadable("gives no number")
    return float(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What the model is given: a text, or token ids."""

    what: str | list[int]
    data: Mapping[str, str] = field(default_factory=dict)
    schema: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, nonce: str) -> list[dict[str, Any]]:
        del nonce  # there are no instructions that data could be taken for
        return [{"role": "user", "content": self.what}]

    def shorter(self) -> None:
        return None  # its number is of the whole answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardModel(ModelJudge):
    """A verifier that asks a reward model of `agentrl tune reward`. The value goes from 0 to 1; the part `number` is the model's own.

    What the model is shown is what it was trained on, as the file beside its weights says. One that reads tokens judges episodes that
    have them, in the vocabulary of the policy that it was made from; others are unscored. Answers that say nothing are 0 without asking.
    """

    asks_reward_model: ClassVar[bool] = True

    endpoint: ScoreEndpoint
    folder: str | None = None  # of the model, relative to the project; None: that of the run's server, which the endpoint names
    needs_answer: bool = True  # False: an agent that hands in nothing may still score
    _record: list[RewardRecord] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        ModelJudge.__post_init__(self)
        ours = isinstance(self.endpoint.url, ServedUrl)
        if ours == (self.folder is not None):
            fix = "leave folder out: the recipe names it" if ours else 'folder="models/reward", where agentrl tune reward has written it'
            raise UserError(f"RewardModel {self.name}: {'folder is given twice' if ours else 'which model is it?'}", fix=fix)

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """See `ModelJudge.prepare`. Raises `UserError` also where the model has no record of what it reads."""
        url = self.endpoint.url
        if isinstance(url, ServedUrl):
            found = load_record(url.server(reward_model=True).folder)
        else:
            assert self.folder is not None, "checked when it was made"
            found = load_record(root / self.folder)
        self._record[:] = [found]
        ModelJudge.prepare(self, root=root, folder=folder)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        asker = self._asker()
        record = self._record[0]
        if self.needs_answer and (
            why := non_answer_reason(episode.answer, question=user_text(task), reference=reference_text(task, self.reference))
        ):
            return Score(value=0.0, evidence=f"{self.name}: {why}")
        what = (
            reward_model_text(record.shows, task, episode, reference=self.reference)
            if record.shows
            else episode_tokens(episode)[-record.max_tokens :]
        )
        if not what:
            return Score(value=None, reason=f"{self.name}: this reward model reads the tokens of one trajectory, and the episode has none")
        heard = await asker.ask(_Shown(what=what), parse_reward)
        if heard.verdict is None:
            return unscored(self.name, heard)
        return Score(value=record.value(heard.verdict), parts={"number": heard.verdict}, evidence=f"{self.name}: {heard.verdict:g}")

    def _asks(self) -> dict[str, Any]:
        record = asdict(self._record[0]) if self._record else {}
        return {"record": record, "reference": self.reference, "needs_answer": self.needs_answer}
