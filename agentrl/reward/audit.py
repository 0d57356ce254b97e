"""The audit: verifiers that score every episode for monitoring only. Their values are logged and never become a reward.

The part `audit` of an episode's score is their mean; the parts `audit/NAME` are the single values. An audit without a value adds no part
and does not change the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from agentrl import usercode
from agentrl.records import Score, ScoredEpisode, Task
from agentrl.scores import reaches

AUDIT = "audit"
HALF = 0.5  # an audit below this fraction of the reward contradicts it
_SAID = 1000  # maximum length of a message, in characters


def audited(score: Score, audits: Mapping[str, Score]) -> Score:
    """Adds the audits, by the verifiers' names, to the parts and the evidence of a score. Value, reason and turn rewards stay the same."""
    values = {name: audit.value for name, audit in audits.items() if audit.value is not None and math.isfinite(audit.value)}
    parts = {name: value for name, value in score.parts.items() if name != AUDIT and not name.startswith(f"{AUDIT}/")}
    parts |= {f"{AUDIT}/{name}": value for name, value in values.items()}
    if values and len(values) == len(audits):
        parts[AUDIT] = math.fsum(values.values()) / len(values)
    said = [f"audit {name}: {audit.evidence or audit.reason}" for name, audit in audits.items() if audit.evidence or audit.reason]
    return replace(score, parts=parts, evidence="\n".join(filter(None, [score.evidence, *said])))


def disagreement(task: Task, scored: ScoredEpisode, *, below: float) -> str:
    """Why the audit contradicts a score; empty if it does not, or if there is no audit.

    A score of at least `below` is contradicted by an audit of less than half of it.
    """
    del task
    value, audit = scored.score.value, scored.score.parts.get(AUDIT)
    if value is None or audit is None or not reaches(value, below) or value <= 0 or reaches(audit, HALF * value):
        return ""
    about = "; ".join(line for line in scored.score.evidence.splitlines() if line.startswith("audit "))
    return usercode.printable(f"the audit is {audit:g}, but the reward is {value:g}{about and ': '}{about}", _SAID)
