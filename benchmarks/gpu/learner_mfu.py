"""Measures learner updates on one GPU: tokens per second and model FLOPs utilization (MFU), packed and as forests of shared prefixes.

    python benchmarks/gpu/learner_mfu.py [--size 0.6b 1.7b 4b] [--length 8192 32768] [--kernels torch liger] [--repeat 5]

The weights are random, in bfloat16 and in the shape of the published Qwen3 models. Layers are recomputed in the backward pass; the
optimizer step is excluded. There are two batches of `--tokens` tokens: `packed` contains samples of `--length` tokens that share nothing;
`forest` contains groups of 8 samples that share half of their tokens. MFU is the rate of necessary operations divided by the card's peak
for dense bfloat16: 6 operations per weight and token, and 12 per query-key pair, head width and layer (causal pairs only). Recomputation
is not counted. The first pass compiles FlexAttention and is not timed. With `--kernels torch liger` (`learner.kernels`), the
last column is the relative difference between Liger's gradients and torch's, over some thousand numbers of each weight. `--device cpu
--size tiny` runs the same code without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from agentrl.config import ObjectiveConfig
from agentrl.learner import causal_lm
from agentrl.learner.forest import register
from agentrl.learner.packing import MicroBatch, build_micro_batch
from agentrl.learner.token_scorer import TokenScorer, check_scorer
from agentrl.objective.policy_loss import TrainedTokens, policy_loss
from agentrl.records import Sample

SIZES = {  # hidden, layers, heads, key heads, head width, mlp, vocabulary: as in the published Qwen3 configurations
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151_936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151_936),
    "tiny": (64, 2, 4, 2, 16, 128, 512),
}
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16 operations per second, from the data sheets


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    size: str
    kind: str
    length: int
    kernels: str


def make_model(size: str, device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, kv_heads, width, mlp, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        intermediate_size=mlp,
        tie_word_embeddings=True,
        max_position_embeddings=65_536,
        attn_implementation=register(),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def samples(kind: str, tokens: int, length: int, vocabulary: int) -> list[Sample]:
    rng = random.Random(0)
    batch: list[Sample] = []
    prompt: list[int] = []
    for number in range(max(1, tokens // length)):
        if number % 8 == 0 or kind == "packed":
            prompt = [rng.randrange(vocabulary) for _ in range(length // 2)]
        ids = (*prompt, *(rng.randrange(vocabulary) for _ in range(length - len(prompt))))
        mask = tuple(at >= len(prompt) for at in range(length))
        advantage = rng.choice([-1.0, 1.0])
        batch.append(
            Sample(
                episode_id=str(number),
                group_index=number // 8,
                token_ids=ids,
                loss_mask=mask,
                logprobs=tuple(-11.0 if on else 0.0 for on in mask),
                advantages=tuple(advantage if on else 0.0 for on in mask),
                versions=tuple(0 if on else -1 for on in mask),
            )
        )
    return batch


def operations(size: str, batch: MicroBatch) -> float:
    """Floating-point operations that forward and backward pass of a batch need."""
    hidden, layers, heads, kv_heads, width, mlp, vocabulary = SIZES[size]
    weights = layers * (hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp)
    pairs = int((batch.layout.positions + 1).sum())
    return 6.0 * (batch.input_ids.numel() * weights + batch.targets.numel() * hidden * vocabulary) + 12.0 * pairs * layers * heads * width


def update(scorer: TokenScorer, batch: MicroBatch) -> None:
    logprobs, entropy = scorer(batch.input_ids, batch.layout, batch.positions, batch.targets, 1.0)
    tokens = TrainedTokens(
        logprobs=logprobs[batch.expand],
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        sequence=batch.sequence,
        entropy=entropy[batch.expand],
    )
    result = policy_loss(tokens, ObjectiveConfig(clip_high=0.28), denominator=len(batch.expand))
    result.loss.backward()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sampled_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Some thousand numbers of the gradient of each weight, in float32 on the CPU."""
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient[:: max(1, gradient.numel() // 4096)].float().cpu() for gradient in gradients])


def measure(case: Case, options: argparse.Namespace, peak: float | None, plain: dict[Case, torch.Tensor]) -> str:
    """Measures a row of the table. `plain` stores the gradients of torch's kernels, with which later rows are compared."""
    size, kind, length, chosen = case.size, case.kind, case.length, case.kernels
    model = make_model(size, options.device)
    if chosen == "liger":
        causal_lm.use_liger_kernels(model)
    scorer = TokenScorer(model)
    check_scorer(scorer, tolerance=0.15 if options.device == "cuda" else 1e-3)
    batch = build_micro_batch(tuple(samples(kind, options.tokens, length, SIZES[size][-1])), torch.device(options.device))
    update(scorer, batch)
    seconds = []
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.repeat):
        model.zero_grad()
        wait(options.device)
        start = time.perf_counter()
        update(scorer, batch)
        wait(options.device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else float("nan")
    mfu = f"{operations(size, batch) / median / peak:.1%}" if peak else "unknown peak"
    rate = len(batch.expand) / median
    gradient = sampled_gradient(model)
    reference = plain.setdefault(replace(case, kernels=""), gradient)
    gap = f"{(gradient - reference).norm() / reference.norm():.1e}" if gradient is not reference else ""
    spread = f"{median:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    computed = f"{batch.input_ids.numel():,}"
    return f"| {size} | {kind} | {length:,} | {chosen} | {computed} | {spread} | {rate:,.0f} | {mfu} | {memory:.1f} | {gap} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), nargs="+", default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--length", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of a batch before prefixes are shared")
    parser.add_argument("--kernels", choices=["torch", "liger"], nargs="+", default=["torch"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU on this machine; to run the code without a GPU, use --device cpu --size tiny")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    peak = next((value for key, value in PEAK.items() if key in name), None)
    print(f"{name}, torch {torch.__version__}\n")
    head = ["model", "batch", "sample length", "kernels", "tokens computed", "seconds, median (range)", "trained tokens/s", "MFU"]
    head += ["peak GiB", "gradient off by"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    plain: dict[Case, torch.Tensor] = {}
    # Liger changes classes of transformers in the whole process, so torch's kernels run first
    for chosen, size, length in itertools.product(sorted(options.kernels, reverse=True), options.size, options.length):
        for kind in ("packed", "forest"):
            print(measure(Case(size=size, kind=kind, length=length, kernels=chosen), options, peak, plain), flush=True)


if __name__ == "__main__":
    main()
