"""The stream of a run's changes and events, without a browser."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.observe.event_log import EventLog
from agentrl.observe.events import AlertRaised, EpisodeScored, StepFinished
from agentrl.view import RunLibrary, live
from agentrl.view.live import Live, events_data
from agentrl.view.source import RunSource
from tests.view.conftest import serving


def parsed(event: bytes) -> tuple[str, Any]:
    name, _, data = event.decode().strip().partition("\ndata: ")
    return name.removeprefix("event: "), json.loads(data)


async def test_a_stream_has_changes_and_events_and_ends_when_the_run_is_removed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two viewers get the same events, each once."""
    monkeypatch.setattr(live, "LOOK_S", 0.02)
    shutil.copytree(runs / "demo", tmp_path / "demo")
    library, log = RunLibrary(tmp_path), EventLog(tmp_path / "demo")
    streams = Live(library)
    viewers = [streams.events("demo"), streams.events("demo")]
    for viewer in viewers:
        name, mark = parsed(await anext(viewer))
        assert (name, mark.pop("store")[:4]) == ("change", [9, 10, 4, 0]) and mark == {"state": "finished", "step": 5, "steps": 5}
    pending = [viewer.__anext__() for viewer in viewers]
    first = asyncio.gather(*pending)
    await asyncio.sleep(0.1)  # both have read the end of the stream
    log.record(AlertRaised(text="the reward fell"))
    log.record(EpisodeScored(episode="g000004-0-a0", score=0.5))
    log.close()
    for name, lines in map(parsed, await first):
        assert name == "activity" and [line["kind"] for line in lines] == ["alert", "episode_scored"]
        assert lines[0]["text"] == "the reward fell" and lines[1]["score"] == 0.5
    assert streams.streams == 2
    with (tmp_path / "demo" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward_mean": 0.5}\n')
    assert [parsed(await anext(viewer))[1]["step"] for viewer in viewers] == [6, 6]
    shutil.rmtree(tmp_path / "demo")
    for viewer in viewers:
        assert [parsed(event) async for event in viewer] == [("change", {"gone": True})]
    assert streams.streams == 0
    library.close()


def test_notable_events_are_separate_and_a_run_without_events_has_none(tmp_path: Path) -> None:
    source = RunSource(tmp_path, run_id="r", name="r")
    assert events_data(source) == {"run": "r", "newest": [], "notable": [], "notes": []}
    log = EventLog(tmp_path)
    log.record(AlertRaised(text="first"))
    for number in range(100):
        log.record(EpisodeScored(episode=f"e{number}", score=None, reason="none"))
    log.record(StepFinished(step=1, metrics={"reward_mean": 0.25}))
    log.close()
    data = events_data(source)
    assert [line["kind"] for line in data["notable"]] == ["step", "alert"] and len(data["newest"]) == 40
    assert data["newest"][0]["metrics"] == {"reward_mean": 0.25} and data["newest"][1]["episode"] == "e99"
    (tmp_path / "events" / "000000000000000.jsonl").write_bytes(b"\xff" * 100 + b"\n{}\n")
    assert events_data(source)["newest"] == []


def test_a_closed_page_frees_its_stream(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening 33 episodes in half a minute does not exhaust the live updates."""
    monkeypatch.setattr(live, "LOOK_S", 0.05)
    with serving(runs) as view:
        headers = {"authorization": f"Bearer {view.server.token}"}
        for _ in range(3):
            with httpx.Client(headers=headers) as client, client.stream("GET", view.address("api/runs/demo/live")) as stream:
                assert stream.status_code == 200 and next(stream.iter_bytes()).startswith(b"event: change")
        deadline = time.monotonic() + 5
        while view.server._live is not None and view.server._live.streams:
            assert time.monotonic() < deadline, "closed connections keep their streams"
            time.sleep(0.02)
