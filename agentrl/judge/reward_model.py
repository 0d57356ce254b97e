"""A judge that is a reward model.

The model returns one number for an episode, which is scaled to a value from 0 to 1. vLLM serves it at `/classify`.

mine = RewardModel(endpoint=ScoreEndpoint(url=served("mine"), model="mine"))     # judge_servers={"mine": {"model": "models/reward"}}

The record of a reward model is the file `reward_model.json` next to its weights. The record describes the model's input and the scale of
the model's output.

`agentrl tune reward` writes the record, and the judge `RewardModel` reads it. Because of the record, the model receives the same input in
training and in judging.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from agentrl.base.error_text import reason_text
from agentrl.base.files import sha256_file, write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.judge.endpoint import CHARS_PER_TOKEN, Endpoint, Reply, token_usage
from agentrl.judge.model import ModelJudge
from agentrl.judge.query import ChatQuery
from agentrl.judge.rendering import PromptField, render_field
from agentrl.judge.servers import ServedUrl
from agentrl.judge.untrusted import neutralize
from agentrl.judge.verdict import Unreadable
from agentrl.records import Episode, Score, Task

FILE = "reward_model.json"
FORMAT = 1
_LARGEST = 1 << 16  # maximum size of the file in bytes
_ANSWERS = ("answer", "transcript", "outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """The input of a reward model, and the scale that maps the model's number to a value: 1 / (1 + exp(-(number - offset) / scale))."""

    shows: tuple[PromptField, ...]  # fields shown in this order, each with a heading; empty means that the model reads the episode's tokens
    offset: float  # number that corresponds to a value of 0.5
    scale: float
    max_tokens: int  # longer input is truncated at the start
    weights: str  # sha256 of model.safetensors
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"unknown format {self.format}; this version reads {FORMAT}")
        if not (math.isfinite(self.offset) and 0 < self.scale < math.inf and self.max_tokens > 0):
            raise ValueError("offset must be finite, and scale and max_tokens must be above 0")

    def value(self, number: float) -> float:
        """Scales a number that the model returned to a value from 0 to 1."""
        steps = (number - self.offset) / self.scale
        return 1 / (1 + math.exp(-steps)) if steps >= 0 else math.exp(max(steps, -700.0)) / (1 + math.exp(max(steps, -700.0)))


_ADAPTER = TypeAdapter(RewardRecord)


def validate_shows(names: tuple[str, ...]) -> tuple[PromptField, ...]:
    """Returns the names as `PromptField`s. Raises `UserError` if a name is unknown or repeated, or if no field shows the agent's work."""
    known = get_args(PromptField)
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names) or not {*_ANSWERS} & {*names}:
        raise UserError(
            f"{','.join(names) or 'nothing'!r} is not a valid input of a reward model",
            fix=f"use some of {', '.join(known)}, each once, with at least one of {', '.join(_ANSWERS)}",
        )
    return tuple(field for name in names for field in known if field == name)


def reward_model_text(shows: Sequence[PromptField], task: Task, episode: Episode, *, reference: str) -> str:
    """Returns the input text of a reward model, for training and judging. Control tokens in the text are broken up (`neutralize`).

    Args:
        reference: key of `Task.data` that holds the reference answer.
    """
    return "\n\n".join(f"## {field}\n{neutralize(render_field(field, task, episode, reference=reference))}" for field in shows)


def episode_tokens(episode: Episode) -> list[int]:
    """Returns all token ids of an episode with exactly one trajectory, in context order; empty for any other episode."""
    (main, *others) = episode.trajectories or (None,)
    if main is None or others:
        return []
    return [token for turn in main.turns for ids in (turn.prompt_ids, turn.completion_ids) for token in ids]


def save_record(folder: Path, *, shows: tuple[PromptField, ...], offset: float, scale: float, max_tokens: int) -> RewardRecord:
    """Writes and returns the record of the model in `folder`, which must contain `model.safetensors`."""
    weights = sha256_file(folder / "model.safetensors")
    record = RewardRecord(shows=shows, offset=offset, scale=scale, max_tokens=max_tokens, weights=weights)
    write_atomically(folder / FILE, json.dumps(asdict(record), indent=1) + "\n")
    return record


def load_record(folder: Path) -> RewardRecord:
    """Reads a reward model's record.

    Raises `UserError` if the record is missing or invalid, or does not match the weights in the folder.
    """
    path, fix = folder / FILE, "use a folder that agentrl tune reward has written"
    try:
        record = _ADAPTER.validate_json(read_bytes(path, most=_LARGEST))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {FILE}, so the input of this model is unknown", fix=fix) from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {printable(str(first['msg']), 300)}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {printable(reason_text(error), 300)}", fix=fix) from None
    weights = folder / "model.safetensors"
    if not weights.is_file() or sha256_file(weights) != record.weights:
        raise UserError(f"{path} does not match the weights next to it", fix=fix)
    return record


_ROUTE = "classify"
_MOST = 1e30  # a larger number is invalid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreEndpoint(Endpoint):
    """The address of a reward model: the route `/classify` of a vLLM server. A `/v1` at the end of `url` is optional.

    Timeouts, back-off, connections and limits work as in `Endpoint`. A sampling setting raises `UserError`: it would have no effect.
    """

    temperature: float | None = None
    structured: Literal["auto", "always", "never"] = "never"

    def __post_init__(self) -> None:
        Endpoint.__post_init__(self)
        defaults = {"temperature": None, "structured": "never", "max_tokens": 1024, "tokens_name": "max_tokens", "seed": None}
        if changed := [name for name, value in defaults.items() if getattr(self, name) != value]:
            raise UserError(f"ScoreEndpoint.{changed[0]} has no effect: a reward model does not sample", fix="remove it")

    def _address(self) -> str:
        return f"{self._base().removesuffix('/v1')}/{_ROUTE}"

    def _body(self, messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
        # Requests the raw number, without the default sigmoid. Input that is too long is truncated: if it were rejected, an agent could
        # avoid being judged by writing too much.
        fixed = {"use_activation": False, "truncate_prompt_tokens": -1, "truncation_side": "left"}
        return {"model": self.model, "input": messages[0]["content"], **self.options, **more, **fixed}

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> Reply:
        return parse_classification(content, self.max_bytes, query_tokens=len(messages[0]["content"]) // CHARS_PER_TOKEN)


def parse_classification(content: bytes, most: int, *, query_tokens: int) -> Reply:
    """Parses the body of a 200 response from `/classify` into the JSON text `{"number": ...}`.

    If the content is unreadable, returns it as `Reply.text` with `Reply.problem` set.

    Args:
        most: maximum size of the body in bytes.
        query_tokens: estimated number of tokens in the query.
    """
    text = content[:most].decode(errors="replace")
    nothing: dict[str, Any] = {"prompt_tokens": query_tokens, "completion_tokens": 0, "counted": False}
    if len(content) > most:
        return Reply(text=text, problem=f"the answer has more than {most:,} bytes", **nothing)
    try:
        body = json.loads(text)
        numbers = [entry["probs"] for entry in body["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Reply(text=text, problem="the answer is not a classification", **nothing)
    cost = token_usage(body.get("usage"), query_tokens, "")
    if len(numbers) != 1 or not isinstance(numbers[0], list) or len(numbers[0]) != 1:
        return Reply(text=text, problem="the answer is not a single number", **cost)
    number = numbers[0][0]
    if isinstance(number, bool) or not isinstance(number, int | float) or not -_MOST < number < _MOST:
        return Reply(text=text, problem="the number is invalid", **cost)
    return Reply(text=json.dumps({"number": float(number)}), **cost)


def parse_reward(fields: Mapping[str, Any]) -> float:
    """Returns the number in a reply. Raises `Unreadable` if the reply contains no finite number."""
    number = fields.get("number")
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise Unreadable("has no number")
    return float(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RewardQuery(ChatQuery):
    """A query that consists only of a reward model's input: text, or token ids."""

    instructions: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    schema: Mapping[str, Any] = field(default_factory=dict)
    content: str | list[int]

    def messages(self, nonce: str) -> list[dict[str, Any]]:
        """Returns the input as one message. There are no instructions, so the data needs no delimiters."""
        return [{"role": "user", "content": self.content}]

    def shorter(self) -> None:
        """Returns None, because the model must rate the full answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardModel(ModelJudge):
    """A verifier that queries a reward model from `agentrl tune reward`.

    The value of the score is from 0 to 1, and the part `number` is the model's raw output. `reward_model.json` in the model folder
    determines the model's input, so the input is the same as in training. A model that reads tokens can score only episodes with tokens
    from the policy on which the model is based, in one trajectory; an episode without tokens or with several trajectories is unscored. If
    `needs_answer` is true, answers without content score 0 without a call to the model.
    """

    asks_reward_model: ClassVar[bool] = True

    endpoint: ScoreEndpoint
    folder: str | None = None  # model folder relative to the project; None means the model of the judge server in `endpoint.url`
    needs_answer: bool = True  # False means that an episode without an answer is also scored
    _record: list[RewardRecord] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        ModelJudge.__post_init__(self)
        served = isinstance(self.endpoint.url, ServedUrl)
        if served == (self.folder is not None):
            fix = "remove folder: the recipe sets it" if served else 'set folder="models/reward", which agentrl tune reward has written'
            raise UserError(f"RewardModel {self.name}: {'folder is set twice' if served else 'folder is missing'}", fix=fix)

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """See `ModelJudge.prepare`. Also raises `UserError` if `reward_model.json` in the model folder is missing or invalid."""
        url = self.endpoint.url
        if isinstance(url, ServedUrl):
            model_folder = url.server(reward_model=True).folder
        else:
            assert self.folder is not None, "checked in __post_init__"
            model_folder = root / self.folder
        self._record[:] = [load_record(model_folder)]
        ModelJudge.prepare(self, root=root, folder=folder)

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the episode."""
        client = self._client()
        record = self._record[0]
        if self.needs_answer and (reason := self._non_answer(task, episode)):
            return Score(value=0.0, evidence=f"{self.name}: {reason}")
        if record.shows:
            content: str | list[int] = reward_model_text(record.shows, task, episode, reference=self.reference)
        else:
            content = episode_tokens(episode)[-record.max_tokens :]
        if not content:
            return Score(value=None, reason=f"{self.name}: this reward model reads the tokens of one trajectory, but the episode has none")
        answer = await client.ask(_RewardQuery(content=content), parse_reward)
        if answer.verdict is None:
            return self._unscored(answer)
        return Score(value=record.value(answer.verdict), parts={"number": answer.verdict}, evidence=f"{self.name}: {answer.verdict:g}")

    def _asks(self) -> dict[str, Any]:
        record = asdict(self._record[0]) if self._record else {}
        return {"record": record, "reference": self.reference, "needs_answer": self.needs_answer}
