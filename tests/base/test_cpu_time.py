"""CPU seconds by part: no tick is lost or counted twice while processes start, work and end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base.cpu_time import DRIVER, IDLE, MODULES, OTHERS, SANDBOXES, CpuClock, ProcessTimes, read_processes, read_totals

TICK = 1.0 / os.sysconf("SC_CLK_TCK")
ROOT = 100
COMMANDS = ["bwrap", *(f"python -m {module}" for module in MODULES)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 20), st.sampled_from(COMMANDS)),
        st.tuples(st.just("work"), st.integers(0, 20), st.integers(1, 50)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Machine:
    """Processes of a simulated machine. When a process ends, its parent gets its time and process 1 its children, as a kernel does
    for awaited processes."""

    def __init__(self) -> None:
        self.table = {1: ["init", 0, 0, 0], ROOT: ["agentrl train", 1, 0, 0]}  # command, parent, own ticks, ticks of ended children
        self.next_pid, self.worked = ROOT + 1, 0

    def processes(self) -> dict[int, ProcessTimes]:
        return {pid: ProcessTimes(parent, pid, own, children, "x") for pid, (_, parent, own, children) in self.table.items()}  # type: ignore[arg-type]

    def below_root(self) -> list[int]:
        return [pid for pid in self.table if pid > ROOT]

    def step(self, action: str, choice: int, value: object) -> None:
        pids = self.below_root()
        if action == "start":
            parent = ([ROOT, *pids])[choice % (len(pids) + 1)]
            self.table[self.next_pid] = [str(value), parent, 0, 0]
            self.next_pid += 1
        elif action == "work":
            row = self.table[([ROOT, *pids])[choice % (len(pids) + 1)]]
            row[2] += value  # type: ignore[operator]
            self.worked += value  # type: ignore[operator]
        elif action == "end" and pids:
            leaves = [pid for pid in pids if not any(entry[1] == pid for entry in self.table.values())]
            pid = leaves[choice % len(leaves)]
            _, parent, own, children = self.table.pop(pid)
            self.table[parent][3] += own + children  # type: ignore[index, operator]


@given(STEPS)
def test_every_tick_of_a_process_tree_is_counted_once(steps: list[tuple[str, int, object]]) -> None:
    machine = Machine()
    clock = CpuClock(
        root=ROOT,
        processes=machine.processes,
        totals=lambda: (machine.worked + 7, 11),
        command=lambda pid: str(machine.table[pid][0]),
    )
    before: dict[str, float] = {}
    for step in [*steps, ("read", 0, 0)]:
        if step[0] != "read":
            machine.step(*step)
            continue
        counts = clock.read()
        assert sum(counts.values()) == pytest.approx(machine.worked * TICK), "with others, which is zero here"
        assert counts[OTHERS] == 0 and counts[IDLE] == 0
        assert all(counts.get(part, 0.0) >= seconds for part, seconds in before.items()), "counts never fall"
        before = counts


def test_the_command_determines_the_part_of_a_process_and_its_children() -> None:
    machine = Machine()
    clock = CpuClock(root=ROOT, processes=machine.processes, totals=lambda: (0, 0), command=lambda pid: str(machine.table[pid][0]))
    rows = [("python -m agentrl.run.worker runs/x", ROOT), ("bwrap --unshare-all", 101), ("python", 102)]
    rows += [("python -m agentrl.learner.launch 1 2", ROOT), ("python -m agentrl.learner.main", 104), ("VLLM::EngineCore", ROOT)]
    for number, (command, parent) in enumerate(rows):
        machine.table[101 + number] = [command, parent, 10**number, 0]
    assert {part: round(seconds / TICK) for part, seconds in clock.read().items() if seconds} == {
        "workers": 1,
        SANDBOXES: 10 + 100 + 100_000,
        "learner": 1_000 + 10_000,
    }


@pytest.mark.slow
def test_real_processes_count_while_they_run_and_after_they_end() -> None:
    clock = CpuClock()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = clock.read()[SANDBOXES]
        child.communicate("\n")
    ended = clock.read()[SANDBOXES]
    assert 0.28 <= running <= ended <= running + 0.2, "its time moved from the child to this process, and counts once"
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert clock.read()[DRIVER] >= 0.08


def test_processes_and_totals_of_this_machine_are_readable() -> None:
    assert read_processes()[os.getpid()].parent == os.getppid()
    busy, idle = read_totals()
    assert busy > 0 and idle > 0
