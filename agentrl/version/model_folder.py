"""Checks, from its files only, that a model folder can be served and trained. Imports no heavy library and reads no tensors."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any, TypeVar

from agentrl.base import files, untrusted_files
from agentrl.config.recipe import Recipe
from agentrl.errors import UserError
from agentrl.records.sampling import TIES

T = TypeVar("T")

_MOST_GROWTH = 64  # output characters per input character
_DEEPEST_RULES = 16
_HEADER_LIMIT = 100 << 20  # bytes of a safetensors header, safetensors' own bound
_LARGEST_JSON = 256 << 20  # bytes of a JSON file
_INDEX = "model.safetensors.index.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "*.tiktoken")
_SAVE_MODEL = "save it with save_pretrained for the model and for its tokenizer"
_SAVE_AGAIN = "save the model and its tokenizer again with save_pretrained"
_HEADS = ("num_attention_heads", "attention_heads", "n_head", "num_heads", "n_heads")
# Keys of layers that carry a state from token to token: state space models, linear attention, short convolutions.
_STATEFUL = ("mamba", "ssm", "rwkv", "lru_width", "linear_key_head_dim", "conv_L_cache", "state_size", "qk_dim_factor")
_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "hybrid")
_NOT_PLAIN = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
_NO_WORDS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering", "ForMultipleChoice")
_OTHER_MODEL = "use a model without recurrent layers, logit scaling or soft-capping, such as Qwen3 or Llama"


def check_model_files(folder: Path, *, chat_template: bool = True, key: str = "policy.model") -> None:
    """Raises `UserError` unless `folder` contains a complete, undamaged Hugging Face model: configuration, weights, tokenizer and, if
    `chat_template` is True, a chat template.

    `key`: key of the recipe, for messages.
    """
    if not folder.is_dir():
        raise UserError(f"{key}: there is no folder {folder}", fix=f"set {key} to an existing folder or a Hugging Face model id")
    weights = sorted(folder.glob("*.safetensors"))
    lacking = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    lacking += [] if weights else ["*.safetensors"]
    lacking += [] if any(any(folder.glob(name)) for name in _VOCABULARIES) else ["tokenizer.json"]
    if lacking:
        raise UserError(f"{key}: {folder} lacks {', '.join(lacking)}", fix=_SAVE_MODEL)
    read_json(folder / "config.json")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            if name == "tokenizer.json":
                check_growth(folder / name, content)
    if (folder / _INDEX).is_file() and not (folder / "model.safetensors").is_file():
        _check_index(folder)
    for file in weights:
        check_safetensors(file)
    if chat_template and not has_chat_template(folder):
        raise UserError(
            f"{key}: the tokenizer in {folder} has no chat template, so conversations cannot be turned into tokens",
            fix="set policy.chat_template to a built-in template (such as hermes) or a file, or use an instruction-tuned model"
            if key == "policy.model"
            else "use an instruction-tuned model",
        )


def check_growth(path: Path, tokenizer: dict[str, Any]) -> None:
    """Raises `UserError` if a tokenizer.json has rules that expand a short string so much that encoding it would use all memory."""
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if _growth(tokenizer.get(part), 0) > _MOST_GROWTH:
            raise UserError(
                f"{path}: its {part} turns one character into more than {_MOST_GROWTH}, or replaces an empty match with text",
                fix="use a different model: no known tokenizer has such rules",
            )


def _growth(rule: Any, depth: int) -> float:
    """Returns the maximum number of characters that the rule outputs for one input character; infinite if it may match the empty string."""
    if not isinstance(rule, dict):
        return 1
    growth = 1.0
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = rule.get(key)
        for part in inner if isinstance(inner, list) else ():
            growth *= _growth(part, depth + 1) if depth < _DEEPEST_RULES else math.inf
    added = rule.get("prepend")
    if isinstance(added, str):
        growth *= 1 + len(added)
    if rule.get("type") == "Replace":
        pattern, content = rule.get("pattern"), rule.get("content")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        if literal == "" or (isinstance(expression, str) and _matches_nothing(expression)):
            return math.inf
        growth *= max(1.0, len(str(content)) / (len(literal) if isinstance(literal, str) else 1))
    return growth


def _matches_nothing(expression: str) -> bool:
    """Whether a pattern matches the empty string; False if Python cannot compile it."""
    try:
        return re.match(expression, "") is not None
    except (re.error, RecursionError, OverflowError):
        return False


def check_safetensors(path: Path) -> None:
    """Raises `UserError` unless the file has a valid header and the length that the header specifies."""
    again = "download or copy it again, or save the model again with save_pretrained"
    try:
        with untrusted_files.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = file.read(length) if 2 <= length <= min(_HEADER_LIMIT, size - 8) else b""
    except ValueError as error:
        raise UserError(f"{path} {error}", fix=again) from None
    if prefix == b"version ":
        raise UserError(f"{path} is a Git LFS pointer, not the weights", fix="git lfs pull")
    if not text:
        raise UserError(f"{path} is not a safetensors file, or is truncated: it has {size} bytes", fix=again)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
        wanted = 8 + length + max(map(operator.index, ends), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise UserError(f"{path} has a damaged header", fix=again) from None
    if size != wanted:
        raise UserError(f"{path} is {'truncated' if size < wanted else 'damaged'}: it has {size} bytes instead of {wanted}", fix=again)


def check_model(folder: Path, recipe: Recipe | None = None) -> None:
    """Raises `UserError` for a model that cannot be trained, or whose context or vocabulary does not fit the recipe, if one is given."""
    try:
        _check_model(folder, recipe)
    except UserError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"policy.model: config.json or tokenizer.json in {folder} contains a value of a wrong type: {type(error).__name__}: {error}",
            fix=_SAVE_AGAIN,
        ) from error


def _check_model(folder: Path, recipe: Recipe | None) -> None:
    config = read_json(folder / "config.json")
    inner = _value(config, "text_config", dict) or config
    check_architecture(config)
    longest, stretched = _value(inner, "max_position_embeddings", int), _stretched(inner)
    if recipe is not None and longest is not None and not stretched and recipe.policy.max_model_len > longest:
        raise UserError(
            f"policy.max_model_len={recipe.policy.max_model_len}, but the model in {folder} has a context of {longest} tokens",
            fix=f"set policy.max_model_len={longest} or less",
        )
    if quantized := _value(config, "quantization_config", dict):
        method = quantized.get("quant_method", "integers")
        raise UserError(f"the weights in {folder} are quantized ({method}) and cannot be trained", fix="use the model's float weights")
    vocabulary, largest = _value(inner, "vocab_size", int), _largest_token(folder / "tokenizer.json")
    if vocabulary is not None and largest is not None and largest >= vocabulary:
        raise UserError(
            f"the tokenizer in {folder} has token id {largest}, but the model's vocabulary has only {vocabulary} tokens",
            fix="model.resize_token_embeddings(len(tokenizer)), or save the tokenizer that belongs to the model",
        )
    if recipe is not None and vocabulary is not None and (top_k := recipe.rollout.sampling.top_k) and top_k + TIES > vocabulary:
        raise UserError(
            f"rollout.sampling.top_k={top_k} does not truncate: the model in {folder} has a vocabulary of {vocabulary}",
            fix="set rollout.sampling.top_k=0, or a much smaller value",
        )


def check_architecture(config: dict[str, Any]) -> None:
    """Raises `UserError` for a model that the learner would reject after loading it (`agentrl.learner.token_scorer.check_scorer`)."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError("policy.model: config.json has no model_type", fix=_SAVE_AGAIN)
    if config.get("auto_map"):
        raise UserError(
            f"policy.model: model type {kind!r} requires custom code, which agentrl never runs",
            fix="use an architecture that transformers has, such as Qwen3 or Llama",
        )
    if config.get("is_encoder_decoder"):
        raise UserError(f"policy.model: model type {kind!r} has an encoder and a decoder", fix="use a causal language model")
    named = next(iter(_value(config, "architectures", list) or ()), "")
    if isinstance(named, str) and named.endswith(_NO_WORDS):
        raise UserError(f"policy.model: a {named} does not generate text", fix="use a causal language model (...ForCausalLM)")
    if why := _more_than_attention(_value(config, "text_config", dict) or config):
        raise UserError(f"policy.model: model type {kind!r} does more than attention and a plain output head ({why})", fix=_OTHER_MODEL)


def _more_than_attention(config: dict[str, Any]) -> str:
    layers = config.get("layer_types")
    kinds = sorted({str(layer) for layer in layers}) if isinstance(layers, list) else []
    if others := [kind for kind in kinds if any(word in kind for word in _STATEFUL_LAYERS)]:
        return f"layers of type {', '.join(others)}"
    if not any(key in config for key in _HEADS):
        return "it has no attention heads"
    if stateful := sorted(key for key in config if key.startswith(_STATEFUL) and config[key]):
        return f"{stateful[0]} is set"
    scaled = [
        f"{key}={config[key]}" for key, plain in _NOT_PLAIN.items() if isinstance(config.get(key), int | float) and config[key] != plain
    ]
    return scaled[0] if scaled else ""


def _check_index(folder: Path) -> None:
    index = read_json(folder / _INDEX).get("weight_map")
    named = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
    there = {path.name for path in folder.iterdir()}
    if lacking := [name for name in named if name not in there]:
        raise UserError(f"{folder} lacks {', '.join(lacking)[:500]}", fix="download or copy the missing shards")


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder has a chat template. Raises the errors of `read_json`."""
    names = ("chat_template.jinja", "chat_template.json")
    return any((folder / name).is_file() for name in names) or bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def write_chat_template(folder: Path, text: str) -> None:
    """Replaces the chat templates of a model folder with one. Raises the errors of `read_json`, and `OSError` if a file cannot be
    written."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    settings = read_json(folder / "tokenizer_config.json")
    if settings.pop("chat_template", None) is not None:
        files.write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    files.write_atomically(folder / "chat_template.jinja", text)


def _stretched(config: dict[str, Any]) -> bool:
    """Whether positions are scaled, so that the context is longer than the configuration states."""
    return "factor" in (_value(config, "rope_scaling", dict) or _value(config, "rope_parameters", dict) or {})


def _largest_token(path: Path) -> int | None:
    """Returns the largest token id in tokenizer.json; None if there is no such file."""
    if not path.is_file():
        return None
    tokenizer = read_json(path)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))  # ids are indices
        return max(map(operator.index, [*ids, *(added["id"] for added in tokenizer.get("added_tokens", []))]), default=None)
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path} contains a token without a valid id", fix=_SAVE_AGAIN) from None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file in a model folder. Raises `UserError` if the file does not contain a valid JSON object, and
    `OSError` if the file cannot be opened."""
    try:
        content = json.loads(untrusted_files.read_bytes(path, most=_LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}", fix=_SAVE_AGAIN) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", fix=_SAVE_AGAIN)
    return content


def _value(config: dict[str, Any], key: str, kind: type[T]) -> T | None:
    """Returns a value in config.json; None if the key is missing. Raises `UserError` if the value has the wrong type."""
    value = config.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise UserError(f"policy.model: config.json: {key} is a {type(value).__name__}, not a {kind.__name__}", fix=_SAVE_AGAIN)
    return value
