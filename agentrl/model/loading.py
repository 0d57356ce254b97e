"""Loads a source into memory and writes it to a folder, with a check at each step that nothing is lost.

Every number in the source's files must be in the model, and every parameter of the model must be in the files. The learner must score
tokens as the model does, and the written folder must contain the same bits.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.base.error_text import one_line_error
from agentrl.errors import UserError
from agentrl.model.gguf import GgufHeader
from agentrl.version.model_folder import check_architecture

_FOLDER_INSTEAD = "import the model's Hugging Face folder"
_POSITIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# GGUF keys, without the architecture, that repeat other keys or do not affect the computation.
_REDUNDANT = ("vocab_size", "tensor_data_layout", "attention.key_length", "attention.value_length", "rope.dimension_count")
_NEUTRAL = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.finetuned": False, "use_parallel_residual": True}


def read_config(folder: Path, file: str | None, header: GgufHeader | None) -> Any:
    """Returns the configuration of the model in a folder or of a GGUF file in the folder. Raises `UserError` if the configuration cannot be
    read, the architecture is not supported, or transformers ignores a setting of the GGUF file."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its parsers raise many kinds of exceptions
        if header is not None:
            what = f"transformers cannot read a GGUF file of architecture {header.architecture!r}: {one_line_error(error)}"
            raise UserError(what, fix=f"{_FOLDER_INSTEAD}, or use a different model, such as Qwen3 or Llama") from error
        raise UserError(
            f"transformers cannot read config.json: {one_line_error(error)}", fix="save the model again with save_pretrained"
        ) from error
    check_architecture(config.to_dict())
    if header is not None:
        _check_all_read(header, config)
    return config


def _check_all_read(header: GgufHeader, config: Any) -> None:
    """Raises `UserError` if the file contains a setting that affects the computation but that transformers ignores."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    names = (header.architecture, header.architecture.replace("moe", "_moe"), header.architecture.replace("-", "_"))
    read: dict[str, str | None] = next((GGUF_CONFIG_MAPPING[name] for name in names if name in GGUF_CONFIG_MAPPING), {})
    prefix = f"{header.architecture}."
    inner = config.get_text_config()
    width = getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or (read.get(name) is not None and name not in _REDUNDANT) or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        if name not in _REDUNDANT or (("length" in name or "dimension" in name) and value != width):
            raise UserError(
                f"{header.path.name} sets {key} to {value!r}, but transformers ignores it, so the model would compute different results",
                fix=_FOLDER_INSTEAD,
            )
    if scaled := [tensor.name for tensor in header.tensors if tensor.name in _POSITIONS]:
        raise UserError(f"{header.path.name} scales its positions ({', '.join(scaled)}), but transformers ignores it", fix=_FOLDER_INSTEAD)


def check_size(config: Any, *, values: int, exact: bool) -> int:
    """Returns the number of parameters of a configuration's model without allocating them. Tied parameters count once.

    Raises `UserError` if no model can be built, or if `values`, the number of values in the files, is less than the number of parameters
    or, if `exact` is set, differs from it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            model.tie_weights()
    except Exception as error:  # any error of the model's code
        raise UserError(
            f"no model can be built from the configuration: {one_line_error(error)}", fix="use a different model, such as Qwen3 or Llama"
        ) from error
    wanted: int = sum(parameter.numel() for parameter in model.parameters())
    if wanted > values or (exact and wanted != values):
        raise UserError(
            f"the files contain {values:,} values, but a model of type {config.model_type!r} with this configuration has {wanted:,}"
            " parameters, so it cannot be loaded exactly",
            fix="use a different file of this model, or its Hugging Face folder",
        )
    return wanted


def load_model(folder: Path, config: Any, dtype: str, *, file: str | None = None) -> Any:
    """Loads the model of a folder, or of a GGUF file in the folder, with the learner's attention. Raises `UserError` if the files cannot be
    loaded or do not contain exactly the model's tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.learner import forest

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            gguf_file=file,
            dtype=getattr(torch, dtype),
            attn_implementation=forest.register(),
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
            **({} if file else {"use_safetensors": True}),
        )
    except Exception as error:  # its parsers raise many kinds of exceptions
        raise UserError(
            f"transformers cannot load the weights: {one_line_error(error)}", fix="use a different file of this model"
        ) from error
    for what, kind in (
        ("lack", "missing_keys"),
        ("have different shapes for", "mismatched_keys"),
        ("contain the unused tensors", "unexpected_keys"),
    ):
        if keys := sorted(str(key) for key in info.get(kind, ())):
            raise UserError(
                f"the files {what} {', '.join(keys)[:500]}", fix="use a complete model folder of an architecture that transformers supports"
            )
    return model.eval()


def save_model(model: Any, config: Any, folder: Path) -> dict[str, str]:
    """Writes the weights as one file, and the configuration. Returns the fingerprints for `check_saved`. Consumes `model`.

    A model from a GGUF file cannot be saved directly, so its tensors are moved into a new model without the GGUF's attributes.
    """
    import torch

    prints = fingerprints(model)
    settings = {key: value for key, value in model.config.to_dict().items() if key not in ("quantization_config", "_model_name_or_path")}
    with torch.device("meta"):
        fresh = type(model)(type(config).from_dict(settings))
    fresh.load_state_dict(model.state_dict(), strict=True, assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder, max_shard_size="1TB")
    return prints


def fingerprints(model: Any) -> dict[str, str]:
    """Returns a mapping from the name of each parameter to a hash of its bits."""
    import torch

    return {
        name: hashlib.blake2b(tensor.detach().contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()
        for name, tensor in model.named_parameters()
    }


def check_saved(folder: Path, dtype: str, prints: Mapping[str, str]) -> None:
    """Loads a written folder as the learner does. Raises `UserError` unless the folder's weights are bit-identical to the saved model's
    (`prints`) and the learner's logprobs agree with the model's."""
    from transformers import AutoConfig

    from agentrl.learner.token_scorer import TOLERANCE, TokenScorer, check_scorer

    gc.collect()  # frees the model that was saved
    model = load_model(folder, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), dtype)
    again = fingerprints(model)
    if changed := sorted(name for name in {*prints, *again} if prints.get(name) != again.get(name)):
        raise UserError(f"the written folder does not contain the same weights: {', '.join(changed)[:500]}", fix="use a different model")
    check_scorer(TokenScorer(model), tolerance=TOLERANCE[dtype])


_PLAIN = ("gpt-2", "phi-2")
"""Names for GPT-2's splitting rule, which is transformers' default."""

_DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell")
"""Names for the rule that splits off every digit, then applies GPT-2's rule. The result differs from GPT-2's rule for `\\n\\n1` and
indented numbers."""

_KEY = "tokenizer.ggml.pre"


def load_tokenizer(folder: Path, header: GgufHeader) -> Any:
    """Loads the tokenizer of the GGUF file in `folder`. Raises `UserError` if the rule by which the tokenizer splits text is unknown."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level, rule = header.text("tokenizer.ggml.model") == "gpt2", header.text(_KEY)
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN, *_DIGITS_ALONE}
    if byte_level and rule not in known:
        raise UserError(
            f"{header.path.name} splits text by the unknown rule {rule!r} ({_KEY}): the model would see different tokens than in training",
            fix="import the model's Hugging Face folder, which has a tokenizer.json",
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=header.path.name)
    if byte_level and rule in _DIGITS_ALONE:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer
