"""Problems of one dataset, by their number in its train or held-out part. The package reasoning-gym is imported at first use.

A dataset of the package is a function of its seed and an index, and most of them use nothing but their sum. So each part draws
from seeds of its own, and which part a question belongs to is decided by a hash of its text: generators with few problems make the
same one from many seeds, and the part keeps what falls to it and draws again for the rest. No held-out question is in training,
of whatever run, by construction.
"""

from __future__ import annotations

import copy
import decimal
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from agentrl.errors import TaskError, UserError
from sandboxes.reasoning.mixture import Source

HELDOUT_SHARE = 4
"""One question in so many is held out."""
ATTEMPTS = 64
"""Problems drawn for one of a part; the held-out part needs `HELDOUT_SHARE` on average, and a generator of very few may have none."""
CHUNK = 64  # problems that one dataset object makes: some read files when they are opened
_TRIED = 8  # problems made when the family is opened: what a key breaks, it mostly breaks in one of the first
_PART = 1 << 30  # seeds from which a part's first one is drawn
_STRIDE = 1 << 20  # seeds between one attempt at a problem and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem, and where it comes from: `entry_of` makes it again."""

    source: Source
    seed: int
    index: int
    question: str
    answer: str

    def origin(self) -> dict[str, Any]:
        """What `entry_of` needs, as plain JSON."""
        return {
            "dataset": self.source.name,
            "level": self.source.level,
            "config": dict(self.source.keys),
            "seed": self.seed,
            "index": self.index,
            "question": digest(self.question),
        }


def digest(question: str) -> str:
    """Hash of a question, whatever its white space and case."""
    return hashlib.sha256(" ".join(question.split()).casefold().encode("utf-8", "surrogatepass")).hexdigest()


def is_heldout(question: str) -> bool:
    return int(digest(question)[:8], 16) % HELDOUT_SHARE == 0


def problem(source: Source, *, seed: int, heldout: bool, number: int, but: frozenset[str] = frozenset()) -> Problem:
    """Problem `number` of a dataset's part: a pure function of its arguments.

    Args:
        but: digests of questions that are not to be had, as those that prompts show with their answers.

    Raises `TaskError` when the generator makes none for this part in `ATTEMPTS` draws.
    """
    first = _first_seed(source.name, seed, heldout)
    for attempt in range(ATTEMPTS):
        seed_of_chunk, index = first + attempt * _STRIDE + number // CHUNK * CHUNK, number % CHUNK
        made = entry(source, seed_of_chunk, index)
        question, answer = made["question"], made["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"reasoning-gym's {source.name} made a problem without an answer")
        if not answer.strip():
            continue  # as a program of `ab` that cancels out: no answer and the right one would be the same
        if is_heldout(question) == heldout and digest(question) not in but:
            return Problem(source=source, seed=seed_of_chunk, index=index, question=question, answer=answer)
    part = "held-out" if heldout else "training"
    raise TaskError(f"{ATTEMPTS} draws of reasoning-gym's {source.name} gave no {part} question: it makes too few different ones")


def entry(source: Source, seed: int, index: int) -> Mapping[str, Any]:
    """What the package says of one problem: question, answer, metadata. Whatever was made in this process before: one of its generators
    changes the precision of decimal numbers, for all of them.

    Raises `TaskError` for whatever the generator raises.
    """
    return _drawn(dataset(source, seed), index, source)


def _drawn(made: Any, index: int, source: Source) -> Mapping[str, Any]:
    try:
        with decimal.localcontext(decimal.Context()):
            drawn: Mapping[str, Any] = made[index]
    except Exception as error:
        raise TaskError(
            f"reasoning-gym's {source.name} made no problem with {_asked(source)}: {type(error).__name__}: {error}",
            fix="change these, or choose another dataset",
        ) from error
    return drawn


def entry_of(origin: Mapping[str, Any], answer: str) -> tuple[Any, Mapping[str, Any]]:
    """The dataset and the entry of a problem from `Problem.origin`, with which its scorer judges.

    Raises `TaskError` when the package makes another problem of it than when the task was made.
    """
    source = Source(name=origin["dataset"], level=origin["level"], keys=origin["config"])
    made = copy.deepcopy(_kept(json.dumps(origin, sort_keys=True)))  # scorers write into it
    if made["answer"] != answer or digest(made["question"]) != origin["question"]:
        raise TaskError(f"reasoning-gym's {source.name} no longer makes this problem: its version is another than the task's")
    return dataset(source, origin["seed"]), made


@lru_cache(maxsize=32)
def _kept(origin: str) -> Mapping[str, Any]:
    """The entries of the newest problems: those of a group are judged one after the other, and some take long to make."""
    data = json.loads(origin)
    return entry(Source(name=data["dataset"], level=data["level"], keys=data["config"]), data["seed"], data["index"])


def dataset(source: Source, seed: int) -> Any:
    """A dataset object of the package. Raises `UserError` for a name, level or key that it does not know."""
    keys = tuple(sorted((key, repr(value)) for key, value in source.keys.items()))
    return _dataset(_Hashed(source=source, identity=(source.name, source.level, keys)), seed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Hashed:
    """A source as a key of the cache: its mapping has no hash of its own."""

    source: Source
    identity: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.identity == self.identity


@lru_cache(maxsize=256)
def _dataset(key: _Hashed, seed: int) -> Any:
    return _made(key.source, seed=seed, size=CHUNK)


def check(source: Source) -> None:
    """Raises `UserError` when the package is not there, or makes no such dataset."""
    _made(source, seed=0, size=1)


def try_out(source: Source) -> None:
    """Makes a dataset's first problems. Raises `UserError` where `check` does, and when one of them cannot be made."""
    made = _made(source, seed=0, size=_TRIED)
    for index in range(_TRIED):
        _drawn(made, index, source)


def _made(source: Source, *, seed: int, size: int) -> Any:
    from sandboxes.reasoning.package import configuration, dataset_class  # reasoning-gym: seconds of importing

    config = configuration(source)
    try:
        made = replace(config, seed=seed, size=size)
        if hasattr(made, "validate"):
            made.validate()
        return dataset_class(source.name)(config=made)
    except (AssertionError, ValueError, TypeError) as error:
        known = ", ".join(sorted(field.name for field in fields(config) if field.name not in ("seed", "size")))
        raise UserError(
            f"reasoning-gym's {source.name} refuses {_asked(source)}: {str(error) or type(error).__name__}", fix=f"its keys are {known}"
        ) from None


def _asked(source: Source) -> str:
    """Its keys or its level, as a person reads them."""
    keys = ", ".join(f"{key}={value!r}" for key, value in source.keys.items())
    return keys or ("its default keys" if source.level is None else f"level {source.level}")


def _first_seed(name: str, seed: int, heldout: bool) -> int:
    """Where a part's seeds begin: below 2**30 for training, from 2**31 on for held-out. They stay below 2**32, as numpy wants it."""
    drawn = int.from_bytes(hashlib.sha256(f"reasoning:{seed}:{name}:{heldout}".encode()).digest()[:4])
    return (2 * _PART if heldout else 0) + drawn % _PART
