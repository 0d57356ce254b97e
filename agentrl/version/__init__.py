"""The registry of policy versions: which weights exist, which of them serve, which proved good, which were taken back.

It lives in the run folder (`versions/000012/version.json`) and is shared between processes through it.
"""

from agentrl.version.manifest import folder_manifest, sha256_file
from agentrl.version.registry import FolderRegistry

__all__ = ["FolderRegistry", "folder_manifest", "sha256_file"]
