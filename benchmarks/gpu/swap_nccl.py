"""Measures the hot swap on NVIDIA GPUs: a Qwen3-shaped model, 64 requests in flight, weights by NCCL broadcast or by file.

    python benchmarks/gpu/swap_nccl.py [--channel nccl|file] [--size 0.6b|1.7b|4b] [--swaps 10]

`nccl` needs two GPUs, one for the trainer (this process) and one for the server, because NCCL does not allow two ranks on one device. With
one GPU, the file channel is measured. The weights are random, because no timing depends on their values.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config import PolicyConfig, Recipe, ServingConfig, TasksConfig
from agentrl.records import PolicyVersion, Probe, SamplingParams
from agentrl.serving import FileWeightChannel, NcclWeightChannel, TokenClient, VLLMServer
from agentrl.serving.probe import probe_limit
from agentrl.testing.tiny_model import make_tokenizer

SIZES = {  # hidden, layers, heads, mlp: as in the published Qwen3 configurations
    "0.6b": (1024, 28, 16, 3072),
    "1.7b": (2048, 28, 16, 6144),
    "4b": (2560, 36, 32, 9728),
}
IN_FLIGHT = 64
MASTER_PORT = 29555


def make_model(size: str) -> Qwen3ForCausalLM:
    hidden, layers, heads, mlp = SIZES[size]
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        tie_word_embeddings=True,
        eos_token_id=make_tokenizer().eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


@torch.no_grad()
def publish(run_dir: Path, number: int, model: Qwen3ForCausalLM) -> tuple[PolicyVersion, Probe]:
    """Changes the weights slightly, back and forth, and writes them with a new probe."""
    for parameter in model.parameters():
        parameter.mul_(1.02 if number % 2 else 1 / 1.02)
    folder = run_dir / "versions" / str(number)
    model.save_pretrained(folder, max_shard_size="100GB")
    make_tokenizer().save_pretrained(folder)
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    rows = tuple(tuple((97 * row + 31 * position) % 50000 for position in range(128)) for row in range(4))
    logprobs = model(torch.tensor(rows, device="cuda")).logits[:, :-1].float().log_softmax(-1)
    picked = logprobs.gather(-1, torch.tensor(rows, device="cuda")[:, 1:, None]).squeeze(-1)
    version = PolicyVersion(number=number, parent=number - 1 if number else None, folder=f"versions/{number}", sha256=digest)
    return version, Probe(token_ids=rows, logprobs=tuple(tuple(row) for row in picked.tolist()))


def connect_trainer(url: str, key: str, model: Qwen3ForCausalLM) -> Callable[[int], None]:
    """Opens the NCCL group with the server; the result sends the model's current weights as the given version."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    from agentrl.learner.nccl_source import PausedServerClient

    client = PausedServerClient(url, key=key, timeout_s=120)
    info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=MASTER_PORT, world_size=2)
    trainer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=ModuleSource(model))

    def send(number: int) -> None:
        client.version = number
        trainer.send_weights()

    return send


async def keep_busy(client: TokenClient, ids: Any) -> None:
    while True:
        number = next(ids)
        prompt = [(number * 31 + position) % 50000 for position in range(256)]
        await client.generate(prompt, SamplingParams(max_tokens=512), request_id=f"bench-{number}", timeout_s=300)


def visible_gpus() -> int:
    """Counts GPUs without initializing CUDA, because the device of this process is chosen after that of the server."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return len(listed.stdout.strip().splitlines())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = visible_gpus()
    parser.add_argument("--channel", choices=["nccl", "file"], default="nccl" if gpus > 1 else "file")
    parser.add_argument("--size", choices=list(SIZES), default="0.6b")
    parser.add_argument("--swaps", type=int, default=10)
    options = parser.parse_args()
    if options.channel == "nccl" and gpus < 2:
        parser.error("--channel nccl needs two GPUs; with one, use --channel file")

    recipe = Recipe(
        name="gpu-swap-benchmark",
        device="cuda",
        policy=PolicyConfig(model="made here", dtype="bfloat16", max_model_len=2048),
        tasks=TasksConfig(family="none:none"),
        serving=ServingConfig(weight_transfer=options.channel, gpu_memory_utilization=0.4),
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        model = make_model(options.size)
        version, _ = publish(run_dir, 0, model)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus - 1)  # inherited by the server; CUDA in this process has already read its own value
        server = VLLMServer(recipe=recipe, model=run_dir / version.folder, version=0, run_dir=run_dir)
        began = time.perf_counter()
        await server.start()
        print(f"start {time.perf_counter() - began:.1f} s", flush=True)
        client = TokenClient.for_server(server)
        ids = itertools.count()
        load = [asyncio.create_task(keep_busy(client, ids)) for _ in range(IN_FLIGHT)]
        try:
            await measure(options, server, run_dir, model)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
            await client.close()
            await server.stop()


async def measure(options: argparse.Namespace, server: VLLMServer, run_dir: Path, model: Qwen3ForCausalLM) -> None:
    kind = NcclWeightChannel if options.channel == "nccl" else FileWeightChannel
    channel = kind(server, registry_folder=run_dir / "versions")
    send = await asyncio.to_thread(connect_trainer, server.url, server.key, model) if options.channel == "nccl" else None
    reports = []
    for number in range(1, options.swaps + 1):
        version, probe = publish(run_dir, number, model)
        sending = asyncio.create_task(asyncio.to_thread(send, number)) if send else None
        folder = run_dir / version.folder
        reports.append(await channel.swap(version, folder, probe, max_abs_diff=probe_limit("bfloat16", gpu=True), timeout_s=120))
        if sending:
            await sending
    stalls = sorted(report.stall_ms for report in reports)
    worst = max(report.probe_max_abs_diff for report in reports)
    stall = f"stall ms p50 {statistics.median(stalls):.0f} max {stalls[-1]:.0f}"
    print(f"{options.channel} {options.size}: {stall}, probe max |diff| {worst:.3g} nats")


if __name__ == "__main__":
    asyncio.run(main())
