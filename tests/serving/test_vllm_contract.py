"""agentrl's requests against vLLM's own routes and request models, including requests that cannot run without a GPU.

vLLM is imported inside the tests, so that collection is fast.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from agentrl.errors import ServingError
from agentrl.records import SamplingParams
from agentrl.serving import access, plugin
from agentrl.serving.client import generate_body
from agentrl.serving.control import ControlPlane
from tests.waiting import until, wait_until

pytestmark = pytest.mark.vllm


class RecordingEngine:
    """Replaces vLLM's engine client behind the real routes, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.paused = False
        self.weight_version = "default"

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode))
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append(("resume", None))
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(("init", request.init_info))

    async def start_weight_update(self) -> None:
        self.calls.append(("start", self.paused))

    async def update_weights(self, request: Any) -> None:
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version: str | None) -> None:
        self.calls.append(("finish", weight_version))

    async def update_weight_version(self, new_version: str) -> None:
        self.weight_version = new_version

    async def get_weight_version(self) -> str:
        return self.weight_version


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


KEY = access.new_key()


@pytest.fixture
def url(engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import uvicorn
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router

    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = engine
    monkeypatch.setenv(access.KEY_VARIABLE, KEY)
    access.load_key()
    app.add_middleware(access.RequireKey)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


async def test_every_control_call_is_accepted(engine: RecordingEngine, url: str) -> None:
    control = ControlPlane(url, key=KEY)
    await control.pause()
    await control.pause(abort=True)
    await control.init_weight_transfer({"versions_folder": "/run/versions"})
    await control.start_weight_update()
    await control.update_weights({"folder": "/run/versions/1", "files": {"model.safetensors": 1}})
    await control.finish_weight_update(1)
    await control.finish_weight_update(None)
    await control.resume()
    assert engine.calls == [
        ("pause", "keep"),
        ("pause", "abort"),
        ("init", {"versions_folder": "/run/versions"}),
        ("start", True),
        ("update", {"folder": "/run/versions/1", "files": {"model.safetensors": 1}}),
        ("finish", "1"),
        ("finish", None),
        ("resume", None),
    ]
    assert await control.version() == "default"
    await control.set_version(4)
    assert await control.version() == "4"
    with pytest.raises(ServingError, match="404"):
        await control.reload("/run/versions/0", 0)  # the dev routes belong to another router
    await control.close()


def test_the_generate_body_matches_vllms_request_model() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    params = SamplingParams(max_tokens=5, temperature=0.7, stop_token_ids=(9,))
    request = GenerateRequest.model_validate(generate_body([1, 2], params, "r1", "salt"))
    sampling = request.sampling_params
    assert (request.request_id, request.token_ids, request.cache_salt) == ("r1", [1, 2], "salt")
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (5, 0.7, 0)
    assert sampling.stop_token_ids == [9]
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert (sampling.stop, sampling.detokenize) == ([], False)
    stopping = GenerateRequest.model_validate(generate_body([1, 2], SamplingParams(max_tokens=5, stop=("a", "b")), "r1", "salt"))
    assert (stopping.sampling_params.stop, stopping.sampling_params.detokenize) == (["a", "b"], True), "the detokenizer detects stop texts"


async def test_the_trainer_sends_only_during_the_pause(engine: RecordingEngine, url: str) -> None:
    import torch
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    from agentrl.learner.nccl_source import PausedServerClient

    trainer = PausedServerClient(url, key=KEY, timeout_s=120)
    trainer.version = 7
    module = torch.nn.Linear(2, 3)
    meta = ModuleSource(module).metadata()
    update = NCCLWeightTransferUpdateInfo(
        names=[entry.name for entry in meta],
        dtype_names=[str(entry.dtype).removeprefix("torch.") for entry in meta],
        shapes=[list(entry.shape) for entry in meta],
    )

    def send() -> None:
        info = NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=29555, rank_offset=1, world_size=2, packed=True)
        trainer.init_weight_transfer_engine(worker_init_payload(info))
        trainer.start_weight_update()
        trainer.update_weights(asdict(update))
        trainer.finish_weight_update()

    sending = asyncio.create_task(asyncio.to_thread(send))
    await until(lambda: engine.calls)
    await asyncio.sleep(0.2)
    assert [name for name, _ in engine.calls] == ["init"]
    control = ControlPlane(url, key=KEY)
    await control.pause()
    await sending
    await control.close()
    calls = dict(engine.calls)
    assert calls["start"] is True
    assert NCCLWeightTransferInitInfo(**calls["init"]).world_size == 2
    assert NCCLWeightTransferUpdateInfo(**calls["update"]) == update
    assert calls["finish"] == "7"


def test_the_trainer_times_out_without_a_pause(url: str) -> None:
    from agentrl.learner.nccl_source import PausedServerClient

    with pytest.raises(TimeoutError, match="not paused for version 0"):
        PausedServerClient(url, key=KEY, timeout_s=2.0).start_weight_update()


def test_registering_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    plugin.register()
    plugin.register()
    assert plugin.BACKEND in WeightTransferEngineFactory._registry
