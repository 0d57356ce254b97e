"""The updates that `benchmarks/learner.py` times: their samples, the shapes of the models, and a bound on the saved operations."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.learner.packing import build_micro_batch, plan_micro_batches
from agentrl.records import Sample

CPU = torch.device("cpu")
VOCABULARY = 640
SIZES = {"small": (128, 4, 4, 2, 384), "base": (512, 8, 8, 4, 1536)}  # hidden, layers, heads, key heads, mlp
BUDGET = 16_384  # tokens of one forward pass, padding included


@dataclass(frozen=True, kw_only=True)
class Case:
    """The name and the samples of one update."""

    name: str
    samples: tuple[Sample, ...]

    @property
    def trained(self) -> int:
        return sum(sum(sample.loss_mask) for sample in self.samples)


def sample(name: str, prompt: Sequence[int], rest: Sequence[tuple[bool, Sequence[int]]], rng: random.Random) -> Sample:
    """Builds a sample of a prompt, then spans of tokens that the policy sampled (True) or a tool wrote."""
    ids, mask = list(prompt), [False] * len(prompt)
    for sampled, tokens in rest:
        ids += tokens
        mask += [sampled] * len(tokens)
    advantage = rng.choice([-1.0, 1.0])
    return Sample(
        episode_id=name,
        group_index=0,
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(-6.4 if on else 0.0 for on in mask),
        advantages=tuple(advantage if on else 0.0 for on in mask),
        versions=tuple(0 if on else -1 for on in mask),
    )


def draw(rng: random.Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def group(prompt: int, answers: int, vocabulary: int, *, size: int = 8) -> Case:
    """Attempts at one task: a shared prompt of `prompt` tokens, and answers that share nothing."""
    rng = random.Random(f"{prompt}/{answers}")
    shared = draw(rng, prompt, vocabulary)
    samples = (sample(f"g{n}", shared, [(True, draw(rng, answers, vocabulary))], rng) for n in range(size))
    return Case(name=f"group of {size}, prompt {prompt}, answers {answers}", samples=tuple(samples))


def cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    prompt = draw(rng, 512)
    group = tuple(sample(f"g{n}", prompt, [(True, draw(rng, 128))], rng) for n in range(8))
    agents = []
    for g in range(16):  # a group of the quickstart's size: short prompt, program, output, answer; nothing else in common
        short = draw(rng, rng.randint(60, 90))
        for n in range(8):
            turns = [(True, draw(rng, rng.randint(40, 70))), (False, draw(rng, 15)), (True, draw(rng, rng.randint(15, 25)))]
            agents.append(sample(f"a{g}-{n}", short, turns, rng))
    history, tree = draw(rng, 1024), []
    for a in range(8):  # one long history, forked twice
        fork = [(True, draw(rng, 48)), (False, draw(rng, 16))]
        tree += [sample(f"t{a}-{b}", history, [*fork, (True, draw(rng, 64))], rng) for b in range(8)]
    apart = tuple(sample(f"s{n}", draw(rng, rng.randint(64, 512)), [(True, draw(rng, rng.randint(16, 256)))], rng) for n in range(32))
    return [
        Case(name="group of 8, prompt 512, answers 128", samples=group),
        Case(name="16 groups of 8, two turns", samples=tuple(agents)),
        Case(name="tree of 64 branches, history 1024", samples=tuple(tree)),
        Case(name="32 samples, nothing shared", samples=apart),
    ]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that determine the number of operations."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    width: int  # of a head
    vocabulary: int


def shape_of(model: str) -> Shape:
    """Returns the shape of one of `SIZES`, or of the model in a folder."""
    if model in SIZES:
        hidden, layers, heads, kv_heads, mlp = SIZES[model]
        width = hidden // heads
        return Shape(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp, width=width, vocabulary=VOCABULARY)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        mlp=config.intermediate_size,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
    )


def by_length(samples: Sequence[Sample], most: int | None = None) -> list[list[Sample]]:
    """Batches of similar length with at most `BUDGET` padded tokens and `most` samples; None means any number of samples."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.token_ids)):
        room = batches and (len(batches[-1]) + 1) * len(batches[-1][0].token_ids) <= BUDGET
        if room and (most is None or len(batches[-1]) < most):
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def bound(case: Case, shape: Shape) -> float:
    """How many times fewer floating-point operations our update needs than the padded loop's, from the shapes alone."""
    per_token = shape.layers * (shape.hidden * shape.width * (2 * shape.heads + 2 * shape.kv_heads) + 3 * shape.hidden * shape.mlp)
    per_pair = shape.layers * 2 * shape.heads * shape.width
    head = shape.hidden * shape.vocabulary
    micro_batches = plan_micro_batches(case.samples, rank=0, ranks=1, max_tokens=BUDGET)
    batches = [build_micro_batch(rows, CPU) for rows in micro_batches]
    pairs = sum(int((batch.layout.positions + 1).sum()) for batch in batches)
    ours = sum(b.input_ids.numel() * per_token + b.targets.numel() * head for b in batches) + pairs * per_pair
    theirs = 0
    for batch in by_length(case.samples):
        b, t = len(batch), len(batch[0].token_ids)
        theirs += b * t * (per_token + head) + b * t * (t + 1) // 2 * per_pair
    return theirs / ours


def folder_cases(folder: str, prompt: int, answers: Sequence[int]) -> list[Case]:
    """The groups for a model folder. Exits if the folder does not exist or the groups do not fit the model."""
    if not (Path(folder) / "config.json").is_file():
        sys.exit(f"error: no model in {folder}\nfix: pass a folder with config.json and safetensors weights")
    from transformers import AutoConfig

    longest = AutoConfig.from_pretrained(folder).max_position_embeddings
    if prompt < 1 or min(answers) < 1 or prompt + max(answers) > longest:
        sys.exit(
            f"error: a prompt of {prompt} and an answer of {max(answers)} tokens\nfix: use at least 1 each and at most {longest} together"
        )
    vocabulary = shape_of(folder).vocabulary
    return [group(prompt, length, vocabulary) for length in answers]
