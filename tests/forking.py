"""Processes that race with each other or try a chat template. They are forked from a process that has imported their modules, because
starting them takes most of their time."""

from __future__ import annotations

import multiprocessing

from agentrl.agent.template import try_within

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "agentrl.experience", "agentrl.version", "tests.preloaded"])


def tried(text: str | None, folder: str | None, cpu_s: float) -> tuple[int | None, str]:
    """Replaces `agentrl.agent.template._run_child`."""
    process = FORKS.Process(target=try_within, args=(text, folder, cpu_s))
    process.start()
    process.join(120)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code, ""
