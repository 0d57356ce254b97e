"""What a reward model reads and what its numbers mean: the file `reward_model.json` beside its weights.

`agentrl tune reward` writes it, and the judge `RewardModel` reads it, so that both show the model the same text.
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
_LARGEST = 1 << 16  # bytes of the file
_ANSWERS = ("answer", "transcript", "outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """What a reward model is shown, and how its number becomes a value: 1 / (1 + exp(-(number - offset) / scale))."""

    shows: tuple[PromptField, ...]  # in this order, each under its name; empty: the episode's own tokens
    offset: float  # the number that stands for a value of 0.5
    scale: float
    max_tokens: int  # longer texts lose their beginning
    weights: str  # sha256 of model.safetensors
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known; this version reads {FORMAT}")
        if not (math.isfinite(self.offset) and 0 < self.scale < math.inf and self.max_tokens > 0):
            raise ValueError("offset is finite, scale and max_tokens are above 0")

    def value(self, number: float) -> float:
        """From 0 to 1."""
        steps = (number - self.offset) / self.scale
        return 1 / (1 + math.exp(-steps)) if steps >= 0 else math.exp(max(steps, -700.0)) / (1 + math.exp(max(steps, -700.0)))


_ADAPTER = TypeAdapter(RewardRecord)


def validate_shows(names: tuple[str, ...]) -> tuple[PromptField, ...]:
    """Names of what is shown. Raises `UserError` for an unknown one, one that comes twice, and where none is the agent's."""
    known = get_args(PromptField)
    odd = [name for name in names if name not in known]
    if odd or len(set(names)) < len(names) or not {*_ANSWERS} & {*names}:
        raise UserError(
            f"a reward model cannot be shown {','.join(names) or 'nothing'!r}",
            fix=f"some of {', '.join(known)}, each once, and one of {', '.join(_ANSWERS)} among them",
        )
    return tuple(one for name in names for one in known if one == name)


def reward_model_text(shows: Sequence[PromptField], task: Task, episode: Episode, *, reference: str) -> str:
    """What a model that reads text is shown of an episode, in training and as a judge.

    Control tokens in it are broken up (`quoting.neutral`), so that nobody's words become structure.

    Args:
        reference: the key of `Task.data` that holds the reference.
    """
    return "\n\n".join(f"## {what}\n{neutralize(render_field(what, task, episode, reference=reference))}" for what in shows)


def episode_tokens(episode: Episode) -> list[int]:
    """All token ids of an episode of one trajectory, as it had them in its context; empty for any other."""
    (main, *others) = episode.trajectories or (None,)
    if main is None or others:
        return []
    return [token for turn in main.turns for ids in (turn.prompt_ids, turn.completion_ids) for token in ids]


def save_record(folder: Path, *, shows: tuple[PromptField, ...], offset: float, scale: float, max_tokens: int) -> RewardRecord:
    """Writes the record of the model in `folder`."""
    weights = sha256_file(folder / "model.safetensors")
    made = RewardRecord(shows=shows, offset=offset, scale=scale, max_tokens=max_tokens, weights=weights)
    write_atomically(folder / FILE, json.dumps(asdict(made), indent=1) + "\n")
    return made


def load_record(folder: Path) -> RewardRecord:
    """Reads a model's record. Raises `UserError` where there is none, or it is not of the weights beside it."""
    path, fix = folder / FILE, "make the model with agentrl tune reward, or name the folder that it has written"
    try:
        made = _ADAPTER.validate_json(read_bytes(path, most=_LARGEST))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no {FILE}, so that nobody can tell what this model reads", fix=fix) from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {printable(str(first['msg']), 300)}", fix=fix) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {printable(str(error), 300)}", fix=fix) from None
    weights = folder / "model.safetensors"
    if not weights.is_file() or sha256_file(weights) != made.weights:
        raise UserError(f"{path} is of other weights than those beside it", fix=fix)
    return made
