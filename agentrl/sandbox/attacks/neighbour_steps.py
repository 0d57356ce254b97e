"""Steps of the host after attacks on other sandboxes: on their CPU time, or on their privacy."""

from __future__ import annotations

import asyncio

from agentrl.errors import AgentRLError
from agentrl.sandbox.attacks.arena import AttackFailed, Escaped
from agentrl.sandbox.attacks.file_steps import STEPS
from agentrl.sandbox.attacks.host_steps import MEBIBYTE, StepContext
from agentrl.sandbox.channel_sandbox import ChannelSandbox

__all__ = ["STEPS"]

TOGETHER = 60
SPIN_S = 3.0
ANSWER_S = 30.0
OPEN_S = 60.0
OPENED = """
import os, subprocess
for path in ("/etc/passwd", "/etc/os-release", "/dev/null", "/dev/urandom", "/usr/bin/cat"):
    with open(path, "rb") as file: file.read(10)
os.listdir("/usr/bin")
subprocess.run(["sh", "-c", "cat /etc/passwd >/dev/null; python3 -I -c 'import csv, json'"], check=True)
"""


async def _spin_together(scene: StepContext) -> str:
    """Runs the program in many sandboxes at once: each must time out, and answer afterwards."""
    program = (await scene.sandbox.read("program.py", max_bytes=MEBIBYTE)).decode()
    scene.arena.sandboxes += TOGETHER
    opened = await asyncio.gather(
        *(scene.backend.open(scene.arena.spec, timeout_s=OPEN_S) for _ in range(TOGETHER)), return_exceptions=True
    )
    sandboxes = [sandbox for sandbox in opened if isinstance(sandbox, ChannelSandbox)]
    try:
        if len(sandboxes) < TOGETHER:
            raise AttackFailed(f"only {len(sandboxes)} of {TOGETHER} sandboxes opened")
        ends = await asyncio.gather(*(_end_of(sandbox, program) for sandbox in sandboxes))
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        scene.arena.sandboxes -= TOGETHER
    if wrong := sorted({end for end in ends if end != "timeout"}):
        raise Escaped(f"{sum(end != 'timeout' for end in ends)} of {TOGETHER} sandboxes that spin got no time-out: {wrong[0]}")
    return f"{TOGETHER} at once, and each timed out"


async def _end_of(sandbox: ChannelSandbox, program: str) -> str:
    """How a program ends in a sandbox that must answer afterwards."""
    try:
        result = await sandbox.exec(["python3", "-I", "-c", program], timeout_s=SPIN_S)
        answer = await sandbox.python("print(6 * 7)", timeout_s=ANSWER_S)
    except AgentRLError as error:
        return f"{type(error).__name__}: {error}"
    return result.reason or f"exit {result.exit_code}" if answer.stdout == "42\n" else f"answers {answer}"


async def _unseen_by_watchers(scene: StepContext) -> str:
    """While the program watches, the neighbour and a fresh sandbox open files. Then its sandbox opens one, to show that the watch works."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ANSWER_S
    while await scene.says("import os; print(os.path.exists('watching'))") != "True":
        if loop.time() > deadline:
            raise AttackFailed("the program does not start to watch")
    await asyncio.sleep(0.5)  # the exec server has made its next process ready by now
    before = len(await scene.sandbox.read("seen", max_bytes=MEBIBYTE))
    await scene.arena.neighbour.python(OPENED, timeout_s=ANSWER_S)
    fresh = await scene.backend.open(scene.arena.spec, timeout_s=OPEN_S)
    try:
        await fresh.exec(["python3", "-I", "-c", OPENED], timeout_s=ANSWER_S)
    finally:
        await fresh.close()
    seen = (await scene.sandbox.read("seen", max_bytes=MEBIBYTE))[before:].decode("utf-8", "replace").splitlines()
    shared = [line for line in seen if not line.startswith("/home/agent/")]  # which the host itself reads
    if shared:
        raise Escaped(f"saw {len(shared)} accesses by other sandboxes, such as {shared[0]}")
    deadline = loop.time() + ANSWER_S
    while b"/etc/os-release" not in await scene.sandbox.read("seen", max_bytes=MEBIBYTE):
        if loop.time() > deadline:
            raise AttackFailed("its watches see nothing, not even its own sandbox")
        await scene.sandbox.exec(["cat", "/etc/os-release"], timeout_s=ANSWER_S)
    return "saw only its own sandbox"


STEPS.update(spin_together=_spin_together, unseen_by_watchers=_unseen_by_watchers)
