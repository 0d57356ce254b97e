"""The events of a real loop agree with its store."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.liveness import RestartAlert
from agentrl.observe.events import (
    AlertRaised,
    EpisodeEnded,
    EpisodeScored,
    EpisodeStarted,
    Event,
    GroupStored,
    PartRestarted,
    StepFinished,
    ToolEnded,
    TurnEnded,
    VersionJudged,
    VersionServed,
    decode,
    encode,
)
from agentrl.observe.run_events import EpisodeEvents, EventTracker
from agentrl.protocols import EpisodeListener
from agentrl.records import SwapReport
from agentrl.run import loop
from tests.driving import Family, Journaled, make_recipe, opened, scripted


async def test_events_record_the_life_of_every_stored_episode(tmp_path: Path) -> None:
    events = list[Event]()
    journal = tmp_path / "journal.jsonl"
    async with opened(tmp_path, Journaled(journal), scripted(journal), make_recipe(), Family(), record=events.append) as run:
        await loop._roll_out(run)
        groups = await run.store.groups([0, 1])
    assert [decode(encode(event)) for event in events] == events, "every event can be encoded"
    episodes = {scored.episode.id: scored for group in groups for scored in group.episodes}
    assert {(group.kind, group.split, group.prompt[0].content) for group in groups} == {
        ("driving", "train", f"Take notes for {index}.") for index in range(2)
    }
    started = {event.episode: event for event in events if isinstance(event, EpisodeStarted)}
    ended = {event.episode: event for event in events if isinstance(event, EpisodeEnded)}
    assert started.keys() == ended.keys() == episodes.keys()
    for name, scored in episodes.items():
        episode, (trajectory,) = scored.episode, scored.episode.trajectories
        order = [type(event) for event in events if getattr(event, "episode", "") == name]
        turns = [event for event in events if isinstance(event, TurnEnded) and event.episode == name]
        tools = [event for event in events if isinstance(event, ToolEnded) and event.episode == name]
        assert order == [EpisodeStarted, *[TurnEnded, ToolEnded] * len(turns), EpisodeEnded, EpisodeScored]
        assert [event.sampled_tokens for event in turns] == [turn.sampled for turn in trajectory.turns]
        assert [(event.tool, event.ok, event.output) for event in tools] == [
            (result.name, result.ok, result.output[:400]) for turn in trajectory.turns for result in turn.tool_results
        ]
        assert (ended[name].turns, ended[name].tokens) == (len(turns), episode.completion_tokens)
        assert started[name].group == int(name[1:7]) and started[name].kind == "driving"
    scores = [(event.score, event.reason) for event in events if isinstance(event, EpisodeScored)]
    assert Counter(scores) == {(1.0, ""): 6}
    stored = {event.group: event for event in events if isinstance(event, GroupStored)}
    assert {index: event.scores for index, event in stored.items()} == {0: (1.0,) * 3, 1: (1.0,) * 3}


async def test_attempts_that_are_cancelled_or_fail_have_an_end(tmp_path: Path) -> None:
    events = list[Event]()
    journal = tmp_path / "journal.jsonl"
    async with opened(tmp_path, Journaled(journal, stall=1), scripted(journal), make_recipe(), Family(), record=events.append) as run:
        rolling = asyncio.create_task(loop._roll_out(run))
        async with asyncio.timeout(30):
            while sum(isinstance(event, TurnEnded) for event in events) < 6:
                await asyncio.sleep(0.01)
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)
    started = {event.episode for event in events if isinstance(event, EpisodeStarted)}
    ends = [event for event in events if isinstance(event, EpisodeEnded)]
    assert len(started) == 6 and {event.episode for event in ends} == started
    assert {(event.stop_reason, event.turns) for event in ends} == {("cancelled", 1)}


def test_the_tracker_records_what_the_driver_reports() -> None:
    events = list[Any]()
    tracker = EventTracker(events.append)
    tracker.log(3, {"loss": 0.5})
    tracker.alert("slow")
    tracker.alert(RestartAlert("learner", "it died"))
    tracker.swapped(SwapReport(version=3, stall_ms=20.0, total_ms=500.0, probe_max_abs_diff=1e-5))
    tracker.judged(3, "blocked", "worse")
    assert [type(event) for event in events] == [StepFinished, AlertRaised, PartRestarted, VersionServed, VersionJudged]
    assert events[0].metrics == {"loss": 0.5} and (events[2].part, events[2].text) == ("learner", "it died")
    assert (events[3].seconds, events[3].stall_s) == (0.5, 0.02) and [decode(encode(event)) for event in events] == events


def test_an_event_that_cannot_be_built_is_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    listener: EpisodeListener = EpisodeEvents(lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        listener.turn_ended("e", 0, 0, "main", None)  # type: ignore[arg-type]
    assert len(caplog.records) == 1
