"""Puts untrusted text into a judge's prompt as data.

The text is enclosed in random delimiters. Anything in it that looks like a delimiter or a control token of a chat template is broken up.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Mapping

NONCE_PLACEHOLDER = "-"  # replaces the nonce in prompts that are only compared, for example in a cache key

_SPECIAL = (
    "s|bos|eos|pad|unk|mask|cls|sep|sys|system|user|human|assistant|im_start|im_end|endoftext|eot|start_of_turn|end_of_turn|turn"
    "|think|thinking|reasoning|tool|tools|tool_call|tool_calls|tool_response|function|functions|function_calls|invoke"
    "|start_header_id|end_header_id|instruction|instructions|inst|(?:begin|start|end)_of_[a-z]+|(?:begin|end)_[a-z]+_tag|reserved_[a-z0-9_]+"
    "|unused_?[0-9]+|extra_id_[0-9]+|arg_key|arg_value|observation|eom|eod"
)
# Where a control token or a delimiter may start. A middle dot after the first character breaks it.
_BEGINS = re.compile(
    r"<(?=[|\uff5c])"  # <|im_start|>, and the same with a full-width bar
    r"|[|\uff5c](?=>)"
    rf"|<(?=/?(?i:{_SPECIAL})\b[^<>\n]{{0,40}}>)"  # <s>, </think>, <start_of_turn>
    r"|\[(?=/?[A-Z][A-Z_]{2,24}\])"  # [INST], [/TOOL_CALLS]
    r"|<(?=</?SYS>>)"
    r"|<(?=<<)|>(?=>>)"  # the delimiters below
)
_DOT = "\N{MIDDLE DOT}"
_WHITE_SPACE = frozenset("\n\t")
_JOINERS = frozenset("\u200c\u200d")  # part of Persian words and of emoji


def neutralize(text: str) -> str:
    """Breaks up control tokens and delimiters in text, and replaces control characters, in linear time.

    A middle dot is inserted into control tokens and delimiters. Control characters, bidirectional overrides and invisible tags are replaced
    with U+FFFD.
    """
    if not text.isascii() or not text.isprintable():
        text = text.translate(_VISIBLE)
    return _BEGINS.sub(lambda match: match[0] + _DOT, text)


def truncate_middle(text: str, most: int) -> str:
    """Shortens text to about `most` characters. Keeps the start and the end, and marks the omission."""
    if len(text) <= most:
        return text
    head = (most + 1) // 2
    return f"{text[:head]}\n[... {len(text) - most:,} characters left out ...]\n{text[len(text) - (most - head) :]}"


def new_nonce(texts: Mapping[str, str]) -> str:
    """Returns a nonce for the delimiters of one query: 128 random bits, as hex digits that occur in none of the strings."""
    while True:
        nonce = secrets.token_hex(16)
        if not any(nonce in text for text in texts.values()):
            return nonce


def delimited(name: str, text: str, *, nonce: str) -> str:
    """Returns the neutralized text between two delimiters that contain `name` and `nonce`."""
    return f"{begin_marker(name, nonce)}\n{neutralize(text)}\n{end_marker(name, nonce)}"


def begin_marker(name: str, nonce: str) -> str:
    """Returns the delimiter before the text `name`."""
    return f"<<<BEGIN {name.upper()} {nonce}>>>"


def end_marker(name: str, nonce: str) -> str:
    """Returns the delimiter after the text `name`."""
    return f"<<<END {name.upper()} {nonce}>>>"


class _Visible(dict[int, str]):
    """Maps each character to its replacement, computed on first use."""

    def __missing__(self, number: int) -> str:
        char = chr(number)
        hidden = char not in _WHITE_SPACE and char not in _JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co")
        self[number] = "\N{REPLACEMENT CHARACTER}" if hidden else char
        return self[number]


_VISIBLE = _Visible()
