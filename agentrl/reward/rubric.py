"""A rubric combines several verifiers with weights, required criteria and caps into one score that keeps its parts.

    total = Rubric(
        parts={"right": (Numeric(relative=1e-3, unit="m"), 0.8), "short": (Length(most=200), 0.2)},
        required="right",
    )

If this code is in `rewards/mine.py`, the reference to the verifier is `rewards.mine:total`.

The value is the weighted mean of the parts, sum(w_i * v_i) / sum(w_i). The value is 0 if a required criterion fails, and caps may limit it.
All values, including the verifiers' own parts, are named parts of the score. If a part has no value, the rubric has no value.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from agentrl.base import user_code
from agentrl.base.numbers import is_at_least
from agentrl.errors import PluginError
from agentrl.plugins.references import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward.scorer import add_branches, named_parts, weighted_turns
from agentrl.reward.verifier_call import bounds_of, call_verifier, needs_sandboxes, prepare_verifier, timeout_of

AnyVerifier: TypeAlias = Verifier | SandboxVerifier | str  # a verifier, or a reference to one
Requirement: TypeAlias = AnyVerifier | float | tuple[AnyVerifier, float]
"""A verifier that must score 1; or (verifier, minimum); or only a minimum for the part with this name."""

BOUNDS = (0.0, 1.0)
PART_S = 30.0
SANDBOX_PART_S = 9000.0  # deadline of a part that uses sandboxes; such a part sets deadlines for the programs that it runs


class Rubric:
    """A verifier that combines weighted parts, required criteria and caps into a value from 0 to 1.

    Args:
        parts: name -> (verifier, weight). Weights are positive and need not sum to 1. A value outside the range 0 to 1 counts as missing.
        required: required criteria: the name of a part, a verifier, or a mapping name -> `Requirement`. The criteria are checked in
            order. If one fails, the score is 0 and no other verifier is called. A verifier that is only a required criterion has no weight.
        caps: part -> maximum of the rubric's value if the part is less than 1, or part -> (minimum, maximum), where the maximum applies
            if the part is less than the minimum.
        optional: parts that may have no value. If such a part has no value, only the weights of the other parts count, the part
            `NAME/unscored` is 1, and the evidence contains the reason.
        part_s: deadline in seconds for a part that needs no sandboxes and declares no deadline.

    Raises:
        PluginError: an argument is invalid, for example a reference does not resolve, a name is not the name of a part, a number is outside
            its range, or a verifier's bounds are not from 0 to 1.
    """

    bounds: ClassVar[tuple[float, float]] = BOUNDS

    def __init__(
        self,
        parts: Mapping[str, tuple[AnyVerifier, float]],
        *,
        required: str | Verifier | SandboxVerifier | Mapping[str, Requirement] | None = None,
        caps: Mapping[str, float | tuple[float, float]] | None = None,
        optional: tuple[str, ...] = (),
        part_s: float = PART_S,
    ) -> None:
        self._verifiers: dict[str, Any] = {}
        self._weights: dict[str, float] = {}
        self._minimums: dict[str, float] = {}
        for name, (verifier, weight) in parts.items():
            self._add(name, verifier)
            self._weights[name] = _number(weight, f"the weight of {name!r}", above=0.0)
        if not self._weights:
            raise PluginError("a rubric needs parts", fix='write Rubric(parts={"correct": (verifier, 1.0)})')
        for name, requirement in _named_requirements(required):
            self._minimums[name] = self._add_requirement(name, requirement)
        self._caps = {name: _cap(self._known(name, "caps"), cap) for name, cap in (caps or {}).items()}
        self._optional = frozenset(self._known(name, "optional") for name in ((optional,) if isinstance(optional, str) else optional))
        self._part_s = _number(part_s, "part_s", above=0.0)
        if useless := self._optional & set(self._minimums):
            raise PluginError(f"{sorted(useless)[0]!r} is both required and optional", fix="remove it from required or from optional")
        self.needs_sandboxes = any(needs_sandboxes(verifier) for verifier in self._verifiers.values())

    @property
    def timeout_s(self) -> float:
        """Deadline of the rubric in seconds. The required criteria run one after another, then the other parts run concurrently."""
        rest = max((self._limit(name) for name in self._verifiers if name not in self._minimums), default=0.0)
        return sum(map(self._limit, self._minimums)) + rest + user_code.GRACE_S

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares the verifiers that require preparation, such as judges. Raises `UserError` if a verifier cannot be used."""
        for verifier in self._verifiers.values():
            prepare_verifier(verifier, root=root, folder=folder)

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend | None = None) -> Score:
        """Scores the episode. If a part raises `InfrastructureError`, the error propagates, and the caller retries all parts."""
        scores: dict[str, Score] = {}
        for name, minimum in self._minimums.items():
            scores[name] = score = await self._call(name, task, episode, sandboxes)
            if score.value is None:
                return _unscored({name: score})
            if not is_at_least(score.value, minimum):
                note = f"required criterion {name} fails: {score.value:g}, the minimum is {minimum:g}"
                return Score(value=0.0, parts=named_parts(scores), evidence=_evidence(scores, note))
        async with asyncio.TaskGroup() as group:  # if one part raises, the others are cancelled and the caller retries all parts
            jobs = {name: group.create_task(self._call(name, task, episode, sandboxes)) for name in self._weights if name not in scores}
        return self._combined(scores | {name: job.result() for name, job in jobs.items()})

    async def _call(self, name: str, task: Task, episode: Episode, sandboxes: SandboxBackend | None) -> Score:
        verifier = self._verifiers[name]
        score = await call_verifier(verifier, f"part {name} of a rubric", task, episode, sandboxes, timeout_s=self._limit(name))
        if score.pending:
            return Score(
                value=None, reason="a rubric cannot wait for a late score: list its verifier next to the rubric, in tasks.verifiers"
            )
        if score.value is not None and not BOUNDS[0] <= score.value <= BOUNDS[1]:
            return Score(value=None, reason=f"verifier returned {score.value:g}, outside a rubric's range of 0 to 1")
        return score

    def _limit(self, name: str) -> float:
        verifier = self._verifiers[name]
        return SANDBOX_PART_S if needs_sandboxes(verifier) else timeout_of(verifier, self._part_s)

    def _combined(self, scores: Mapping[str, Score]) -> Score:
        """Returns the score of an episode that meets every required criterion."""
        missing = {name: score for name, score in scores.items() if score.value is None}
        if fatal := {name: score for name, score in missing.items() if name not in self._optional}:
            return _unscored(fatal)
        values = {name: score.value for name, score in scores.items() if score.value is not None}
        weights = {name: weight for name, weight in self._weights.items() if name in values}
        if not weights:
            return _unscored(missing)
        total = sum(weights.values())
        value = sum(weight * values[name] for name, weight in weights.items()) / total
        notes = [f"{name} has no value and does not count: {score.reason}" for name, score in missing.items()]
        for name, (minimum, cap) in self._caps.items():
            if name in values and not is_at_least(values[name], minimum) and value > cap:
                value = cap
                notes.append(f"capped at {cap:g} because {name} is {values[name]:g}")
        parts = named_parts(scores) | {f"{name}/unscored": 1.0 for name in missing}
        weighted = [(weight / total, scores[name]) for name, weight in weights.items()]
        turns = weighted_turns(weighted)
        combined = Score(value=min(max(value, 0.0), 1.0), parts=parts, evidence=_evidence(scores, *notes), turn_rewards=turns)
        return add_branches(combined, weighted)

    def _add(self, name: str, verifier: object) -> None:
        if not name or "/" in name:
            raise PluginError(f"{name!r} is not a valid part name", fix="use a non-empty name without a slash")
        resolved = resolve(verifier) if isinstance(verifier, str) else verifier
        if not callable(resolved):
            raise PluginError(f"{name!r}: {type(resolved).__name__} is not a verifier", fix="write async def score(task, episode) -> Score")
        bounds = bounds_of(resolved)
        if bounds is not None and not BOUNDS[0] <= bounds[0] <= bounds[1] <= BOUNDS[1]:
            raise PluginError(f"{name!r}: its bounds are {bounds[0]:g} to {bounds[1]:g}", fix="use verifiers with bounds from 0 to 1")
        self._verifiers[name] = resolved

    def _add_requirement(self, name: str, requirement: Any) -> float:
        """Adds a required criterion, and its verifier unless the criterion is a part. Returns the minimum that the criterion requires."""
        if isinstance(requirement, bool | int | float):
            self._known(name, "required")
            return _number(requirement, f"required {name!r}", above=0.0)
        verifier, minimum = requirement if isinstance(requirement, tuple) else (requirement, 1.0)
        if name in self._verifiers:
            raise PluginError(
                f"required {name!r} is also a part", fix=f'write required={{"{name}": 0.5}} to require at least 0.5 of the part'
            )
        self._add(name, verifier)
        return _number(minimum, f"required {name!r}", above=0.0)

    def _known(self, name: str, where: str) -> str:
        if name not in self._weights:
            raise PluginError(f"{where}: there is no part {name!r}", fix=f"use one of {', '.join(self._weights)}")
        return name


def _named_requirements(required: object) -> Iterator[tuple[str, Any]]:
    if isinstance(required, Mapping):
        yield from required.items()
    elif required is not None:
        yield (required, 1.0) if isinstance(required, str) else ("required", required)


def _cap(name: str, cap: float | tuple[float, float]) -> tuple[float, float]:
    """Returns (minimum, maximum). If the part is below the minimum, the rubric's value is at most the maximum."""
    least, most = cap if isinstance(cap, tuple) else (1.0, cap)
    return _number(least, f"caps: the minimum of {name!r}", above=0.0), _number(most, f"caps: the cap of {name!r}", most=1.0)


def _number(value: Any, label: str, *, above: float | None = None, most: float = math.inf) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or (value <= above if above is not None else value < 0) or value > most:
        wanted = "positive" if above is not None else f"from 0 to {most:g}"
        raise PluginError(f"{label} is {value!r}", fix=f"use a finite number that is {wanted}")
    return float(value)


def _unscored(scores: Mapping[str, Score]) -> Score:
    blames = [score.blame for score in scores.values() if score.blame is not None]
    blame = next((blame for blame in blames if blame is not Blame.POLICY), next(iter(blames), None))
    reason = "; ".join(f"part {name}: {score.reason}" for name, score in scores.items())
    return Score(value=None, reason=reason, evidence=_evidence(scores), blame=blame)


def _evidence(scores: Mapping[str, Score], *notes: str) -> str:
    return "\n".join([*(f"{name}: {score.evidence}" for name, score in scores.items() if score.evidence), *notes])
