"""The table of all fault cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chaos import driver, parts, verifier, workers
from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import Subject

SERVER_S, LEARNER_S, WORKER_S, SANDBOX_S, DETECTED_S, RESUMED_S = 90.0, 60.0, 5.0, 2.0, 30.0, 180.0
"""Maximum seconds until a killed server, learner, worker or sandbox is replaced, a stopped part is detected, and the run of a killed driver
is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault to inject into a run."""

    number: int  # number of the fault; variants of one fault have the same number
    name: str  # unique
    injects: str
    inject: Callable[[Subject], Injected]  # raises `ChaosError` if the fault cannot be injected or the run does not recover
    bound_s: float | None = None  # maximum of `Injected.recovered_s`
    needs_small_disk: bool = False  # mounting a small disk needs root
    needs_bubblewrap: bool = False
    needs_workers: bool = False  # also Redis; the case is injected into a second run, which has both

    @property
    def title(self) -> str:
        """The number and the name of the case, as text."""
        return f"{self.number:>2} {self.name}"


def _case(number: int, name: str, inject: Callable[[Subject], Injected], bound_s: float | None = None, **needs: bool) -> Case:
    return Case(number=number, name=name, injects=" ".join((inject.__doc__ or "").split()), inject=inject, bound_s=bound_s, **needs)


CASES: tuple[Case, ...] = (
    _case(22, "second-driver", driver.second_driver),
    _case(1, "server-in-flight", parts.server_killed_in_flight, SERVER_S),
    _case(5, "learner-uncommitted", parts.learner_killed_uncommitted, LEARNER_S),
    _case(24, "server-stopped", parts.server_stopped, DETECTED_S),
    _case(13, "verifier-raises", verifier.verifier_raises),
    _case(14, "verifier-nan", verifier.verifier_returns_nan),
    _case(9, "sandboxes-killed", parts.sandboxes_killed, SANDBOX_S, needs_bubblewrap=True),
    _case(20, "interrupted", driver.interrupted, RESUMED_S),
    _case(25, "learner-stopped", parts.learner_stopped, DETECTED_S),
    _case(25, "learner-stopped-with-lock", parts.learner_stopped_with_lock, DETECTED_S),
    _case(32, "late-scores", verifier.late_scores),
    _case(11, "driver-killed", driver.driver_killed, RESUMED_S, needs_bubblewrap=True),
    _case(34, "disk-full", driver.disk_full, RESUMED_S, needs_small_disk=True),
    _case(1, "server-idle", parts.server_killed_idle, SERVER_S),
    _case(2, "engine-killed", parts.engine_killed, SERVER_S),
    _case(3, "server-in-swap", parts.server_killed_in_swap, SERVER_S),
    _case(4, "learner-before-step", parts.learner_killed_before, LEARNER_S),
    _case(4, "learner-in-step", parts.learner_killed_during, LEARNER_S),
    _case(4, "learner-after-step", parts.learner_killed_after, LEARNER_S),
    _case(6, "learner-before-rename", parts.learner_killed_before_rename, LEARNER_S),
    _case(7, "checkpoint-damaged", parts.checkpoint_damaged, LEARNER_S),
    _case(21, "verifier-hangs", verifier.verifier_hangs),
    _case(21, "verifier-blocks", verifier.verifier_blocks),
    _case(28, "hang-up", driver.hang_up),
    _case(31, "worker-killed", workers.worker_killed, WORKER_S, needs_workers=True),
    _case(30, "redis-killed", workers.redis_killed, needs_workers=True),
    _case(31, "worker-stopped", workers.worker_stopped, DETECTED_S, needs_workers=True),
    _case(30, "redis-driver-killed", driver.driver_killed, RESUMED_S, needs_bubblewrap=True, needs_workers=True),
    _case(31, "workers-killed", workers.workers_killed, LEARNER_S, needs_workers=True),
)
"""All cases, in the order in which they are injected into a run."""
