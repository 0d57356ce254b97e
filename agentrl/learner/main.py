"""`python -m agentrl.learner.main --run-dir DIR [--driver URL]`: one rank of a run's learner, started by `agentrl.learner.launch`.

With `--driver`, DIR is a mirror of the run folder on this host (`agentrl.cluster.mirror`), and the variable AGENTRL_DRIVER_KEY contains
the key.

The imports of this module are light, because the process must set its parent death signal before it spends seconds importing torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from agentrl.base.processes import die_with_parent, freeze_imports
from agentrl.base.run_lock import hold_shared_lock
from agentrl.cluster.link import take_key
from agentrl.errors import AgentRLError
from agentrl.learner.driver_reports import ExitReason, send_exit_reason


def main() -> int:
    """Returns 0 if all steps are done or a stop was requested, and 1 on an error, which is logged and sent to the driver."""
    parser = argparse.ArgumentParser(description="Runs one rank of a run's learner. agentrl.learner.launch starts it.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--root", type=Path, help="the project's root, for user-supplied parts in the recipe")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="id of the parent process; this process exits with its parent")
    parser.add_argument("--driver", help="address of the driver; required if this host does not share its disk")
    parser.add_argument("--mailbox", help="where to send the exit reason for the driver")
    parser.add_argument("--progress", help="where to report progress to the driver")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    if arguments.driver is not None:
        arguments.run_dir.mkdir(parents=True, exist_ok=True)
    hold_shared_lock(arguments.run_dir)  # until this process exits
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log = logging.getLogger("agentrl.learner")
    try:
        with freeze_imports():
            from transformers import AutoModelForCausalLM  # noqa: F401  imported here, because loading the model needs it

            from agentrl.learner.worker import run_worker

        driver = None if arguments.driver is None else (arguments.driver, take_key())
        run_worker(arguments.run_dir, root=arguments.root, progress=arguments.progress, driver=driver)
    except AgentRLError as error:
        log.error("%s: %s", type(error).__name__, error)
        send_exit_reason(arguments.mailbox, ExitReason.from_error(error))
        return 1
    except Exception as error:
        log.exception("the learner failed")
        send_exit_reason(arguments.mailbox, ExitReason.from_error(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
