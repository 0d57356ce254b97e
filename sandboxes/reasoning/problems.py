"""Problems of a dataset, by number in the training or held-out split. The package reasoning-gym is imported on first use.

A dataset of the package is a function of a seed and an index, and most datasets use only the sum of the two. The splits therefore draw from
disjoint ranges of seeds. That is not sufficient, because a generator with few problems generates the same question from many seeds. A hash
of the question therefore also assigns the question to a split, and if a question belongs to the other split, another question is drawn. No
run ever trains on a held-out question.
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
"""One question in `HELDOUT_SHARE` is held out."""
ATTEMPTS = 64
"""Maximum number of draws per problem. The held-out split needs `HELDOUT_SHARE` on average. A small generator's split may be empty."""
CHUNK = 64  # problems per dataset object; some objects read files when they are created
_TRIED = 8  # number of problems generated when the family is opened, to detect keys that break the generator
_PART = 1 << 30  # size of the range of a split's first seed
_STRIDE = 1 << 20  # distance between the seeds of successive draws for a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem and its origin, from which `entry_of` regenerates the problem."""

    source: Source
    seed: int
    index: int
    question: str
    answer: str

    def origin(self) -> dict[str, Any]:
        """Returns the argument of `entry_of` for this problem, as plain JSON."""
        return {
            "dataset": self.source.name,
            "level": self.source.level,
            "config": dict(self.source.keys),
            "seed": self.seed,
            "index": self.index,
            "question": digest(self.question),
        }


def digest(question: str) -> str:
    """Returns a hash of a question that ignores white space and case."""
    return hashlib.sha256(" ".join(question.split()).casefold().encode("utf-8", "surrogatepass")).hexdigest()


def is_heldout(question: str) -> bool:
    """Whether the question belongs to the held-out split."""
    return int(digest(question)[:8], 16) % HELDOUT_SHARE == 0


def problem(source: Source, *, seed: int, heldout: bool, number: int, but: frozenset[str] = frozenset()) -> Problem:
    """Returns problem `number` of a dataset's split: a pure function of its arguments.

    Args:
        but: digests of questions to skip, such as those in prompts.

    Raises `TaskError` if the generator yields no problem for this split in `ATTEMPTS` draws, fails, or yields a problem without an answer.
    """
    first = _first_seed(source.name, seed, heldout)
    for attempt in range(ATTEMPTS):
        seed_of_chunk, index = first + attempt * _STRIDE + number // CHUNK * CHUNK, number % CHUNK
        drawn = entry(source, seed_of_chunk, index)
        question, answer = drawn["question"], drawn["answer"]
        if not isinstance(answer, str):
            raise TaskError(f"reasoning-gym's {source.name} generated a problem without an answer")
        if not answer.strip():
            continue  # for example a program in `ab` that cancels out; an empty answer would be correct
        if is_heldout(question) == heldout and digest(question) not in but:
            return Problem(source=source, seed=seed_of_chunk, index=index, question=question, answer=answer)
    part = "held-out" if heldout else "training"
    raise TaskError(
        f"{ATTEMPTS} draws of reasoning-gym's {source.name} yielded no {part} question, because it generates too few different questions"
    )


def entry(source: Source, seed: int, index: int) -> Mapping[str, Any]:
    """Returns the package's entry for a problem: question, answer and metadata.

    The entry does not depend on earlier calls, even though one generator changes the decimal precision.

    Raises `TaskError` if the generator raises an error.
    """
    return _entry(dataset(source, seed), index, source)


def _entry(data: Any, index: int, source: Source) -> Mapping[str, Any]:
    try:
        with decimal.localcontext(decimal.Context()):
            drawn: Mapping[str, Any] = data[index]
    except Exception as error:
        raise TaskError(
            f"reasoning-gym's {source.name} generated no problem with {_settings_text(source)}: {type(error).__name__}: {error}",
            fix="change its keys or level, or use a different dataset",
        ) from error
    return drawn


def entry_of(origin: Mapping[str, Any], answer: str) -> tuple[Any, Mapping[str, Any]]:
    """Returns the dataset and the entry for a problem's origin (`Problem.origin`), for the scorer.

    Raises `TaskError` if the package no longer generates the problem that it generated when the task was created.
    """
    source = Source(name=origin["dataset"], level=origin["level"], keys=origin["config"])
    drawn = copy.deepcopy(_cached_entry(json.dumps(origin, sort_keys=True)))  # copied because scorers modify it
    if drawn["answer"] != answer or digest(drawn["question"]) != origin["question"]:
        raise TaskError(f"reasoning-gym's {source.name} no longer generates this problem: its version differs from the task's")
    return dataset(source, origin["seed"]), drawn


@lru_cache(maxsize=32)
def _cached_entry(origin: str) -> Mapping[str, Any]:
    """Returns the entry of a problem.

    Entries are cached, because a group's episodes need the same entry, and some entries are slow to generate.
    """
    data = json.loads(origin)
    return entry(Source(name=data["dataset"], level=data["level"], keys=data["config"]), data["seed"], data["index"])


def dataset(source: Source, seed: int) -> Any:
    """Returns a dataset object from the package. Raises the errors of `check`."""
    return _dataset(source.name, source.level, json.dumps(dict(source.keys), sort_keys=True), seed)


@lru_cache(maxsize=256)
def _dataset(name: str, level: int | None, keys: str, seed: int) -> Any:
    return _create(Source(name=name, level=level, keys=json.loads(keys)), seed=seed, size=CHUNK)


def check(source: Source) -> None:
    """Raises `UserError` if the package is missing or does not contain the dataset, or if the dataset rejects its level or a key."""
    _create(source, seed=0, size=1)


def try_out(source: Source) -> None:
    """Generates a dataset's first problems. Raises `UserError` as `check` does, and if a problem cannot be generated."""
    data = _create(source, seed=0, size=_TRIED)
    for index in range(_TRIED):
        _entry(data, index, source)


def _create(source: Source, *, seed: int, size: int) -> Any:
    from sandboxes.reasoning.package import configuration, dataset_class  # importing reasoning-gym takes seconds

    config = configuration(source)
    try:
        settings = replace(config, seed=seed, size=size)
        if hasattr(settings, "validate"):
            settings.validate()
        return dataset_class(source.name)(config=settings)
    except (AssertionError, ValueError, TypeError) as error:
        known = ", ".join(sorted(field.name for field in fields(config) if field.name not in ("seed", "size")))
        raise UserError(
            f"reasoning-gym's {source.name} rejects {_settings_text(source)}: {str(error) or type(error).__name__}",
            fix=f"correct the values; its keys are {known}",
        ) from None


def _settings_text(source: Source) -> str:
    """Returns a description of a dataset's keys or, if no keys are set, of its level, for error messages."""
    keys = ", ".join(f"{key}={value!r}" for key, value in source.keys.items())
    return keys or ("its default keys" if source.level is None else f"level {source.level}")


def _first_seed(name: str, seed: int, heldout: bool) -> int:
    """Returns a split's first seed: below 2**30 for training, at least 2**31 for held-out, and below 2**32, as numpy requires."""
    drawn = int.from_bytes(hashlib.sha256(f"reasoning:{seed}:{name}:{heldout}".encode()).digest()[:4])
    return (2 * _PART if heldout else 0) + drawn % _PART
