"""The tokenizer of a GGUF file, split the way that the model's own was.

A GGUF names the rule by which text is cut before its vocabulary is applied, and transformers knows some of these names. Under a
wrong rule every text still becomes tokens, but other ones than the model was trained on, and nobody notices. So a name that nobody
knows is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.model.gguf import GgufHeader

_PLAIN = ("gpt-2", "phi-2")
"""Rules that are GPT-2's, which transformers takes where it knows no other."""

_DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell")
"""Every digit by itself, then GPT-2's rule. By that one alone, `\\n\\n1` and indented numbers become other tokens."""

_KEY = "tokenizer.ggml.pre"


def load_tokenizer(folder: Path, header: GgufHeader) -> Any:
    """The tokenizer of the GGUF file in `folder`. Raises `UserError` for one that would not cut text as the model's own does."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level, rule = header.text("tokenizer.ggml.model") == "gpt2", header.text(_KEY)
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN, *_DIGITS_ALONE}
    if byte_level and rule not in known:
        raise UserError(
            f"{header.path.name} cuts text by the rule {rule!r} ({_KEY}), and no tokenizer here does: the model would see other tokens than"
            " it was trained on",
            fix="import the model's Hugging Face folder, which has a tokenizer.json",
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=header.path.name)
    if byte_level and rule in _DIGITS_ALONE:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer
