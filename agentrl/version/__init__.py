"""The registry of policy versions: which weights exist, which of them serve, which proved good, which were retracted.

It is kept in the run folder (`versions/000012/version.json`), through which processes share it.
"""

from agentrl.version.registry import FolderRegistry

__all__ = ["FolderRegistry"]
