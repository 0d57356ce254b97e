"""The record of a reward model: its input and the scale of its output, in the file `reward_model.json` next to its weights.

`agentrl tune reward` writes it and the judge `RewardModel` reads it, so training and judging show the model the same text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from agentrl.base.files import sha256_file, write_atomically
from agentrl.base.untrusted_files import read_bytes
from agentrl.base.user_code import printable
from agentrl.errors import UserError
from agentrl.judge.rendering import PromptField, render_field
from agentrl.judge.untrusted import neutralize
from agentrl.records import Episode, Task

FILE = "reward_model.json"
FORMAT = 1
_LARGEST = 1 << 16  # maximum size of the file in bytes
_ANSWERS = ("answer", "transcript", "outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """The input of a reward model, and the scale that turns its number into a value: 1 / (1 + exp(-(number - offset) / scale))."""

    shows: tuple[PromptField, ...]  # in this order, each with a heading; empty: the episode's tokens
    offset: float  # number that corresponds to a value of 0.5
    scale: float
    max_tokens: int  # longer texts are truncated at the start
    weights: str  # sha256 of model.safetensors
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"unknown format {self.format}; this version reads {FORMAT}")
        if not (math.isfinite(self.offset) and 0 < self.scale < math.inf and self.max_tokens > 0):
            raise ValueError("offset must be finite, scale and max_tokens must be above 0")

    def value(self, number: float) -> float:
        """The value from 0 to 1 of a number."""
        steps = (number - self.offset) / self.scale
        return 1 / (1 + math.exp(-steps)) if steps >= 0 else math.exp(max(steps, -700.0)) / (1 + math.exp(max(steps, -700.0)))


_ADAPTER = TypeAdapter(RewardRecord)


def validate_shows(names: tuple[str, ...]) -> tuple[PromptField, ...]:
    """Returns the names as `PromptField`. Raises `UserError` for unknown or repeated names, or if no name shows the agent's work."""
    known = get_args(PromptField)
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names) or not {*_ANSWERS} & {*names}:
        raise UserError(
            f"a reward model cannot be shown {','.join(names) or 'nothing'!r}",
            fix=f"use some of {', '.join(known)}, each once, with at least one of {', '.join(_ANSWERS)}",
        )
    return tuple(field for name in names for field in known if field == name)


def reward_model_text(shows: Sequence[PromptField], task: Task, episode: Episode, *, reference: str) -> str:
    """Returns the input text of a reward model, for training and judging. Control tokens are broken up (`neutralize`).

    Args:
        reference: key of `Task.data` that holds the reference answer.
    """
    return "\n\n".join(f"## {field}\n{neutralize(render_field(field, task, episode, reference=reference))}" for field in shows)


def episode_tokens(episode: Episode) -> list[int]:
    """All token ids of an episode with one trajectory, in context order; empty for any other episode."""
    (main, *others) = episode.trajectories or (None,)
    if main is None or others:
        return []
    return [token for turn in main.turns for ids in (turn.prompt_ids, turn.completion_ids) for token in ids]


def save_record(folder: Path, *, shows: tuple[PromptField, ...], offset: float, scale: float, max_tokens: int) -> RewardRecord:
    """Writes the record of the model in `folder`."""
    weights = sha256_file(folder / "model.safetensors")
    record = RewardRecord(shows=shows, offset=offset, scale=scale, max_tokens=max_tokens, weights=weights)
    write_atomically(folder / FILE, json.dumps(asdict(record), indent=1) + "\n")
    return record


def load_record(folder: Path) -> RewardRecord:
    """Reads a model's record. Raises `UserError` if it is missing or invalid, or does not match the weights next to it."""
    path, fix = folder / FILE, "use a folder that agentrl tune reward has written"
    try:
        record = _ADAPTER.validate_json(read_bytes(path, most=_LARGEST))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {FILE}, so the input of this model is unknown", fix=fix) from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {printable(str(first['msg']), 300)}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {printable(str(error), 300)}", fix=fix) from None
    weights = folder / "model.safetensors"
    if not weights.is_file() or sha256_file(weights) != record.weights:
        raise UserError(f"{path} does not match the weights next to it", fix=fix)
    return record
