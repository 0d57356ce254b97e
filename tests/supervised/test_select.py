"""The token sequences that are selected for supervised training, and which of their tokens are targets."""

from __future__ import annotations

from dataclasses import replace

from agentrl.records import Group
from agentrl.supervised import select_demonstrations, select_preferences
from agentrl.supervised.select import IGNORED
from tests.learner.building import episode, scored, turn

PROMPT = [1, 2, 3]


def attempt(name: str, completion: list[int], value: float, final: list[int] | None = None) -> object:
    """An episode of two turns: the policy's completion, two tokens of tool output, and the last completion."""
    last = final or [9]
    turns = [turn(PROMPT, completion, [-1.0] * len(completion)), turn([50, 51], last, [-1.0] * len(last))]
    return scored(episode(name, turns), value)


def group(index: int, *attempts: object) -> Group:
    return Group(index=index, task_id=f"t{index}", task_key=f"k{index}", episodes=attempts)  # type: ignore[arg-type]


def test_the_best_shortest_attempt_is_selected_without_tool_output() -> None:
    scored_group = group(0, attempt("a", [4, 5, 6], 1.0), attempt("b", [4, 5], 1.0), attempt("c", [4], 0.5))
    (row,) = select_demonstrations([scored_group])
    assert row["input_ids"] == [1, 2, 3, 4, 5, 50, 51, 9]
    assert row["labels"] == [IGNORED, IGNORED, IGNORED, 4, 5, IGNORED, IGNORED, 9]
    assert len(select_demonstrations([scored_group], per_task=5)) == 2
    assert len(select_demonstrations([scored_group], min_score=0.5, per_task=5)) == 3
    assert select_demonstrations([group(1, attempt("d", [4], 0.0))]) == []
    for threshold, rows in ((0.5, 3), (None, 2), (2.0, 0)):
        assert len(select_demonstrations([replace(scored_group, pass_threshold=threshold)], per_task=5)) == rows


def test_the_same_attempt_twice_is_one_demonstration() -> None:
    scored_group = group(0, attempt("a", [4, 5], 1.0), attempt("b", [4, 5], 1.0), attempt("c", [4, 7], 1.0))
    assert [row["input_ids"][4] for row in select_demonstrations([scored_group], per_task=5)] == [5, 7]


def test_pairs_belong_to_one_task_and_share_no_attempt() -> None:
    scored_group = group(0, attempt("a", [4], 1.0), attempt("b", [5], 0.0), attempt("c", [6], 0.9), attempt("d", [7], 0.6))
    (pair,) = select_preferences([scored_group, group(1, attempt("e", [8], 0.0))], margin=0.5)
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((1, 2, 3), (4, 50, 51, 9), (5, 50, 51, 9))
    assert pair.chosen_mask == (True, False, False, True)
    assert (pair.task_key, pair.margin) == ("k0", 1.0)
    assert [preference.margin for preference in select_preferences([scored_group], margin=0.2)] == [1.0, 0.30000000000000004]


# Which attempts may be paired.
def _attempt(name: str, prompt: list[int], completion: list[int], value: float) -> object:
    return scored(episode(name, [turn(prompt, completion, [-1.0] * len(completion))]), value)


def _group(index: int, *attempts: object) -> Group:
    return Group(index=index, task_id="t", task_key="k", episodes=attempts)  # type: ignore[arg-type]


def test_attempts_with_different_prompts_are_not_paired() -> None:
    """If the wording of a task is drawn per group, an attempt of one group does not answer the prompt of another."""
    first = _group(0, _attempt("a", [1, 2], [7], 1.0), _attempt("b", [1, 2], [8], 0.9))
    second = _group(1, _attempt("c", [1, 3, 4], [9], 0.0), _attempt("d", [1, 3, 4], [10], 1.0))
    assert [(pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) for pair in select_preferences([first, second])] == [
        ((1, 3, 4), (10,), (9,))
    ]
    assert len(select_preferences([first, second], margin=0.05)) == 2
    assert len(select_preferences([first, second], margin=0.05, per_task=1)) == 1


def test_without_a_margin_any_difference_of_scores_makes_a_pair() -> None:
    ties = _group(0, _attempt("a", [1], [7], 0.5), _attempt("b", [1], [8], 0.4), _attempt("c", [1], [9], 0.5), _attempt("d", [1], [4], 0.5))
    (pair,) = select_preferences([ties], margin=0.0)
    assert (pair.chosen_ids, pair.rejected_ids) == ((7,), (8,))
