"""The judge servers of a run: start, wait, restart and stop, and the checks of a recipe.

A small Python server replaces vLLM; tests/serving/test_judge_server.py tests the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import agentrl.session.judge_servers as judge_servers_module
from agentrl.base.files import folder_manifest, sha256_file
from agentrl.cluster.link import NotFound
from agentrl.cluster.run_service import HOST, WORKER
from agentrl.config import Recipe
from agentrl.errors import RecipeError, ServingError, UserError
from agentrl.judge import Endpoint, Judge, served, servers
from agentrl.judge.reward_model import save_record
from agentrl.judge.scoring import CORRECT
from agentrl.protocols.cluster import PORT, PYTHON
from agentrl.run.worker_access import WorkerAccess
from agentrl.serving.judge_server import JudgeServer
from agentrl.session.judge_servers import (
    JudgeServers,
    check_judge_servers_used,
    check_reward_model_vocabulary,
    declare_judge_servers,
)
from tests.cluster.launchers import OwnDisks
from tests.cluster.serving import driving
from tests.judge.judge_parts import TASK, episode
from tests.waiting import until

ANSWERS = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        verdict = json.dumps({"reasoning": "", "scores": {"correct": 1}, "abstain": False})
        self.answer({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]})
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def recipe(**judge: object) -> Recipe:
    section = {"model": "m", "startup_timeout_s": 60, **judge}
    return Recipe.model_validate({"name": "x", "policy": {"model": "m"}, "tasks": {"family": "f:F"}, "judge_servers": {"small": section}})


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    yield
    servers.register_servers({})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JudgeServer, "_command", lambda self: [PYTHON, "-c", ANSWERS, PORT])
    monkeypatch.setattr("agentrl.session.judge_servers.serving_device", lambda recipe: "cpu")
    monkeypatch.setattr(judge_servers_module, "_WATCH_S", 0.05)
    monkeypatch.setattr(judge_servers_module, "_MAX_RESTARTS", 1)
    servers.register_servers({"small": servers.JudgeServer(folder=Path("m"), weights="", reward_model=False)})


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
async def test_a_dead_server_is_restarted_and_its_judges_wait(tmp_path: Path) -> None:
    judge = Judge(endpoint=Endpoint(url=served("small"), model="small"), form=CORRECT)
    registered = servers.registered_servers()["small"]
    async with JudgeServers(recipe(), {"small": Path("m")}, folder=tmp_path) as running:
        assert (await judge(TASK, episode())).value == 1.0, "requested before the server was up"
        await running.ready()
        first_pid = running.pid("small")
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: running.restarts["small"] == 1)
        assert (await judge(TASK, episode("Paris, again"))).value == 1.0
        second_pid = running.pid("small")
        assert second_pid is not None and second_pid != first_pid
        os.kill(second_pid, signal.SIGKILL)
        await until(lambda: bool(registered.refused))
        refused = await judge(TASK, episode("Paris, a third time"))
        assert refused.value is None and "died 2 times" in refused.reason
    with pytest.raises(ProcessLookupError):
        os.kill(second_pid, 0)
    assert registered.url == "" and (tmp_path / "logs" / "judge-small.log").exists()


@pytest.mark.usefixtures("scripted")
async def test_a_server_that_cannot_start_fails_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JudgeServer, "_command", lambda self: [PYTHON, "-c", "raise SystemExit('no such model')"])
    async with JudgeServers(recipe(), {"small": Path("m")}, folder=tmp_path) as running:
        with pytest.raises(ServingError, match="the judge's server small exited with code 1"):
            await running.ready()
        assert "cannot be started" in servers.registered_servers()["small"].refused
    async with JudgeServers(recipe(), {}, folder=tmp_path) as no_servers:
        await asyncio.wait_for(no_servers.ready(), 1)


@pytest.mark.usefixtures("scripted")
async def test_a_server_that_failed_serves_the_next_session_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that pauses because its disk is full continues in the same process."""
    with monkeypatch.context() as full:
        full.setattr(JudgeServer, "_command", lambda self: [PYTHON, "-c", "raise SystemExit('no space')"])
        async with JudgeServers(recipe(), {"small": Path("m")}, folder=tmp_path) as failed:
            with pytest.raises(ServingError):
                await failed.ready()
    async with JudgeServers(recipe(), {"small": Path("m")}, folder=tmp_path) as running:
        await running.ready()
        assert served("small")() == f"{servers.registered_servers()['small'].url}/v1"


def test_judge_servers_of_a_recipe_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512, "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(UserError, match=r"judge_servers\.small\.model: .* lacks"):
        declare_judge_servers(recipe(), {"small": tmp_path})
    for name, text in (("tokenizer_config.json", "{}"), ("tokenizer.json", "{}"), ("chat_template.jinja", "x")):
        (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match=r"judge_servers\.small\.max_model_len=2048, but the model has only 512 positions"):
        declare_judge_servers(recipe(), {"small": tmp_path})
    declare_judge_servers(recipe(max_model_len=512), {"small": tmp_path})
    assert not servers.registered_servers()["small"].reward_model and len(servers.registered_servers()["small"].weights) == 64
    before = servers.registered_servers()["small"].weights
    (tmp_path / "chat_template.jinja").write_text("y")
    declare_judge_servers(recipe(max_model_len=512), {"small": tmp_path})
    assert servers.registered_servers()["small"].weights != before
    servers.register_servers({"unused": servers.JudgeServer(folder=tmp_path, weights="", reward_model=False)})
    with pytest.raises(UserError, match=r"judge_servers\.unused would start a server that no judge"):
        check_judge_servers_used()


def test_a_reward_model_that_reads_tokens_has_the_policys_vocabulary(tmp_path: Path) -> None:
    policy, model = tmp_path / "policy", tmp_path / "model"
    for folder, vocab in ((policy, {"a": 0}), (model, {"b": 0})):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (model / "model.safetensors").write_bytes(b"weights")
    servers.register_servers({"mine": servers.JudgeServer(folder=model, weights="", reward_model=True)})
    save_record(model, shows=("answer",), offset=0.0, scale=1.0, max_tokens=8)
    check_reward_model_vocabulary(policy)
    save_record(model, shows=(), offset=0.0, scale=1.0, max_tokens=8)
    with pytest.raises(UserError, match="its vocabulary differs from that of policy"):
        check_reward_model_vocabulary(policy)
    check_reward_model_vocabulary(model)


def test_keys_of_a_named_section_are_overridden_separately() -> None:
    new = recipe().but("judge_servers.small.threads=2", "judge_servers.other.model=m2")
    assert new.judge_servers["small"].threads == 2 and new.judge_servers["small"].model == "m" and new.judge_servers["other"].model == "m2"
    assert new.but("judge_servers={}").judge_servers == {}
    for wrong in ("judge_servers.small.thread=2", "judge_servers.a b.model=m", "judge_servers.small=3", "judge_servers.other.threads=1"):
        with pytest.raises(RecipeError):
            recipe().but(wrong)
    for wrong in ("tasks.group_weight=0.5", 'tasks={"family": "f:F", "group_judge": "a:b", "group_weight": 0}'):
        with pytest.raises(RecipeError, match="group_weight"):
            recipe().but(wrong)
    with pytest.raises(RecipeError, match="compares the attempts"):
        recipe().but({"tasks.group_judge": "a:b", "rollout.group.size": 1, "objective.advantage": "reinforce++"})


async def test_another_host_gets_the_model_of_a_judge_and_its_worker_the_files_without_weights(tmp_path: Path) -> None:
    cache, model = tmp_path / "cache", tmp_path / "model"
    cache.mkdir()
    model.mkdir()
    (cache / "blob").write_bytes(b"w" * 3_000_000)
    (model / "model.safetensors").symlink_to(cache / "blob")  # as in a cache of the model hub
    (model / "config.json").write_text(json.dumps({"architectures": ["X"], "max_position_embeddings": 64}))
    own = OwnDisks(tmp_path / "run", disks=tmp_path / "disks")
    with driving(tmp_path / "run", judges={"small": model}) as driver:
        await own.use_driver(driver.url, driver.service.new_key(HOST))
        server = JudgeServer(
            "small", recipe().judge_servers["small"], model=model, reward_model=False, folder=tmp_path / "run", device="cpu", launcher=own
        )
        command = server._command()
        folder = command[command.index("--model") + 1]
        part = await own.start(replace(server._part(), argv=(PYTHON, "-c", "import sys; print(*sys.argv[1:])", folder)))
        await part.wait()
        copy = tmp_path / "disks" / "judge" / "judges" / "small"
        assert (tmp_path / "run" / "logs" / "judge-small.log").read_text().strip() == str(copy)
        assert folder_manifest(copy) == {name: sha256_file(model / name) for name in ("config.json", "model.safetensors")}
        await own.close()

        access = WorkerAccess(url="", key="", folder=tmp_path / "worker", link=driver.link(WORKER))
        weights = {"small": "0" * 64}
        folders = await access.judge_folders(weights)
        declare_judge_servers(recipe(), folders, weights=weights)
        assert [path.name for path in folders["small"].iterdir()] == ["config.json"]
        assert served("small").weights == weights["small"], "as the driver computed it"
        with pytest.raises(NotFound, match="no judge server 'other'"):
            await access.judge_folders(["other"])


def test_a_judge_on_the_driver_is_served_from_its_folder(tmp_path: Path) -> None:
    server = JudgeServer("small", recipe().judge_servers["small"], model=tmp_path, reward_model=False, folder=tmp_path, device="cpu")
    assert str(tmp_path) in server._command() and server._needs() == ()
