"""`agentrl`, except that its inference servers and its learner are forked from processes that have imported what they need.

    python -m tests.e2e.forked SERVERS LEARNERS ARGUMENTS...

Apart from that, both are the real ones. Starting them takes most of the time of a short run, and only some tests need it:
`python -m agentrl.serving.launch` and torchrun start the runs of test_chaos, test_init and test_lora. SERVERS and LEARNERS are addresses of
hosts; see `tests.learner.preloaded`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.learner import preloaded

SERVER = "agentrl.serving.launch"


def forked_server(host: Path, launch_command: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Returns a `launch_command` whose servers are forked from a host."""

    def command_of(*arguments: Any, **options: Any) -> list[str]:
        command = launch_command(*arguments, **options)
        argv = command[command.index(SERVER) + 1 :]
        argv[argv.index("--driver-pid") + 1] = host.stem  # its parent; it ends with the command, which ends with the driver
        return preloaded.command(host, 1, SERVER, *argv)

    return command_of


def use(servers: Path, learners: Path) -> None:
    """Forks every server and learner of this process from these hosts."""
    from agentrl.learner import LearnerProcess
    from agentrl.serving import server

    def forked_learner(learner: LearnerProcess, placement: str) -> list[str]:
        return preloaded.command(learners, learner.recipe.learner.ranks, *learner._worker())

    server.launch_command = forked_server(servers, server.launch_command)
    LearnerProcess._command = forked_learner  # type: ignore[method-assign]


@contextlib.contextmanager
def hosting(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The hosts of servers, with one thread each, and those of learners."""
    from agentrl.serving.process import server_environment

    with (
        preloaded.hosting(folder / "servers", "servers", server_environment(str(folder), cpu_threads=1)) as servers,
        preloaded.hosting(folder / "learners") as learners,
    ):
        yield servers, learners


if __name__ == "__main__":
    from agentrl import cli

    use(Path(sys.argv[1]), Path(sys.argv[2]))
    cli.main(sys.argv[3:])
