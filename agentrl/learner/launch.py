"""`python -m agentrl.learner.launch PARENT_PID ARGS...`: torchrun, tied to the process that started it.

Killing the launcher must leave nothing behind: the launcher dies with its parent, and each worker with the launcher.
"""

from __future__ import annotations

import os
import sys

from agentrl.learner.lifeline import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    from torch.distributed.run import main as torchrun

    torchrun([*sys.argv[2:], "--parent", str(os.getpid())])


if __name__ == "__main__":
    main()
