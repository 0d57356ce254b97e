"""Restarts the learner when it dies or makes no progress, and watches the container daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentrl.errors import LearnerError, LearnerHalted
from agentrl.liveness import Liveness
from agentrl.run.opening import Run
from agentrl.sandbox import engine

_RESTARTS = 3
_PING_S = 5.0  # between two pings of the daemon


async def watch_learner(run: Run) -> None:
    """Starts the learner, and restarts it from its newest checkpoint when it fails. A refusal of the learner is final."""
    for restart in range(_RESTARTS + 1):
        await run.learner.start()
        try:
            await run.learner.wait()
            return
        except LearnerHalted as error:
            run.tracker.alert(f"halted: {error}")
            raise
        except LearnerError as error:
            if restart == _RESTARTS:
                raise
            run.tracker.alert(f"{error}\n  restart {restart + 1} of at most {_RESTARTS}")


async def watch_daemon(alert: Callable[[str], None], liveness: Liveness | None = None) -> None:
    """Alerts when the Docker daemon stops answering, and when it answers again; ends only by cancellation.

    A run never starts or restarts a daemon, because other users of the machine may need it. Every request to it has a deadline, episodes
    are retried, and `rollout.max_fault_rate` pauses the run if that does not help.
    """
    live = liveness or Liveness("the Docker daemon", first_s=120.0)
    silent = False
    while True:
        if await asyncio.to_thread(engine.answers):
            live.progress("answering")
            if silent:
                alert("the Docker daemon answers again")
            silent = False
        elif (stuck := live.overdue()) and not silent:
            silent = True
            alert(f"{stuck}\n  fix: restart it (systemctl restart docker); episodes continue when it answers")
        await asyncio.sleep(_PING_S)
