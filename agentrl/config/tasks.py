"""Settings for tasks and their scoring (`tasks`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.section import Needs, Section
from agentrl.plugins.parts import Part

_TAUGHT = Needs(
    "a step late enough to use the results of an earlier step: set steps to pipeline_depth + 1 or more",
    lambda recipe, own: recipe.step_limit > recipe.depth,
)
_PRACTISED = Needs("practice tasks: set tasks.practice", lambda recipe, own: own.practice)

MOST_WEIGHT = 1000


class GroupJudging(Section):
    """The keys in `tasks` for a judge that scores all attempts in a group together."""

    group_judge: str | None = Field(None, min_length=1)
    """Judge that scores all attempts in a training group together, such as `rewards.mine:ranked`."""
    group_weight: float = Field(1.0, gt=0, le=1)
    """Weight of the group judge in a training score; the verifiers share the rest. 1: no verifier runs."""

    @model_validator(mode="after")
    def _weight_acts(self) -> GroupJudging:
        if self.group_judge is None and self.group_weight != 1:
            raise ValueError("group_weight does nothing without group_judge: set group_judge, or remove group_weight")
        return self


class TasksConfig(GroupJudging):
    """The tasks and their verifiers (`tasks`)."""

    family: Part
    """Folder of task folders, such as `sandboxes/chores`, or plug-in reference to a callable `(seed=)` that returns a TaskFamily. Option
    for a folder: `heldout`, the held-out share of tasks that declare no split."""
    verifiers: tuple[str, ...] = Field(())
    """Verifiers that replace those of the tasks, such as `rewards.close:close_number`. Empty: the tasks' verifiers."""
    withhold: tuple[str, ...] = Field(())
    """Folders of suites, relative to the project root. Their cases and near twins are never trained on."""
    practice: dict[str, Annotated[int, Field(ge=1, le=MOST_WEIGHT)]] = Field({})
    """Training tasks that `agentrl practice` derives from suites: folder (relative to the project root) -> weight. The cases themselves are
    never trained on. See docs/failures.md."""
    practice_share: Annotated[float, _PRACTISED] = Field(0.3, ge=0.001, le=1)
    """Share of groups with practice tasks."""
    weighting: Annotated[bool, _TAUGHT] = False
    """Samples tasks that have a training signal more often (docs/recipes.md, "Which tasks")."""
    audit: tuple[str, ...] = Field(())
    """Verifiers whose scores are logged and plotted, but never trained on."""

    @field_validator("audit")
    @classmethod
    def _audit_is_another(cls, audit: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if same := sorted({*audit} & {*info.data.get("verifiers", ())}):
            raise ValueError(
                f"{same[0]} is also in tasks.verifiers: an audit with the same verifier shows nothing; remove it from one of them"
            )
        return audit
