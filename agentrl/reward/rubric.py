"""Rubrics: several verifiers, combined with weights, gates and caps into one score that keeps its parts.

    total = Rubric(
        parts={"right": (Numeric(relative=1e-3, unit="m"), 0.8), "short": (Length(most=200), 0.2)},
        gate="right",
    )

in `rewards/mine.py` is the verifier `rewards.mine:total`.

The value is the weighted mean of the parts, sum(w_i * v_i) / sum(w_i), unless a gate fails, which makes it 0, or a cap bounds it. Every
value, and what a verifier calls its own parts, is a part of the score, by name; so nothing disappears in the mean. A part that has no
value leaves the whole without one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from agentrl.base import user_code
from agentrl.base.scores import is_at_least
from agentrl.errors import PluginError
from agentrl.plugins.references import resolve
from agentrl.protocols import SandboxBackend, SandboxVerifier, Verifier
from agentrl.records import Blame, Episode, Score, Task
from agentrl.reward.branches import add_branches
from agentrl.reward.verifier_call import bounds_of, call_verifier, needs_sandboxes, prepare_verifier, timeout_of

AnyVerifier: TypeAlias = Verifier | SandboxVerifier | str
"""A verifier, or a reference to one."""
Requirement: TypeAlias = AnyVerifier | float | tuple[AnyVerifier, float]
"""A verifier that must give 1, or at least a number; or, of a part with this name, the number alone."""

BOUNDS = (0.0, 1.0)
PART_S = 30.0
SANDBOX_PART_S = 9000.0  # of a part that judges in sandboxes, which sets its own deadlines for what it runs


class Rubric:
    """Weighted parts, gates and caps; itself a verifier, with values from 0 to 1.

    Args:
        parts: name -> (verifier, weight). Weights are positive, and need not sum to 1. A verifier's values must be from 0 to 1; one outside
            is no value.
        gate: what must hold before anything else counts: the name of a part, a verifier, or name -> what `Requirement` says. Gates are
        asked in
            order; at the first that fails the score is 0, and nothing else is asked. A verifier that is a gate alone has no weight.
        caps: name of a part -> the most that the whole can be when that part is less than 1; or (least, most): when less than `least`.
        optional: names of parts that may lack a value. The others' weights then count alone; the score's part `NAME/unscored` is 1, and its
            evidence has the reason.
        part_s: deadline of a part that needs no sandboxes and says nothing of its own, in seconds.

    Raises:
        PluginError: a reference that does not resolve, a name that is no part's, or a number outside its range.
    """

    bounds: ClassVar[tuple[float, float]] = BOUNDS

    def __init__(
        self,
        parts: Mapping[str, tuple[AnyVerifier, float]],
        *,
        gate: str | Verifier | SandboxVerifier | Mapping[str, Requirement] | None = None,
        caps: Mapping[str, float | tuple[float, float]] | None = None,
        optional: tuple[str, ...] = (),
        part_s: float = PART_S,
    ) -> None:
        self._verifiers: dict[str, Any] = {}
        self._weights: dict[str, float] = {}
        self._gates: dict[str, float] = {}
        for name, (verifier, weight) in parts.items():
            self._add(name, verifier)
            self._weights[name] = _number(weight, f"the weight of {name!r}", above=0.0)
        if not self._weights:
            raise PluginError("a rubric without parts", fix='write Rubric(parts={"right": (verifier, 1.0)})')
        for name, what in _gates(gate):
            self._gates[name] = self._gate(name, what)
        self._caps = {name: _cap(self._known(name, "caps"), cap) for name, cap in (caps or {}).items()}
        self._optional = frozenset(self._known(name, "optional") for name in ((optional,) if isinstance(optional, str) else optional))
        self._part_s = _number(part_s, "part_s", above=0.0)
        if useless := self._optional & set(self._gates):
            raise PluginError(f"{sorted(useless)[0]!r} is a gate and optional", fix="a gate must have a value: drop one of the two")
        self.needs_sandboxes = any(needs_sandboxes(verifier) for verifier in self._verifiers.values())

    @property
    def timeout_s(self) -> float:
        """Seconds that the whole may take: one gate after the other, then the rest together."""
        rest = max((self._limit(name) for name in self._verifiers if name not in self._gates), default=0.0)
        return sum(map(self._limit, self._gates)) + rest + user_code.GRACE_S

    def prepare(self, *, root: Path, folder: Path | None) -> None:
        """Prepares the parts that want it, such as judges. Raises `UserError` where one refuses to be used."""
        for verifier in self._verifiers.values():
            prepare_verifier(verifier, root=root, folder=folder)

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend | None = None) -> Score:
        """Raises `InfrastructureError` of a part, so that the whole is asked again."""
        scores: dict[str, Score] = {}
        for name, least in self._gates.items():
            scores[name] = score = await self._ask(name, task, episode, sandboxes)
            if score.value is None:
                return _unscored({name: score})
            if not is_at_least(score.value, least):
                told = f"gate {name} fails: {score.value:g}, at least {least:g} is needed"
                return Score(value=0.0, parts=_named(scores), evidence=_evidence(scores, told))
        rest = [name for name in self._weights if name not in scores]
        asking = []
        async with asyncio.TaskGroup() as together:  # one that raises ends the others, and the whole is asked again
            asking += [together.create_task(self._ask(name, task, episode, sandboxes)) for name in rest]
        scores |= {name: job.result() for name, job in zip(rest, asking, strict=True)}
        return self._combined(scores)

    async def _ask(self, name: str, task: Task, episode: Episode, sandboxes: SandboxBackend | None) -> Score:
        verifier = self._verifiers[name]
        score = await call_verifier(verifier, f"part {name} of a rubric", task, episode, sandboxes, timeout_s=self._limit(name))
        if score.value is not None and not BOUNDS[0] <= score.value <= BOUNDS[1]:
            return Score(value=None, reason=f"verifier gave {score.value:g}, and a rubric's parts go from 0 to 1")
        return score

    def _limit(self, name: str) -> float:
        verifier = self._verifiers[name]
        return SANDBOX_PART_S if needs_sandboxes(verifier) else timeout_of(verifier, self._part_s)

    def _combined(self, scores: Mapping[str, Score]) -> Score:
        """The score of an episode that passed every gate."""
        lacking = {name: score for name, score in scores.items() if score.value is None}
        if fatal := {name: score for name, score in lacking.items() if name not in self._optional}:
            return _unscored(fatal)
        given = {name: score.value for name, score in scores.items() if score.value is not None}
        weights = {name: weight for name, weight in self._weights.items() if name in given}
        if not weights:
            return _unscored(lacking)
        whole = sum(weights.values())
        value = sum(weight * given[name] for name, weight in weights.items()) / whole
        notes = [f"{name} has no value, the others' weights count alone: {score.reason}" for name, score in lacking.items()]
        for name, (least, most) in self._caps.items():
            if name in given and not is_at_least(given[name], least) and value > most:
                value = most
                notes.append(f"capped at {most:g}, because {name} is {given[name]:g}")
        parts = _named(scores) | {f"{name}/unscored": 1.0 for name in lacking}
        counted, shares = {name: scores[name] for name in weights}, {name: weight / whole for name, weight in weights.items()}
        turns = _weighted_turns(counted, shares)
        made = Score(value=min(max(value, 0.0), 1.0), parts=parts, evidence=_evidence(scores, *notes), turn_rewards=turns)
        return add_branches(made, counted, shares)

    def _add(self, name: str, verifier: object) -> None:
        if not name or "/" in name:
            raise PluginError(f"{name!r} is no name for a part", fix="use a word without a slash")
        found = resolve(verifier) if isinstance(verifier, str) else verifier
        if not callable(found):
            raise PluginError(f"{name!r}: {type(found).__name__} is no verifier", fix="write async def score(task, episode) -> Score")
        limits = bounds_of(found)
        if limits is not None and not BOUNDS[0] <= limits[0] <= limits[1] <= BOUNDS[1]:
            raise PluginError(f"{name!r}: its values go from {limits[0]:g} to {limits[1]:g}", fix="a rubric's parts go from 0 to 1")
        self._verifiers[name] = found

    def _gate(self, name: str, what: Any) -> float:
        """The least value that passes gate `name`, whose verifier is known from then on."""
        if isinstance(what, bool | int | float):
            self._known(name, "gate")
            return _number(what, f"gate {name!r}", above=0.0)
        verifier, least = what if isinstance(what, tuple) else (what, 1.0)
        if name in self._verifiers:
            raise PluginError(f"gate {name!r} is a part too", fix=f'write gate={{"{name}": 0.5}} to have the part be at least 0.5')
        self._add(name, verifier)
        return _number(least, f"gate {name!r}", above=0.0)

    def _known(self, name: str, where: str) -> str:
        if name not in self._weights:
            raise PluginError(f"{where}: no part is called {name!r}", fix=f"the parts are {', '.join(self._weights)}")
        return name


def _gates(gate: object) -> Iterator[tuple[str, Any]]:
    if gate is None:
        return
    if isinstance(gate, Mapping):
        yield from gate.items()
    else:
        yield (gate, 1.0) if isinstance(gate, str) else ("gate", gate)


def _cap(name: str, cap: float | tuple[float, float]) -> tuple[float, float]:
    """(least, most): below `least` of the part, the whole is at most `most`."""
    least, most = cap if isinstance(cap, tuple) else (1.0, cap)
    return _number(least, f"caps: least of {name!r}", above=0.0), _number(most, f"caps: most of {name!r}", most=1.0)


def _number(value: Any, what: str, *, above: float | None = None, most: float = math.inf) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or (value <= above if above is not None else value < 0) or value > most:
        wanted = "positive" if above is not None else f"from 0 to {most:g}"
        raise PluginError(f"{what} is {value!r}", fix=f"give a finite number that is {wanted}")
    return float(value)


def _named(scores: Mapping[str, Score]) -> dict[str, float]:
    """Values and their own parts, by the part's name."""
    parts = {name: score.value for name, score in scores.items() if score.value is not None}
    return parts | {f"{name}/{part}": value for name, score in scores.items() for part, value in score.parts.items()}


def _unscored(scores: Mapping[str, Score]) -> Score:
    blames = [score.blame for score in scores.values() if score.blame is not None]
    blame = next((one for one in blames if one is not Blame.POLICY), next(iter(blames), None))
    reason = "; ".join(f"part {name}: {score.reason}" for name, score in scores.items())
    return Score(value=None, reason=reason, evidence=_evidence(scores), blame=blame)


def _evidence(scores: Mapping[str, Score], *notes: str) -> str:
    return "\n".join([*(f"{name}: {score.evidence}" for name, score in scores.items() if score.evidence), *notes])


def _weighted_turns(scores: Mapping[str, Score], weights: Mapping[str, float]) -> tuple[tuple[float, ...], ...]:
    """The weighted sum over parts, as for values; one without turn rewards counts as zeros. Empty when none has any."""
    scaled = [
        [[weights[name] * turn for turn in line] for line in score.turn_rewards] for name, score in scores.items() if score.turn_rewards
    ]
    return tuple(tuple(sum(turn) for turn in zip(*lines, strict=True)) for lines in zip(*scaled, strict=True))
