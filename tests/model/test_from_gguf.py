"""Imports of GGUF files of a tiny Llama, written here as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from agentrl.errors import UserError
from agentrl.model import import_model
from agentrl.model.importing import RECORD

pytestmark = pytest.mark.models

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ċ Ċ", "Ġ Ġ", "t h")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(*, tied: bool = True) -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(model: transformers.LlamaForCausalLM) -> dict[str, np.ndarray]:
    """A Llama's weights with the names and row order of llama.cpp, which rotates neighbouring pairs; transformers rotates halves."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        for hf_name, gguf_name in NAMES.items():
            name = name.replace(f".{hf_name}.", f".{gguf_name}.")
        name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        weights[name.replace("model.norm", "output_norm").replace("lm_head", "output")] = weight
    return weights


def write(
    path: Path, model: transformers.LlamaForCausalLM, *, rule: str = "smollm", keys: dict[str, Any] | None = None, **changed: np.ndarray
) -> Path:
    """Writes a GGUF file of a model with extra metadata keys and with added or replaced tensors."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_string("general.license", "apache-2.0")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (keys or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, weight in {**tensors(model), **changed}.items():
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_restores_its_model(tied: bool, tmp_path: Path) -> None:
    model = tiny_llama(tied=tied)
    record = import_model(str(write(tmp_path / "m.gguf", model)), tmp_path / "made", chat_template="hermes").record
    restored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert restored.config.tie_word_embeddings is tied and (restored.lm_head.weight is restored.model.embed_tokens.weight) is tied
    assert all(torch.equal(restored.state_dict()[name], weight) for name, weight in model.state_dict().items())
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.allclose(restored(ids).logits, model(ids).logits, atol=1e-5), "positions are turned by the same frequencies"
    assert record["licence"]["id"] == "apache-2.0" and record["source"]["stored"] == {"F32": len(tensors(model))}
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert "quantization_config" not in config and config["eos_token_id"] == 2
    assert json.loads((tmp_path / "made" / RECORD).read_text()) == record


def test_text_is_split_by_the_files_rule(tmp_path: Path) -> None:
    """If digits are separate tokens, two line ends before a digit are one token, and so is an indentation; GPT-2's rule splits them."""
    tokens = {}
    for rule in ("smollm", "gpt-2"):
        import_model(str(write(tmp_path / f"{rule}.gguf", tiny_llama(), rule=rule)), tmp_path / rule)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / rule)
        tokens[rule] = [tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) for text in ("\n\n1", "  17")]
        assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.decode(tokenizer.encode("é 17\n\n1")) == "é 17\n\n1"
    assert tokens == {
        "smollm": [["ĊĊ", "1"], ["ĠĠ", "1", "7"]],
        "gpt-2": [["Ċ", "Ċ", "1"], ["Ġ", "Ġ", "1", "7"]],
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rule": "nobodys"}, "splits text by the unknown rule 'nobodys'"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, r"sets llama\.rope\.scaling\.type to 'yarn', but transformers ignores it"),
        ({"keys": {"llama.logit_scale": 0.5}}, r"sets llama\.logit_scale to 0\.5"),
        ({"keys": {"llama.attention.key_length": 8}}, r"sets llama\.attention\.key_length to 8"),
        ({"rope_freqs.weight": np.ones(8, np.float32)}, r"scales its positions \(rope_freqs\.weight\)"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, "it cannot be loaded exactly"),
        ({"keys": {"general.type": "adapter"}}, "contains only part of a model: adapter"),
        ({"keys": {"split.count": 2}}, "is one of several files"),
    ],
)
def test_settings_that_transformers_ignores_raise(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_llama(), **changes)
    with pytest.raises(UserError, match=reason):
        import_model(str(path), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_an_unsupported_architecture_raises(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_llama())
    path.write_bytes(path.read_bytes().replace(b"llama", b"llamb"))
    with pytest.raises(
        UserError, match=r"cannot read a GGUF file of architecture 'llamb'.*\n  fix: import the model's Hugging Face folder"
    ):
        import_model(str(path), tmp_path / "made")


def test_harmless_keys_are_accepted(tmp_path: Path) -> None:
    keys = {"llama.attention.key_length": 16, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0, "general.url": "x"}
    assert import_model(str(write(tmp_path / "m.gguf", tiny_llama(), keys=keys)), tmp_path / "made").fresh


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_llama())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="is truncated"):
        import_model(str(path), tmp_path / "made")
