"""Records at regular intervals in the run's timeline which parts of the run are working and which are waiting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from agentrl.base.activity import ACTIVITY, ATTEMPTS, REQUESTS, SANDBOXES, SCORING
from agentrl.observe.timeline import BUSY, DOWN, LOADING, WAITING_FOR

if TYPE_CHECKING:
    from agentrl.session.opening import Run

LOOK_S = 0.2
"""Seconds between two readings. A state that lasts for less time may be missed."""
_STARTING = ("", "starting", "loading the model", "resuming", "computing version 0's probe")  # work of a learner that is still starting


async def watch_parts(run: Run) -> NoReturn:
    """Records the states of the parts until it is cancelled.

    While the event loop is blocked, no states are recorded, so the last recorded states seem to last longer.
    """
    while True:
        run.progress.timeline.mark(part_states(run))
        await asyncio.sleep(LOOK_S)


def part_states(run: Run) -> dict[str, str]:
    """Returns the current state of each part: busy, down, or what it waits for."""
    attempts = ACTIVITY.count(ATTEMPTS)
    return {
        "server": _server_state(run),
        "learner": _learner_state(run.learner.alive, run.learner.liveness.work),
        "rollouts": BUSY if attempts else f"{WAITING_FOR}a version",
        "sandboxes": BUSY if ACTIVITY.count(SANDBOXES) else f"{WAITING_FOR}calls",
        "scoring": BUSY if ACTIVITY.count(SCORING) else f"{WAITING_FOR}episodes",
    }


def _server_state(run: Run) -> str:
    if not run.served.accepts_requests:
        return DOWN
    if run.served.loading:
        return LOADING
    return BUSY if run.groups.runner.pace.in_flight or ACTIVITY.count(REQUESTS) else f"{WAITING_FOR}requests"


def _learner_state(alive: bool, work: str) -> str:
    if not alive or work in _STARTING:
        return DOWN
    if not work.startswith(WAITING_FOR):
        return BUSY
    return f"{WAITING_FOR}groups" if "group" in work else f"{WAITING_FOR}the server"
