"""The timeline of a run's parts: for each part, the seconds of all states add up to the wall time of the interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.timeline import BUSY, DOWN, PARTS, PREFIX, UTILIZATION, WALL, Timeline, time_by_state

STATES = st.sampled_from([BUSY, DOWN, "waiting for groups", "waiting for weights"])
EVENTS = st.lists(
    st.tuples(st.floats(0, 100), st.one_of(st.dictionaries(st.sampled_from(PARTS), STATES), st.sampled_from(["take", "restart"]))),
    max_size=40,
)


@given(EVENTS)
def test_the_states_of_each_part_add_up_to_the_wall_time(events: list[tuple[float, object]]) -> None:
    now, started = 50.0, None
    timeline = Timeline(clock=lambda: now)
    expected: dict[tuple[str, str], float] = {}
    states = dict.fromkeys(PARTS, DOWN)
    for seconds, event in [*events, (1.0, "take")]:
        now += seconds
        for part, state in states.items():
            expected[part, state] = expected.get((part, state), 0.0) + seconds
        if isinstance(event, dict):
            timeline.mark(event)
            states |= event
        elif event == "restart":
            timeline.restart()
            started, expected = now, {}
        else:
            metrics = timeline.take()
            assert timeline.running == (started is not None)
            if started is None:
                assert metrics == {}
                continue
            assert metrics[WALL] == pytest.approx(now - started)
            for part, spent in time_by_state([metrics]).items():
                assert sum(spent.values()) == pytest.approx(now - started), part
                for state, seconds_in_state in spent.items():
                    assert seconds_in_state == pytest.approx(expected[part, state])
                if now > started:
                    assert metrics[f"{UTILIZATION}{part}"] == pytest.approx(spent.get(BUSY, 0.0) / (now - started))
            started, expected = now, {}


def test_an_unknown_part_is_an_error_and_changes_nothing() -> None:
    now = 0.0
    timeline = Timeline(clock=lambda: now)
    timeline.restart()
    with pytest.raises(KeyError, match="unknown parts: gpu"):
        timeline.mark({"gpu": BUSY, "server": BUSY})
    now = 2.0
    assert timeline.take()[f"{PREFIX}server/{DOWN}"] == 2.0


def test_hostile_metrics_are_not_parts() -> None:
    assert time_by_state([{f"{PREFIX}server/busy": 1.0, f"{PREFIX}x/busy": 2.0, "timeline_s": 3.0}, {f"{PREFIX}server/busy": 1.0}]) == {
        "server": {"busy": 2.0}
    }
