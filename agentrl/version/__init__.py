"""The registry of policy versions in the run folder (`versions/000012/version.json`), through which processes share the versions'
states."""

from agentrl.version.registry import FolderRegistry

__all__ = ["FolderRegistry"]
