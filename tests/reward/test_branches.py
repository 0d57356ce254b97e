from __future__ import annotations

from agentrl.records import Score
from agentrl.reward.branches import add_branches


def test_verifiers_that_say_nothing_of_a_branch_stand_by_their_value() -> None:
    judged = Score(value=1.0, branches=(None, 0.0, 0.5), without=(None, 0.0, None))
    plain = Score(value=0.4)
    made = add_branches(Score(value=0.7), {"a": judged, "b": plain}, {"a": 0.75, "b": 0.25})
    assert made.branches == (None, 0.1, 0.475) and made.without == (None, 0.1, None) and made.value == 0.7
    assert add_branches(Score(value=0.4), {"b": plain}, {"b": 1.0}) == plain
