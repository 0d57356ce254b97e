"""`agentrl`, except that servers, learner and workers do not share the driver's disk: `python -m tests.e2e.own_disks SERVERS LEARNERS ...`.

The variable AGENTRL_TEST_DISKS has the folder of their mirrors. For SERVERS and LEARNERS see `tests.e2e.forked`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e import forked

if __name__ == "__main__":
    from agentrl import cli
    from agentrl.session import opening
    from tests.cluster.launchers import OwnDisks

    servers, learners, *arguments = sys.argv[1:]
    forked.use(Path(servers), Path(learners))
    opening.LocalLauncher = OwnDisks  # type: ignore[assignment,misc]
    cli.main(arguments)
