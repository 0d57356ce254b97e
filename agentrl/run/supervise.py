"""Restarts the learner when it dies or makes no progress, and watches servers that a run calls and cannot restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentrl.base import liveness
from agentrl.base.liveness import Liveness, Restarts
from agentrl.errors import LearnerError, LearnerHalted
from agentrl.sandbox import docker_client
from agentrl.session.opening import Run

_RESTARTS = 3  # in a row
_PING_S = 5.0  # between two pings of the daemon
_LOOK_S = 5.0  # between two checks of unanswered questions


async def watch_learner(run: Run) -> None:
    """Starts the learner, and restarts it from its newest checkpoint when it fails. A refusal of the learner is final.

    The count of restarts returns to 0 when a version is published that is newer than all earlier ones.
    """
    restarts, reached = Restarts(sound_s=0.0), _newest(run)
    while True:
        await run.learner.start()
        try:
            await run.learner.wait()
            return
        except LearnerHalted as error:
            run.tracker.alert(f"halted: {error}")
            raise
        except LearnerError as error:
            if (newest := _newest(run)) > reached:
                reached = newest
                restarts.progress()
            if (failures := restarts.failed()) > _RESTARTS:
                raise
            run.tracker.alert(f"{error}\n  restart {failures} of at most {_RESTARTS} without a new version")


def _newest(run: Run) -> int:
    version = run.registry.latest()
    return -1 if version is None else version.number


async def watch_daemon(alert: Callable[[str], None], live: Liveness | None = None) -> None:
    """Alerts when the Docker daemon stops answering, and when it answers again; ends only by cancellation.

    A run never starts or restarts a daemon, because other users of the machine may need it. Every request to it has a deadline, episodes
    are retried, and `rollout.max_fault_rate` pauses the run if that does not help.
    """
    live = live or Liveness("the Docker daemon", first_s=120.0)
    silent = False
    while True:
        if await asyncio.to_thread(docker_client.daemon_answers):
            live.progress("answering")
            if silent:
                alert("the Docker daemon answers again")
            silent = False
        elif (stuck := live.overdue()) and not silent:
            silent = True
            alert(f"{stuck}\n  fix: restart it (systemctl restart docker); episodes continue when it answers")
        await asyncio.sleep(_PING_S)


async def watch_external_servers(alert: Callable[[str], None]) -> None:
    """Alerts when an MCP server or a judge's endpoint answers no request, and when it answers again. Ends only by cancellation.

    Each request has its own deadline, after which its connection is closed; a server that a run starts is restarted with the next call.
    """
    silent: set[liveness.AnswerLiveness] = set()
    while True:
        for part in liveness.external_parts():
            stuck = part.overdue()
            if stuck and part not in silent:
                silent.add(part)
                alert(f"{stuck}\n  fix: {part.fix}")
            elif not stuck and part in silent:
                silent.discard(part)
                alert(f"{part.what} answers again")
        await asyncio.sleep(_LOOK_S)
