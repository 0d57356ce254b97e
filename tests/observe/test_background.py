"""Trackers on a separate thread: whatever a tracker does, the run waits only for a bounded time."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Part, build
from agentrl.errors import PluginError
from agentrl.observe import RunTracker
from agentrl.observe import background as module
from agentrl.observe.background import BackgroundTracker
from agentrl.observe.tracker import open_trackers
from agentrl.protocols import Tracker


class Recorder(Tracker):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.thread = threading.current_thread()

    def log(self, step: int, metrics: Any) -> None:
        self.events.append(("log", step, metrics))

    def alert(self, text: str) -> None:
        self.events.append(("alert", text))
        if text == "raise":
            raise SystemExit(1)

    def stage(self, name: str, detail: str = "") -> None:
        self.events.append(("stage", name, detail))

    def progress(self, index: int, group: Any) -> None:
        self.events.append(("progress", index))

    def evaluating(self, done: int, total: int) -> None:
        self.events.append(("evaluating", done, total))

    def evaluated(self, phase: str, rates: Any) -> None:
        self.events.append(("evaluated", phase))

    def close(self) -> None:
        self.events.append(("close",))


EVENTS: dict[str, tuple[Any, ...]] = {
    "stage": ("train", "2 steps"),
    "progress": (3, None),
    "alert": ("raise",),
    "log": (1, {"loss": 0.5}),
    "evaluating": (1, 2),
    "evaluated": ("after", {}),
}


def test_every_event_arrives_in_order_on_another_thread_even_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    inner: list[Recorder] = []

    def open_recorder() -> Recorder:
        inner.append(Recorder())
        return inner[0]

    tracker = BackgroundTracker(open_recorder, name="r")
    for name, arguments in EVENTS.items():
        getattr(tracker, name)(*arguments)
    tracker.close()
    tracker.close()
    tracker.alert("after the end")
    assert [event[0] for event in inner[0].events] == [*EVENTS, "close"]
    assert inner[0].thread is not threading.current_thread() and not inner[0].thread.is_alive()
    assert "tracker r: SystemExit: 1" in caplog.text and tracker.dropped == 0


def hanging(forever: threading.Event) -> Tracker:
    class Hanging(Tracker):
        def log(self, step: int, metrics: Any) -> None:
            forever.wait()

        def close(self) -> None:
            forever.wait()

    return Hanging()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    result = call()
    assert time.monotonic() - started < seconds
    return result


@pytest.mark.parametrize("events", [1, 3000])
def test_a_hanging_tracker_delays_no_event_and_the_end_only_by_its_deadline(events: int, caplog: pytest.LogCaptureFixture) -> None:
    forever = threading.Event()
    tracker = BackgroundTracker(lambda: hanging(forever), name="h", close_s=0.1)

    def log_all() -> None:
        for step in range(events):
            tracker.log(step, {})

    within(10.0, log_all)
    within(10.0, tracker.close)
    assert max(0, events - module.MAX_EVENTS - 1) <= tracker.dropped <= max(0, events - module.MAX_EVENTS)
    assert "tracker h did not close within 0.1 s" in caplog.text
    assert caplog.text.count("is slower than the run") <= 12, "the count is logged at powers of two"
    forever.set()


class SomeGroup:
    """A group for which only the lifetime matters."""


def test_a_hanging_tracker_keeps_few_groups_in_memory() -> None:
    forever, groups = threading.Event(), [SomeGroup() for _ in range(1000)]
    references = [weakref.ref(group) for group in groups]
    tracker = BackgroundTracker(lambda: hanging(forever), name="h", close_s=0.1)
    tracker.log(1, {})
    for index in range(1000):
        tracker.progress(index, groups.pop())  # type: ignore[arg-type]
    assert sum(reference() is not None for reference in references) <= module.MAX_GROUPS
    tracker.log(2, {})
    assert 0 <= tracker.dropped - (1000 - module.MAX_GROUPS) <= 1, "the thread may have taken the first event or not"
    tracker.close()
    forever.set()


def test_a_tracker_that_does_not_open_is_an_error_with_a_fix() -> None:
    forever = threading.Event()
    with pytest.raises(PluginError, match=r"tracker 'h' did not open within 0\.05 s"):
        BackgroundTracker(lambda: forever.wait() and hanging(forever), name="h", open_s=0.05)  # type: ignore[arg-type, return-value]
    forever.set()


def user_tracker(run_dir: Path, recipe: Any, *, fails: bool = False) -> Tracker:
    if fails:
        raise ValueError("no route")
    return hanging(threading.Event())


def test_user_supplied_trackers_run_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.BackgroundTracker.__init__, "__kwdefaults__", {"open_s": 5.0, "close_s": 0.1})
    recipe = build({"name": "t", "policy": {"model": "m"}, "tasks": {"family": "a:b"}, "trackers": [f"{__file__}:user_tracker"]})
    tracker = RunTracker(tmp_path, open_trackers(tmp_path, recipe, console=True))
    within(10.0, lambda: tracker.log(1, {"loss": 1.0}))
    within(10.0, tracker.close)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    failing = recipe.but({"trackers": [Part(f"{__file__}:user_tracker", options={"fails": True})]})
    with pytest.raises(PluginError, match=r"could not be opened: ValueError: no route"):
        open_trackers(tmp_path, failing, console=True)
