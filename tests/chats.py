"""A tokenizer and chat formats that tests share, if they do not change their tokenizer."""

from __future__ import annotations

import functools
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.testing import byte_tokenizer


@functools.cache
def shared_tokenizer() -> Any:
    """The byte tokenizer of all tests that do not change their tokenizer."""
    return byte_tokenizer()


def chat_of(tokenizer: Any) -> ChatFormat:
    """Returns a cached format: probing whether conversations can be extended takes longer than most episodes of tests."""
    return _chat(tokenizer, tokenizer.chat_template)


@functools.lru_cache(maxsize=32)
def _chat(tokenizer: Any, template: str) -> ChatFormat:
    return ChatFormat(tokenizer)
