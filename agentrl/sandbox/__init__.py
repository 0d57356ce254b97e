"""Sandboxes that isolate an agent's programs (Docker, bubblewrap), with their images, warm pool and conformance checks.

Everything that a sandbox sends is untrusted input. No code here runs an agent's program on the host.
"""

from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.cleanup import OpenSandbox, evict, list_open, prune
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.pool import WarmPool
from agentrl.sandbox.select import open_backend, open_sandboxes, select_backend

__all__ = [
    "BubblewrapBackend",
    "DockerBackend",
    "OpenSandbox",
    "WarmPool",
    "evict",
    "list_open",
    "open_backend",
    "open_sandboxes",
    "prune",
    "select_backend",
]
