"""Which attempts may stand against each other."""

from __future__ import annotations

from agentrl.records import Group
from agentrl.supervised import select_preferences
from tests.learner.building import episode, scored, turn


def _attempt(name: str, prompt: list[int], completion: list[int], value: float) -> object:
    return scored(episode(name, [turn(prompt, completion, [-1.0] * len(completion))]), value)


def _group(index: int, *attempts: object) -> Group:
    return Group(index=index, task_id="t", task_key="k", episodes=attempts)  # type: ignore[arg-type]


def test_attempts_with_different_prompts_are_not_paired() -> None:
    """A task whose wording was drawn anew: what one answered is no answer to what the other was asked."""
    first = _group(0, _attempt("a", [1, 2], [7], 1.0), _attempt("b", [1, 2], [8], 0.9))
    second = _group(1, _attempt("c", [1, 3, 4], [9], 0.0), _attempt("d", [1, 3, 4], [10], 1.0))
    assert [(pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) for pair in select_preferences([first, second])] == [
        ((1, 3, 4), (10,), (9,))
    ]
    assert len(select_preferences([first, second], margin=0.05)) == 2
    assert len(select_preferences([first, second], margin=0.05, per_task=1)) == 1


def test_without_a_margin_every_difference_counts_and_only_a_difference() -> None:
    made = _group(0, _attempt("a", [1], [7], 0.5), _attempt("b", [1], [8], 0.4), _attempt("c", [1], [9], 0.5), _attempt("d", [1], [4], 0.5))
    (pair,) = select_preferences([made], margin=0.0)
    assert (pair.chosen_ids, pair.rejected_ids) == ((7,), (8,))
