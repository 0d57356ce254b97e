"""The recipe's section on the gate: which suite every version is held to, and what happens to one that is worse."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section

GATE = "gate"
"""Name under which a judged version's success on the suite is kept in its record (`PolicyVersion.evals`)."""


class GateConfig(Section):
    """A suite of cases that versions must not get worse at, compared with the last version that was promoted."""

    suite: str = Field(min_length=1)
    """Folder of the suite (relative to the project root): `suite.toml` and `cases/`."""
    every: int = Field(1, ge=1)
    """Every so many versions one is judged; version 0, the first reference, and the last one always are."""
    repeats: int = Field(4, ge=1, le=1000)
    """Attempts by each version at each case that does not say how many it takes."""
    confirm: int = Field(24, ge=0, le=1000)
    """Further attempts at a case that looks worse, before it may block; 0: only the suite as a whole may. Needs cases that are tried 3
    times or more."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Largest share of judgements, over a run, that block a version that is no worse. Half is for the suite, half for single cases."""
    margin: float = Field(0.0, ge=0, lt=1)
    """A drop of the suite's mean score of no more than this never blocks."""
    threshold: float = 1.0
    """Score from which an attempt has passed, at a case without a threshold of its own."""
    action: Literal["block", "rollback"] = "rollback"
    """What happens to a version that is worse. block: it is not promoted, and training goes on from it. rollback: server and learner
    return to the last promoted version as well."""
    server: Literal["shared", "own"] = "shared"
    """Who answers a version's attempts. shared: the policy's servers, which take no newer version in meanwhile. own: one more server, so
    that the others go on with newer ones; on GPUs it needs a GPU of its own, on a CPU its share of cores and memory."""
    max_rollbacks: int = Field(2, ge=1)
    """Rollbacks by the gate in the whole run; after them it only blocks."""

    @model_validator(mode="after")
    def _every_key_acts(self) -> GateConfig:
        if self.action == "block" and self.max_rollbacks != 2:
            raise ValueError("max_rollbacks does nothing with action=block; leave it out or set action=rollback")
        return self

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"
