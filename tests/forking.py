"""Processes that race with each other: forked from one that has imported what they need, since starting each anew is most of its cost."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "agentrl.experience", "agentrl.version"])
