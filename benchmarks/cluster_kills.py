"""Trains the quickstart over four hosts while nodes, their network and the driver fail, one after another.

    python benchmarks/cluster_kills.py                                  # 20 faults of all kinds, in random order
    python benchmarks/cluster_kills.py --faults 3 --kinds head driver --keep runs/faults

The hosts are network namespaces (tests/cluster/hosts.py) with their own addresses, Ray nodes and disks: driver, Redis and Ray's head;
server; learner; rollout workers. After each fault the run must finish another step. Requires root. Kinds:

    server, learner, worker   SIGKILL of everything on that host, which joins again after 5 s with an empty disk
    driver                    SIGKILL of the driver; its supervisor (`agentrl train --restarts`) starts it again
    head                      SIGKILL of everything on the driver's host; Ray's head and the driver start again from its disk
    partition                 30 s without network for a random one of the other hosts
    slow                      30 s with 1 Mbit/s for a random one of the other hosts

Prints a Markdown table: seconds until the next step was finished. At the end it checks the store: no group was lost or trained twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agentrl.base.processes import process_tree  # noqa: E402
from agentrl.experience import SqliteStore  # noqa: E402
from agentrl.experience.audit import verify  # noqa: E402
from scripts.cluster_demo import SURVIVING, Cluster, steps_of  # noqa: E402
from tests.cluster.hosts import Host, hosts  # noqa: E402

NODES = {"server": "serves", "learner": "trains", "worker": "works"}
KINDS = [*NODES, "driver", "head", "partition", "slow"]
GIVEN = ["rollout.groups_per_step=4", "rollout.group.size=4", "rollout.concurrency=16", "evaluation.heldout=4", "evaluation.heldout_real=2"]
FAULT_S, AWAY_S = 30.0, 5.0
STEP_S = 600.0


class Experiment:
    """The hosts and the run."""

    def __init__(self, runs: Path, head: Host, others: dict[str, Host], overrides: list[str]) -> None:
        self.run, self.head, self.others = runs / "run", head, others
        self.cluster = Cluster(head, runs, storage=runs / "gcs")
        self.cluster.wait_for(1)
        for number, name in enumerate(others, start=2):
            self._join(name)
            self.cluster.wait_for(number)  # nodes of one machine that start at once choose the same sockets
        needs = {name: {"cpus": 1, "memory_gib": 0.5, resource: 1} for name, resource in NODES.items()}
        self._given = ["rollout.workers=1", "store=redis", f"cluster.resources={json.dumps(needs)}", "steps=10000", *GIVEN, *overrides]
        self.driver = self._drive()

    def wait_for_step(self, after: int) -> None:
        """Returns when the run has finished a step later than `after`."""
        deadline = time.monotonic() + STEP_S
        while self.step <= after:
            if self.driver.poll() is not None:
                sys.exit(f"error: the run ended with code {self.driver.returncode}; see {self.run.parent / 'driver.log'}")
            if time.monotonic() > deadline:
                sys.exit(f"error: no step after {after} within {STEP_S:g} s; see {self.run.parent / 'driver.log'}")
            self._restart_nodes()
            time.sleep(0.2)

    def _restart_nodes(self) -> None:
        """Starts Ray nodes that have ended, as the supervisor of a machine does: after a long partition, or a slow start."""
        if self.cluster.head_node.poll() is not None:
            self.cluster.start_head()
        for name, host in self.others.items():
            if host.processes[-1].poll() is not None:
                self._join(name)

    @property
    def step(self) -> int:
        """The last finished step."""
        return max(steps_of(self.run), default=0)

    def inject(self, kind: str, rng: random.Random) -> str:
        """Causes a fault, and ends it if it has an end. Returns what it hit."""
        if kind == "driver":
            self._signal_driver(signal.SIGKILL)
            return kind
        if kind == "head":
            self.head.kill()
            self.cluster.start_head()
            self.driver = self._drive("--resume")
            return kind
        name = kind if kind in NODES else rng.choice(list(NODES))
        host = self.others[name]
        if kind in NODES:
            host.kill()
            time.sleep(AWAY_S)
            self._join(name)
        elif kind == "partition":
            host.disconnect()
            time.sleep(FAULT_S)
            host.reconnect()
        else:
            host.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
            time.sleep(FAULT_S)
            host.run("tc", "qdisc", "del", "dev", "eth0", "root")
        return f"{kind} of the {name}" if kind not in NODES else kind

    def stop(self) -> list[str]:
        """Ends the run after its current step. Returns what is wrong with its records."""
        self._signal_driver(signal.SIGINT)
        code = self.driver.wait(STEP_S)
        steps = steps_of(self.run)
        store = SqliteStore(self.run / "experience.sqlite")
        problems = [str(problem) for problem in verify(self.run, store)]
        store.close()
        if steps != list(range(1, len(steps) + 1)):
            problems.append(f"the steps are {steps}")
        return [*problems, f"exit code {code}"] if code not in (0, 130) else problems

    def _signal_driver(self, number: int) -> None:
        """Sends a signal to the driver, the child of its supervisor."""
        os.kill([pid for pid in process_tree(self.driver.pid) if _is_driver(pid)][-1], number)

    def _join(self, name: str) -> None:
        self.cluster.add(self.others[name], **{NODES[name]: 1})

    def _drive(self, *options: str) -> subprocess.Popen[bytes]:
        command = ["-m", "agentrl", "train", "recipes/quickstart.py", *self._given, *options]
        command += ["--run-dir", str(self.run), "--sandbox", "bubblewrap", "--cluster", self.cluster.address, "--restarts", "100"]
        log = (self.run.parent / "driver.log").open("ab")
        return self.head.python(*command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **SURVIVING})


def _is_driver(pid: int) -> bool:
    return b"agentrl\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()


def main() -> int:
    """Prints the table; 1 if a record is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the run and its logs; by default a temporary one")
    parser.add_argument("overrides", nargs="*", help="overrides of recipes/quickstart.py, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background, which the run would inherit
    rng = random.Random(args.seed)
    kinds = [args.kinds[number % len(args.kinds)] for number in range(args.faults)]
    rng.shuffle(kinds)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-kills-") as name, hosts(1 + len(NODES)) as (head, *others):
        runs = args.keep.resolve() if args.keep else Path(name)
        runs.mkdir(parents=True, exist_ok=True)
        experiment = Experiment(runs, head, dict(zip(NODES, others, strict=True)), args.overrides)
        experiment.wait_for_step(1)
        print("| fault | after step | seconds until the next step | load |\n| --- | --- | --- | --- |", flush=True)
        for kind in kinds:
            step, start = experiment.step, time.monotonic()
            hit = experiment.inject(kind, rng)
            experiment.wait_for_step(step)
            seconds.setdefault(kind, []).append(time.monotonic() - start)
            print(f"| {hit} | {step} | {seconds[kind][-1]:.0f} | {os.getloadavg()[0]:.1f} |", flush=True)
            experiment.wait_for_step(experiment.step)  # a step without a fault
        problems = experiment.stop()
    print()
    for kind, values in seconds.items():
        print(f"{kind}: {len(values)} faults, median {statistics.median(values):.0f} s, longest {max(values):.0f} s")
    print("\n".join(problems) or "no group lost, none trained twice")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
