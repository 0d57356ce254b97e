"""The learner under the driver's eyes: started, and restarted when it dies or makes no progress."""

from __future__ import annotations

import logging

from agentrl.errors import LearnerError, LearnerHalted
from agentrl.run.opening import Run

log = logging.getLogger(__name__)

_RESTARTS = 3


async def watch_learner(run: Run) -> None:
    """Starts the learner, and restarts it when it fails; it resumes from its newest checkpoint. What it refuses is final."""
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
            log.warning("%s", error)
            run.tracker.alert(f"{error}\n  restart {restart + 1} of at most {_RESTARTS}")
