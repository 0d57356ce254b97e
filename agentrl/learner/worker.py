"""`python -m agentrl.learner.worker --run-dir DIR`: one rank of a run's learner, started by torchrun.

Light on purpose: the process ties itself to its parent before it spends seconds importing torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from agentrl.errors import AgentRLError
from agentrl.learner.farewell import Farewell, say
from agentrl.learner.lifeline import die_with_parent
from agentrl.runlock import hold_part


def main() -> int:
    """0 when all steps are made or a stop was asked for, 1 when the learner cannot go on; the log says why, and the driver hears it."""
    parser = argparse.ArgumentParser(description="One rank of a run's learner; start it with torchrun.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process to die with: the one that started this one")
    parser.add_argument("--mailbox", help="where to leave a word for the driver")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    hold_part(arguments.run_dir)  # for as long as this process lives
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log = logging.getLogger("agentrl.learner")
    try:
        from agentrl.learner.steps import work

        work(arguments.run_dir)
    except AgentRLError as error:
        log.error("%s: %s", type(error).__name__, error)
        say(arguments.mailbox, Farewell.of(error))
        return 1
    except Exception as error:
        log.exception("the learner failed")
        say(arguments.mailbox, Farewell.of(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
