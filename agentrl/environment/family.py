"""The task family for an environment. Each task has a different seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from agentrl.errors import PluginError
from agentrl.plugins.parts import environment_kind
from agentrl.plugins.references import resolve
from agentrl.records import EnvironmentSpec, Limits, Split, Task
from agentrl.records.environment import PASS_THRESHOLD, RETURN

DECLARED = "declared"
_SPLITS = (Split.TRAIN, Split.HELDOUT, Split.HELDOUT_REAL)
_STRIDE = len(_SPLITS)
_SEEDS = (1 << 31) // _STRIDE * _STRIDE


class EnvironmentFamily:
    """Tasks that are episodes of one environment. Tasks of different splits have different seeds.

    Args:
        ref: the environment, such as `mine:Guess` or `gymnasium:CartPole-v1`.
        seed: seed of the run, which determines the seeds of all tasks.
        size: number of training tasks; None means unlimited.
        heldout: number of held-out tasks.
        limits: fields of `Limits` that differ from their defaults; the default of `turns` is 64.
        context_turns: number of turns after which a new context starts from the last observation; None means that all turns share one
            context.
        resume: how another process resumes an unfinished episode: from a `snapshot`, by `replay` of its actions, or by a `restart`.
        pass_threshold: minimum total reward of a passing episode; None means no threshold, and `declared` means the threshold that the
            environment declares.
        verifiers: verifiers that score an episode; the default verifier returns the sum of its rewards.
        options: arguments of the environment.

    Raises `PluginError` if a value is invalid.
    """

    def __init__(
        self,
        ref: str,
        *,
        seed: int = 0,
        size: int | None = None,
        heldout: int = 256,
        limits: Mapping[str, Any] | None = None,
        context_turns: int | None = None,
        resume: str = "replay",
        pass_threshold: float | str | None = DECLARED,
        verifiers: Sequence[str] = (RETURN,),
        **options: Any,
    ) -> None:
        self.name = ref
        self._first = (seed * 1_000_003 * _STRIDE) % _SEEDS
        self._sizes = {Split.TRAIN: _count(size, "size"), Split.HELDOUT: _count(heldout, "heldout"), Split.HELDOUT_REAL: 0}
        self._verifiers = tuple(verifiers)
        if unknown := sorted({*(limits or {})} - {field.name for field in fields(Limits)}):
            raise PluginError(f"tasks.family.options.limits has no field {unknown[0]!r}", fix="use fields of agentrl.records.Limits")
        threshold = declared_threshold(ref) if pass_threshold == DECLARED else cast(float | None, pass_threshold)
        try:
            self._limits = Limits(**{"turns": 64, **(limits or {})})
            self._spec = EnvironmentSpec(
                ref=ref,
                options=options,
                context_turns=context_turns,
                resume=resume,
                pass_threshold=threshold,
            )
        except ValueError as error:
            raise PluginError(f"tasks.family {ref!r}: {error}", fix="correct tasks.family.options") from None

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in the split; None if the split is endless."""
        return self._sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split."""
        seed = (self._first + index * _STRIDE + _SPLITS.index(split)) % _SEEDS
        spec = replace(self._spec, seed=seed)
        return Task(
            id=f"{self.name}/{split}/{index}",
            family=self.name,
            prompt=(),
            tools=(),
            verifiers=self._verifiers,
            data={},
            split=split,
            limits=self._limits,
            environment=spec,
        )


def declared_threshold(ref: str) -> float | None:
    """Returns the `pass_threshold` that an environment or its kind declares, where None means no threshold; `PASS_THRESHOLD` without a
    declaration. Raises `PluginError` if the environment's reference does not resolve."""
    kind = environment_kind(ref)
    if kind is None:
        return cast(float | None, getattr(resolve(ref), "pass_threshold", PASS_THRESHOLD))
    return cast(float | None, resolve(kind.threshold_function)(ref.partition(":")[2])) if kind.threshold_function else PASS_THRESHOLD


def _count(value: Any, name: str) -> int | None:
    if value is None and name == "size":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PluginError(f"tasks.family.options.{name} must be a number of tasks, got {value!r}", fix=f"write {name}=100")
    return value
