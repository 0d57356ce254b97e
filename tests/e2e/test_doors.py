"""Notes of environments, with the real server, learner and memory: the short form of `recipes/doors.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.experience import SqliteStore
from agentrl.records.episode import NO_NOTES
from tests.ledgers import indices

from .conftest import agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed]

HOUSES, VISITS = 4, 2


@pytest.mark.usefixtures("nothing_left")
def test_a_policy_trains_on_notes_and_evaluations_start_without(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    few = ("steps=2", f"rollout.groups_per_step={HOUSES}", f"evaluation.heldout={HOUSES * VISITS}", f"memory.heldout_rounds={VISITS}")
    options = (f"tasks.family.options.houses={HOUSES}", f"tasks.family.options.visits={VISITS}")
    code, output = agentrl("train", "recipes/doors.py", *few, *options, "--run-dir", str(run), by=forked)
    assert code == 0, output[-4000:]
    totals = summary(run)
    assert (totals["steps"], totals["weight_swaps"], totals["episodes_left_out"]) == (2, 2, 0)
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    for group in groups:
        firsts = {each.episode.trajectories[0].prompt[-1].content for each in group.episodes}
        read = {author.partition("-")[0] for each in group.episodes for author in each.episode.memory.read}  # type: ignore[union-attr]
        if group.index < HOUSES:
            assert firsts == {NO_NOTES} and not read, "no notes before the first step"
        else:
            assert firsts != {NO_NOTES} and len(firsts) == 1 and read == {f"g{group.index - HOUSES:06d}"}, "notes of the same house"
    later = [line for line in map(json.loads, (run / "episodes" / "after.jsonl").read_text().splitlines()) if line["memory"]["read"]]
    assert {line["kind"] for line in later} <= {"visit 2"}
    code, output = agentrl("memory", str(run), by=forked)
    assert code == 0 and "ok    no episode read notes" in output
