"""Creates the folders below /logs of a new sandbox whose image comes from a Dockerfile. Runs as the agent, before any program. Unless the
sandbox is opened from a snapshot, the host appends a call of `fill_workdir`."""

from __future__ import annotations

import os
import shutil

HOME, START = "/home/agent", "/opt/agentrl/start"


def fill_workdir() -> None:
    """Copies the image's files to the working directory."""
    for name in os.listdir(START):
        source, target = os.path.join(START, name), os.path.join(HOME, name)
        if os.path.isdir(source) and not os.path.islink(source):
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target, follow_symlinks=False)


for name in ("agent", "verifier", "artifacts"):
    os.makedirs(os.path.join("/tmp/logs", name))
