"""Exact tokens of a chat, made once for all tests that change nothing about their tokenizer."""

from __future__ import annotations

import functools
from typing import Any

from agentrl.agent import ChatFormat
from agentrl.testing import byte_tokenizer


@functools.cache
def shared_tokenizer() -> Any:
    """One byte tokenizer for all tests that change nothing about theirs."""
    return byte_tokenizer()


def chat_of(tokenizer: Any) -> ChatFormat:
    """Made once for a tokenizer and its template: finding out that a conversation can be extended takes longer than most episodes here."""
    return _chat(tokenizer, tokenizer.chat_template)


@functools.lru_cache(maxsize=32)
def _chat(tokenizer: Any, template: str) -> ChatFormat:
    return ChatFormat(tokenizer)
