"""A small policy that learns sums on one core: the learner's code and the objective, without server, sandboxes and driver.

A task is a pair of digits; the answer has the digits of their sum, product and difference, and the score is 1 if all of them are correct.
`COPY` is an easy kind whose answer repeats the pair.
`agentrl.objective.assemble`, `agentrl.learner.update.Updater` and its DeepSpeed engine train a Qwen3 model of 25,000 parameters in this
process; a second copy of the model samples with the weights of any earlier version.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.config import Recipe, build
from agentrl.learner.engine import PolicyEngine
from agentrl.learner.ranks import Ranks, join
from agentrl.learner.update import Updater
from agentrl.objective import assemble
from agentrl.records import Episode, Group, Message, Score, ScoredEpisode, Trajectory, Turn, VersionSpan

SUM, COPY, IMPOSSIBLE = 10, 11, 12  # tokens of the kinds of tasks; 0 to 9 are digits
VOCABULARY = 16
DIGITS = 6
MAX_SUPERVISED = 3000
Prompt = tuple[int, int, int]  # kind and two digits
Weights = dict[str, Tensor]


def answer(prompt: Prompt) -> tuple[int, ...]:
    """The right tokens. No attempt at an impossible task is right."""
    kind, a, b = prompt
    return (a, b, a, b, a) if kind == COPY else (*divmod(a + b, 10), *divmod(a * b, 10), abs(a - b))


def prompts_of(kind: int) -> list[Prompt]:
    """All tasks of a kind, those with two digits below `DIGITS`."""
    return [(kind, a, b) for a in range(DIGITS) for b in range(DIGITS)]


LENGTH = len(answer((SUM, 0, 0)))


def is_right(prompt: Prompt, ids: Sequence[int]) -> bool:
    """Whether sampled tokens solve a task."""
    return prompt[0] != IMPOSSIBLE and tuple(ids) == answer(prompt)


def join_alone() -> Ranks:
    """Makes this process the only rank of a learner."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return join("cpu")


def make_base(folder: Path, *, seed: int, taught: Sequence[tuple[Sequence[Prompt], float]]) -> None:
    """Writes a policy that supervised steps have taught.

    `taught`: prompts, and the success rate to stop at; each entry is taught together with those before it.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known: list[Prompt] = []
    for prompts, rate in taught:
        known += prompts
        for _ in range(MAX_SUPERVISED):
            logprobs = answer_logprobs(model, known)
            if logprobs[-len(prompts) :].sum(1).exp().mean() >= rate:
                break
            optimizer.zero_grad()
            (-logprobs.mean()).backward()
            optimizer.step()
        else:
            raise RuntimeError(f"seed {seed}: {MAX_SUPERVISED} supervised steps do not reach a success rate of {rate:g}")
    model.save_pretrained(folder)


def answer_logprobs(model: Any, prompts: Sequence[Prompt]) -> Tensor:
    """The logprobs [prompts, LENGTH] of the right answers' tokens at temperature 1."""
    rows = torch.tensor([[*prompt, *answer(prompt)] for prompt in prompts])
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, -LENGTH:]
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, rows[:, -LENGTH:, None]).squeeze(-1)
    return logprobs


def make_recipe(*, seed: int, steps: int, groups: int, size: int, max_staleness: int, **keys: object) -> Recipe:
    """The recipe of a run; `keys` are further overrides."""
    data: dict[str, Any] = {
        "name": "small",
        "seed": seed,
        "steps": steps,
        "max_staleness": max_staleness,
        "device": "cpu",
        "policy": {"model": "base", "max_model_len": 32},
        "tasks": {"family": "sandboxes.tables:Tables"},
        "rollout": {"group": {"size": size}, "groups_per_step": groups},
        "learner": {"lr": 1e-3, "warmup_steps": 10, "zero_stage": 0, "keep_versions": max_staleness + 2},
    }
    return build(data).but(dict(keys)) if keys else build(data)


class SmallLoop:
    """A policy in training and the weights of its versions."""

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks) -> None:
        from transformers import AutoModelForCausalLM

        self.recipe = recipe
        self._engine = PolicyEngine(folder, recipe, ranks)
        self._updater = Updater(self._engine)
        self._sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._random = torch.Generator().manual_seed(recipe.seed)
        self.versions: dict[int, Weights] = {0: self._weights()}

    def update(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Trains step `step` on groups, publishes version `step + 1` and forgets the versions that are too old to sample from."""
        metrics = self._updater.update(assemble(step, groups, self.recipe).batch)
        self.versions[step + 1] = self._weights()
        self.versions.pop(step - self.recipe.max_staleness, None)
        return metrics

    def sample_groups(self, first: int, prompts: Sequence[Prompt], version: int, size: int) -> list[Group]:
        """Samples a scored group of `size` attempts at each prompt with the weights of a version. `first`: the first group's index."""
        ids, logprobs = self._sample([prompt for prompt in prompts for _ in range(size)], version)
        groups = []
        for number, prompt in enumerate(prompts):
            episodes = []
            for at in range(number * size, (number + 1) * size):
                episodes.append(_episode(f"{first + number}-{at}", prompt, ids[at].tolist(), logprobs[at].tolist(), version))
            groups.append(Group(index=first + number, task_id=str(prompt), task_key=str(prompt), episodes=tuple(episodes)))
        return groups

    @torch.no_grad()
    def success(self, prompts: Sequence[Prompt], version: int) -> float:
        """The probability that a sampled attempt is right, as a mean over the prompts."""
        self._sampler.load_state_dict(self.versions[version])
        return float(answer_logprobs(self._sampler, prompts).sum(1).exp().mean())

    @torch.no_grad()
    def _sample(self, prompts: Sequence[Prompt], version: int) -> tuple[Tensor, Tensor]:
        """Token ids and logprobs [rows, LENGTH] at temperature 1."""
        self._sampler.load_state_dict(self.versions[version])
        ids = torch.tensor([list(prompt) for prompt in prompts])
        logprobs = []
        for _ in range(LENGTH):
            scores = self._sampler(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=self._random)
            logprobs.append(scores.gather(1, drawn))
            ids = torch.cat((ids, drawn), dim=1)
        return ids[:, -LENGTH:], torch.cat(logprobs, dim=1)

    def _weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self._engine.lm.state_dict().items()}


def _episode(name: str, prompt: Prompt, ids: list[int], logprobs: list[float], version: int) -> ScoredEpisode:
    turn = Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(ids),
        logprobs=tuple(logprobs),
        versions=(VersionSpan(version=version, start=0, end=len(ids)),),
        message=Message(role="assistant", content=""),
        finish_reason="stop",
    )
    episode = Episode(id=name, task_id=str(prompt), task_key=str(prompt), trajectories=(Trajectory(agent="main", turns=(turn,)),))
    return ScoredEpisode(episode=episode, score=Score(value=float(is_right(prompt, ids))))
