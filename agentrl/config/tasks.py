"""What an agent is given to do, and how it is judged: `tasks`, `tasks.practice`, `tasks.weighting`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl.config.section import Needs, Section

_TAUGHT = Needs(
    "a step late enough to use the results of another: set steps to max_staleness + 2 or more",
    lambda recipe, own: recipe.steps > recipe.max_staleness + 1,
)

MOST_WEIGHT = 1000


class PracticeConfig(Section):
    """Tasks made from the cases of suites by `agentrl practice`, mixed into training. docs/practice.md says how they are made."""

    suites: dict[str, Annotated[int, Field(ge=1, le=MOST_WEIGHT)]] = Field(min_length=1)
    """Suites, as folders relative to the project root, and how often each takes its turn. None of their cases is ever trained on."""
    share: float = Field(0.3, ge=0.001, le=1)
    """Share of the groups that practise; the others have tasks of the family."""


class WeightingConfig(Section):
    """Training tasks that teach are given more often than those whose attempts all score the same. docs/recipes.md, "Which tasks"."""

    least: float = Field(0.1, ge=0.01, lt=1)
    """Weight of a task that teaches nothing, against one that always does: it comes back now and then, as the policy changes."""
    window: int = Field(8, ge=1, le=1000)
    """Newest groups of a task, and of a kind of tasks, by which it is weighed."""


class GroupJudging(Section):
    """The keys of `tasks` on judging groups as a whole."""

    group_judge: str | None = Field(None, min_length=1)
    """Who judges all attempts of a training group together once they are done, as a reference such as `rewards.mine:ranked`; None: each
    attempt is judged by itself. Evaluations and cases are judged by the verifiers, as ever. docs/judges.md."""
    group_weight: float = Field(1.0, gt=0, le=1)
    """Share of the group judge in a training score. 1: it alone, and the verifiers are not asked; below, they have the rest."""

    @model_validator(mode="after")
    def _weight_acts(self) -> GroupJudging:
        if self.group_judge is None and self.group_weight != 1:
            raise ValueError("group_weight does nothing without group_judge")
        return self


class TasksConfig(GroupJudging):
    family: str
    """A folder of task folders, e.g. `sandboxes/chores`, or the plugin reference of a callable that takes `seed=` and returns a TaskFamily,
    e.g. `sandboxes.tables:Tables`."""
    options: dict[str, str | int | float | bool] = Field({})
    """Further keyword arguments of the family. Of a folder: `heldout`, the share of tasks without a split of their own that is held out."""
    verifiers: tuple[str, ...] = Field(())
    """Who judges, as references such as `rewards.close:close_number`, in place of the verifiers that the tasks name. Empty: those."""
    withhold: tuple[str, ...] = Field(())
    """Suites, as folders relative to the project root: no case of theirs, nor a near twin of one, is ever trained on."""
    practice: PracticeConfig | None = None
    """Tasks made from the cases of suites, for a share of the groups; None: every group has a task of the family."""
    weighting: Annotated[WeightingConfig | None, _TAUGHT] = None
    """Give tasks more often that teach; None: all as often. `{}` takes its defaults."""
    audit: tuple[str, ...] = Field(())
    """Verifiers that judge every episode beside the others, as references: logged and plotted, never trained on. docs/verifiers.md."""

    @field_validator("audit")
    @classmethod
    def _audit_is_another(cls, audit: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if same := sorted({*audit} & {*info.data.get("verifiers", ())}):
            raise ValueError(f"{same[0]} is among tasks.verifiers too: an audit that agrees with itself finds nothing")
        return audit
