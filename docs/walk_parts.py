"""The scripted group and the scripted server of `walk.py`.

Everything else is the real part: task family, schedule, group and episode runner, turn loop, tools, verifier, store, objective, the
learner's engine and update, the version's publication, registry and swap. A script replaces three parts: the policy's completions, the
programs' outputs in the sandbox, and vLLM's answers over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agentrl.agent.chat import ChatFormat
from agentrl.base.files import sha256_file
from agentrl.config import Recipe
from agentrl.experience import FolderCheckpoints, SqliteStore
from agentrl.learner import ranks as processes
from agentrl.learner.access import FolderAccess
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.publish import publish_version, select_probe_rows
from agentrl.learner.update import Updater
from agentrl.objective import assemble
from agentrl.records import ExecResult, Group, PolicyVersion, Probe, Split, SwapReport, Task, codec
from agentrl.reward import TaskScorer
from agentrl.rollout.scheduling import Admission
from agentrl.serving import VLLMServer
from agentrl.serving.control import ControlPlane
from agentrl.serving.supervisor import SupervisedServer, open_channel
from agentrl.session.builders import build_episode_runner, build_group_runner, fault_rate
from agentrl.session.models import copy_base_version
from agentrl.session.preflight import open_chat
from agentrl.task import GroupSchedule
from agentrl.task.schedule import open_family
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.version import FolderRegistry

ROOT = Path(__file__).resolve().parents[1]


def small_recipe() -> Recipe:
    """Returns the quickstart's recipe with one group of four attempts and one step on CPU."""
    from recipes.quickstart import recipe

    model = str(ROOT / recipe.policy.model)
    changes = {"steps": 1, "device": "cpu", "policy.model": model, "rollout.group.size": 4, "rollout.groups_per_step": 1}
    return recipe.but(changes)


# Walk 1: from the schedule to the update


@dataclass(slots=True, kw_only=True)
class Learner:
    """The learner's parts, open in this process as its only rank."""

    recipe: Recipe
    folder: Path
    store: SqliteStore
    registry: FolderRegistry
    engine: PolicyEngine
    updater: Updater
    tokenizer: Any
    chat: ChatFormat

    @classmethod
    def open(cls, recipe: Recipe, folder: Path) -> Learner:
        """Writes version 0 into the run folder and opens the parts."""
        base = folder / "versions" / "000000"
        copy_base_version(Path(recipe.policy.model), base)
        registry = FolderRegistry(folder / "versions")
        registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256=sha256_file(base / "model.safetensors")))
        rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(rendezvous, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        engine = PolicyEngine(base, recipe, processes.join("cpu"))
        chat = open_chat(base, policy=recipe.policy)
        store = SqliteStore(folder / "experience.sqlite")
        return cls(
            recipe=recipe,
            folder=folder,
            store=store,
            registry=registry,
            engine=engine,
            updater=Updater(engine),
            tokenizer=AutoTokenizer.from_pretrained(base),
            chat=chat,
        )

    def close(self) -> None:
        """Closes store and registry, and leaves the process group."""
        self.store.close()
        self.registry.close()
        processes.leave()


def calling(name: str, **arguments: Any) -> str:
    """Returns the text of a tool call, as the quickstart's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task_to_update(learner: Learner, trace: AbstractContextManager[object]) -> tuple[Group, dict[str, float]]:
    """Takes group 0 from the schedule to an update inside `trace`. Returns the group and the update's metrics.

    All attempts run the gold program. The first two submit the right answer, the others a wrong one.
    """
    recipe = learner.recipe
    family = open_family(recipe.tasks, seed=recipe.seed, root=ROOT)
    schedule = GroupSchedule(family, recipe.seed)
    gold = family.task(Split.TRAIN, 0)  # group 0's task, for the script only
    policy = ScriptedPolicy(learner.tokenizer, lambda turn, episode: _attempt_turn(family.gold(gold), gold, turn, episode))
    answer = ExecResult(exit_code=0, stdout=str(gold.data["answer"]), stderr="", wall_s=0.0)
    scorer = TaskScorer(root=ROOT)
    scorer.load(gold.verifiers)
    episodes = build_episode_runner(recipe, policy, ScriptedSandboxes(lambda code: answer), learner.chat)
    checkpoints = FolderCheckpoints(learner.folder / "running")
    runner = build_group_runner(
        recipe, episodes, scorer, checkpoints, fault_rate(recipe).record_attempt, Admission(recipe.rollout.concurrency)
    )

    async def sample() -> None:
        task = schedule.task(0)
        learner.store.put(await runner.run_group(0, task))

    with trace:
        asyncio.run(sample())
        learner.store.assign(0, [0])
        groups = learner.store.groups([0])
        metrics = learner.updater.update(assemble(0, groups, recipe).batch)
    return groups[0], metrics


def _attempt_turn(program: str, task: Task, turn: int, episode: str) -> str:
    if turn == 0:
        return calling("python", code=program)
    member = int(episode.split("-")[1])
    return calling("submit", answer=str(task.data["answer"]) if member < 2 else "no idea")


# Walk 2: from the learner to serving


async def version_to_serving(learner: Learner, group: Group, trace: AbstractContextManager[object]) -> SwapReport:
    """Publishes the learner's weights as version 1 and swaps it into a scripted server inside `trace`. Returns the swap's report."""
    recipe, folder = learner.recipe, learner.folder
    vocabulary = learner.engine.lm.config.get_text_config().vocab_size
    rows = select_probe_rows((group,), vocabulary=vocabulary, max_model_len=recipe.policy.max_model_len)
    server = VLLMServer(recipe=recipe, model=folder / "versions" / "000000", version=0, run_dir=folder)
    async with scripted_vllm(folder) as url:
        server._control = ControlPlane(url)
        served = SupervisedServer(recipe, folder, learner.registry)
        served._server, served._channel = server, open_channel(recipe.serving, server, registry_folder=folder / "versions")
        served._ready.set()
        home = FolderAccess(folder, learner.store, learner.registry)
        with trace:
            publish_version(home, learner.engine, number=1, parent=0, metrics={}, rows=rows, keep=2)
            version = learner.registry.get(1)
            assert version is not None, "it was published"
            async with asyncio.timeout(60):  # a rejected swap waits for a restart, and this server has none
                report = await served.swap(version)
        await served.close()
    return report


@asynccontextmanager
async def scripted_vllm(run_dir: Path) -> AsyncIterator[str]:
    """Yields the address of a server that answers the control routes like vLLM, and a probe with the learner's own logprobs."""
    version = "0"

    def answer(path: str, body: Any) -> Any:
        nonlocal version
        if path.endswith("finish_weight_update"):
            version = body["weight_version"]
        if not path.endswith("generate"):
            return {}
        probe = codec.from_json(Probe, (run_dir / "versions" / f"{int(version):06d}" / "probe.json").read_bytes())
        return _probe_answer(probe, body["token_ids"], version, most=body["sampling_params"]["logprobs"])

    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with suppress(asyncio.CancelledError):
            while request := await reader.readline():
                length = 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                path = request.decode().split()[1].partition("?")[0]
                data = json.dumps(answer(path, json.loads(body) if body else None)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
                await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _probe_answer(probe: Probe, token_ids: Sequence[int], version: str, *, most: int) -> dict[str, Any]:
    """The answer of vLLM's /inference/v1/generate to a row of the probe."""
    row = probe.token_ids.index(tuple(token_ids))
    likely = [{"token_id": token, "logprob": value} for token, value in zip(probe.next_ids[row], probe.next_logprobs[row], strict=True)]
    prompt = [{str(token): {"logprob": value}} for token, value in zip(token_ids[1:], probe.logprobs[row], strict=True)]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [likely[0]["token_id"]],
        "logprobs": {"content": [{**likely[0], "top_logprobs": likely[:most]}]},
        "weight_versions": [{"version": version, "start": 0, "end": 1}],
    }
    return {"request_id": "r", "choices": [choice], "prompt_logprobs": [None, *prompt]}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
