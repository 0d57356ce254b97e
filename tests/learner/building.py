"""Small real parts for the learner's tests: a random Qwen3 policy, recipes, scored groups, run folders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from agentrl.base.files import sha256_file
from agentrl.config import CriticConfig, Recipe, build
from agentrl.experience import SqliteStore
from agentrl.objective.values import gae
from agentrl.records import Episode, Group, Message, PolicyVersion, Sample, Score, ScoredEpisode, Trajectory, Turn, VersionSpan
from agentrl.version import FolderRegistry

VOCABULARY = 97


def tiny_config(**changes: object) -> transformers.Qwen3Config:
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return transformers.Qwen3Config(**{**settings, **changes})


def write_policy(folder: Path, config: transformers.Qwen3Config | None = None, *, seed: int = 0) -> None:
    """A Hugging Face folder with random weights and a tokenizer that has a chat template."""
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config or tiny_config())
    model.save_pretrained(folder)
    word_level = Tokenizer(models.WordLevel({f"w{n}": n for n in range(model.config.vocab_size)}, unk_token="w0"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def build_recipe(**sections: dict[str, object]) -> Recipe:
    data: dict[str, dict[str, object]] = {
        "policy": {"model": "base", "max_model_len": 256},
        "tasks": {"family": "sandboxes.tables:Tables"},
        "rollout": {"group": {"size": 4}, "groups_per_step": 3},
        "learner": {"lr": 1e-2, "max_tokens_per_microbatch": 256},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return build({"name": "test", "device": "cpu", "steps": 2, "order": "in_order", **data})


def estimate(samples: Sequence[Sample], values: torch.Tensor, config: CriticConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [N] of the trained tokens of samples, one after the other, from the tokens' values [N]."""
    rows = [part.tolist() for part in values.split([sum(sample.loss_mask) for sample in samples])]
    advantages, returns = gae(samples, rows, {}, gamma=config.gamma, lam=config.lam)
    first, second = (torch.tensor(list(chain.from_iterable(part)), dtype=values.dtype) for part in (advantages, returns))
    return first, second


def turn(prompt: list[int], completion: list[int], logprobs: list[float], version: int = 0) -> Turn:
    spans = (VersionSpan(version=version, start=0, end=len(completion)),) if completion else ()
    return Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprobs),
        versions=spans,
        message=Message(role="assistant", content=""),
        finish_reason="stop",
    )


def episode(name: str, turns: list[Turn]) -> Episode:
    return Episode(id=name, task_id="t", task_key="k", trajectories=(Trajectory(agent="main", turns=tuple(turns)),))


def scored(episode: Episode, value: float) -> ScoredEpisode:
    return ScoredEpisode(episode=episode, score=Score(value=value))


def random_group(
    index: int,
    *,
    size: int = 4,
    vocabulary: int = VOCABULARY,
    lengths: tuple[int, int] = (4, 20),
    turns: int = 2,
    scores: list[float] | None = None,
) -> Group:
    """A group of random episodes whose logprobs are near those of a uniform policy. They share their first prompt."""
    rng = random.Random(1000 + index)
    opening = [rng.randrange(vocabulary) for _ in range(rng.randint(*lengths))]
    episodes = []
    for number in range(size):
        episode_turns = []
        for turn_number in range(turns):
            prompt = [rng.randrange(vocabulary) for _ in range(rng.randint(*lengths))] if turn_number else opening
            completion = [rng.randrange(2 if n < 3 else vocabulary) for n in range(rng.randint(*lengths))]
            episode_turns.append(turn(prompt, completion, [-4.57 + rng.uniform(-0.3, 0.3) for _ in completion]))
        value = scores[number] if scores is not None else float(number % 2)
        episodes.append(scored(episode(f"g{index}-e{number}", episode_turns), value))
    return Group(index=index, task_id=f"t{index}", task_key=f"k{index}", episodes=tuple(episodes))


def write_run(run_dir: Path, recipe: Recipe, groups: list[Group], config: transformers.Qwen3Config | None = None) -> None:
    """A run folder as the controller prepares it for the learner: recipe, version 0, stored groups."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.json").write_text(recipe.model_dump_json())
    base = run_dir / "versions" / "000000"
    write_policy(base, config)
    registry = FolderRegistry(run_dir / "versions")
    weights = sha256_file(base / "model.safetensors")
    registry.add(PolicyVersion(number=0, parent=None, folder="versions/000000", sha256=weights))
    registry.close()
    store = SqliteStore(run_dir / "experience.sqlite")
    for group in groups:
        store.put(group)
    store.close()
