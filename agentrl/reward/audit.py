"""The audit: verifiers that judge every episode beside those of its task. What they say is logged, and never becomes a reward.

Their mean is the part `audit` of an episode's score, each of them `audit/NAME`. An audit without a value leaves no part, and takes
nothing from the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from agentrl.base import user_code
from agentrl.base.scores import is_at_least
from agentrl.records import Score, ScoredEpisode, Task

AUDIT_PART = "audit"
HALF = 0.5  # an audit below this share of the reward contradicts it
_SAID = 1000  # characters kept of what the audit says


def add_audit(score: Score, audits: Mapping[str, Score]) -> Score:
    """A score with what its audits say, by the verifiers' names: parts and evidence; value, reason and turn rewards stay."""
    values = {name: audit.value for name, audit in audits.items() if audit.value is not None and math.isfinite(audit.value)}
    parts = {name: value for name, value in score.parts.items() if name != AUDIT_PART and not name.startswith(f"{AUDIT_PART}/")}
    parts |= {f"{AUDIT_PART}/{name}": value for name, value in values.items()}
    if values and len(values) == len(audits):
        parts[AUDIT_PART] = math.fsum(values.values()) / len(values)
    said = [f"audit {name}: {audit.evidence or audit.reason}" for name, audit in audits.items() if audit.evidence or audit.reason]
    return replace(score, parts=parts, evidence="\n".join(filter(None, [score.evidence, *said])))


def audit_contradiction(task: Task, scored: ScoredEpisode, *, below: float) -> str:
    """Why the audit says that a score was not earned; empty where it does not, or there is none.

    A score of at least `below` is contradicted by an audit of less than half of it.
    """
    del task
    value, audit = scored.score.value, scored.score.parts.get(AUDIT_PART)
    if value is None or audit is None or not is_at_least(value, below) or value <= 0 or is_at_least(audit, HALF * value):
        return ""
    about = "; ".join(line for line in scored.score.evidence.splitlines() if line.startswith("audit "))
    return user_code.printable(f"the audit gives {audit:g} where the reward is {value:g}{about and ': '}{about}", _SAID)
