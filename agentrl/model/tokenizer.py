"""The tokenizer of a GGUF file.

A GGUF names the rule that splits text before the vocabulary is applied, and transformers knows some of these names. With a wrong rule
every text still becomes tokens, but not those that the model was trained on. So unknown names are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.model.gguf import GgufHeader

_PLAIN = ("gpt-2", "phi-2")
"""Names of GPT-2's rule, transformers' default."""

_DIGITS_ALONE = ("smollm", "starcoder", "refact", "codeshell")
"""Names of the rule that splits off every digit, then applies GPT-2's. It differs for `\\n\\n1` and indented numbers."""

_KEY = "tokenizer.ggml.pre"


def load_tokenizer(folder: Path, header: GgufHeader) -> Any:
    """Loads the tokenizer of the GGUF file in `folder`. Raises `UserError` for an unknown splitting rule."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level, rule = header.text("tokenizer.ggml.model") == "gpt2", header.text(_KEY)
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *_PLAIN, *_DIGITS_ALONE}
    if byte_level and rule not in known:
        raise UserError(
            f"{header.path.name} splits text by the unknown rule {rule!r} ({_KEY}): the model would see other tokens than in training",
            fix="import the model's Hugging Face folder, which has a tokenizer.json",
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=header.path.name)
    if byte_level and rule in _DIGITS_ALONE:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer
