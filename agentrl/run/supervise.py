"""Restarts the learner when it dies or makes no progress, and watches servers that the run uses but cannot restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agentrl.base import liveness
from agentrl.base.liveness import Liveness, RestartAlert, Restarts
from agentrl.errors import LearnerError, LearnerHalted
from agentrl.learner.process import LearnerProcess
from agentrl.protocols import VersionRegistry
from agentrl.sandbox import docker_client

if TYPE_CHECKING:
    from agentrl.session.opening import Run

_RESTARTS = 3  # maximum number of restarts in a row
_PING_S = 5.0  # interval between two pings of the daemon
_LOOK_S = 5.0  # interval between two checks of unanswered requests


async def watch_learner(learner: LearnerProcess, registry: VersionRegistry, alert: Callable[[str], None]) -> None:
    """Starts the learner, and restarts it from its newest checkpoint when it fails, except after `LearnerHalted`.

    Returns when the learner has finished. Raises `LearnerHalted`, and `LearnerError` if three restarts in a row did not help. The count of
    restarts is reset to 0 when a version is published that is newer than all earlier versions.
    """
    restarts, reached = Restarts(sound_s=0.0), await asyncio.to_thread(_newest, registry)
    while True:
        await learner.start()
        try:
            await learner.wait()
            return
        except LearnerHalted as error:
            alert(f"halted: {error}")
            raise
        except LearnerError as error:
            if (newest := await asyncio.to_thread(_newest, registry)) > reached:
                reached = newest
                restarts.progress()
            if (failures := restarts.failed()) > _RESTARTS:
                raise
            alert(RestartAlert("learner", f"{error}\n  restart {failures} of at most {_RESTARTS} without a new version"))


def _newest(registry: VersionRegistry) -> int:
    version = registry.latest()
    return -1 if version is None else version.number


def watch_run(run: Run) -> list[Coroutine[Any, Any, None]]:
    """Returns the coroutines that watch the parts of every run that samples: the servers, the fault rate, the Docker daemon and the
    workers."""
    watching = [run.served.watch(on_loss=run.learner.kill), run.fault_rate.watch()]
    if run.sandboxes.name == "docker":
        watching.append(watch_daemon(run.tracker.alert))
    if run.workers is not None:
        watching.append(run.workers.watch())
    return watching


async def watch_daemon(alert: Callable[[str], None], live: Liveness | None = None) -> None:
    """Sends an alert when the Docker daemon stops responding, and another when it responds again. Runs until it is cancelled.

    A run never starts or restarts a daemon, because other users of the machine may need it. Every request to the daemon has a deadline, and
    episodes are retried. If the retries fail too, the run is paused because of its fault rate.
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
    """Sends an alert when an MCP server or a judge's endpoint stops responding, and another when it responds again. Runs until it is
    cancelled.

    Each request has its own deadline, after which its connection is closed. A server that the run started is restarted by the next call to
    it.
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
