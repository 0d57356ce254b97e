"""Creates a tiny Qwen3 model with random weights and a byte-level tokenizer, for tests with a vLLM server.

torch and transformers are imported inside the functions, so that collecting tests stays fast.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.files import sha256_file
from agentrl.records import PolicyVersion, Probe
from agentrl.testing.policies import byte_level_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

VOCABULARY = 288
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte and three special tokens."""
    tokenizer: PreTrainedTokenizerFast = byte_level_tokenizer(CHAT_TEMPLATE, pad="<|pad|>", more=["<|im_start|>"])
    return tokenizer


def make_model(seed: int, *, hidden: int = 128, layers: int = 4, vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """Returns a model with tied embeddings and weights so large that models with different seeds disagree by whole nats. `hidden`: a
    multiple of 64."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=make_tokenizer().eos_token_id,
    )
    return Qwen3ForCausalLM(config).float().eval()


def write_version(run_dir: Path, number: int, model: Qwen3ForCausalLM) -> PolicyVersion:
    """Writes `model` as versions/<number>, and returns the version, which is not registered."""
    folder = run_dir / "versions" / str(number)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    digest = sha256_file(folder / "model.safetensors")
    return PolicyVersion(number=number, parent=None if number == 0 else number - 1, folder=f"versions/{number}", sha256=digest)


def token_logprobs(model: Qwen3ForCausalLM, ids: tuple[int, ...], *, temperature: float = 1.0) -> list[float]:
    """Returns the logprobs [T-1] of all tokens after the first, from transformers' own forward pass, as a numerical reference."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    return [float(logprob) for logprob in picked]


def make_probe(model: Qwen3ForCausalLM) -> Probe:
    """Returns a probe with a model's logprobs for 4 rows of 150 tokens."""
    generator = random.Random(7)
    token_ids = tuple(tuple(generator.randrange(256) for _ in range(150)) for _ in range(4))
    return Probe(token_ids=token_ids, logprobs=tuple(tuple(token_logprobs(model, ids)) for ids in token_ids))
