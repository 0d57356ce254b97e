"""Converts token ids to text with the `tokenizer.json` of a run's model.

The file is read as data. No tokenizer is loaded, and no code from the model is run.
"""

from __future__ import annotations

import gc
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.base.untrusted_files import read_bytes
from agentrl.records.images import FIRST

MAX_BYTES = 48 << 20
"""Maximum size of a `tokenizer.json` in bytes."""
_MAX_TOKENS = 1 << 20
_MAX_TOKEN_CHARS = 1024
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = "\u2581"  # a space in SentencePiece vocabularies


class Vocabulary:
    """Maps token ids to bytes. Ids without an entry have no text.

    The tokens are stored in one byte string, because a million Python objects would need 80 MiB.
    """

    def __init__(self, tokens: dict[int, bytes], special: frozenset[int]) -> None:
        size = max(tokens, default=-1) + 1
        self._ends = array("I", bytes(4 * size))
        pieces, end = [], 0
        for number in range(size):
            piece = tokens.get(number, b"")
            pieces.append(piece)
            end += len(piece)
            self._ends[number] = end
        self._data = b"".join(pieces)
        self.special = special

    def __len__(self) -> int:
        return len(self._ends)

    def token(self, number: int) -> bytes:
        """Returns the bytes of a token; empty for an unknown id. `number` may be the id of an image token (`agentrl.records.images`)."""
        number &= FIRST - 1
        if not 0 <= number < len(self._ends):
            return b""
        return self._data[self._ends[number - 1] if number else 0 : self._ends[number]]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns one text per token. If several tokens encode one character, the last of them has the character as its text, and the text
        of the others is empty."""
        texts, rest = [], b""
        for position, number in enumerate(ids):
            data = rest + self.token(number)
            text, rest = _decoded(data, last=position == len(ids) - 1)
            texts.append(text)
        return texts

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a sequence of tokens."""
        return b"".join(map(self.token, ids)).decode("utf-8", "replace")


def _decoded(data: bytes, *, last: bool) -> tuple[str, bytes]:
    """Splits bytes into the complete text and the bytes of an incomplete last character, which the next token continues."""
    if not last:
        for length in (1, 2, 3):
            tail = data[-length:]
            if len(tail) == length and tail[0] >= 0xC0 and length < _character_size(tail[0]):
                return data[:-length].decode("utf-8", "replace"), tail
    return data.decode("utf-8", "replace"), b""


def _character_size(first: int) -> int:
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4 if first < 0xF8 else 1


def read_vocabulary(path: Path, *, inside: Path) -> Vocabulary:
    """Reads a `tokenizer.json`. Raises `OSError` (`FileNotFoundError` if it does not exist) if the file cannot be opened, and `ValueError`
    if it is outside `inside`, is too large or has no vocabulary."""
    try:
        data = json.loads(read_bytes(path, most=MAX_BYTES, inside=inside))
        special, tokens = {}, {}
        byte_level = _has_type(data, "ByteLevel")
        for token, number in _entries(data.get("model")):
            tokens[number] = _token_bytes(token, byte_level=byte_level)
        for added in data.get("added_tokens") or []:
            number, token = added["id"], added["content"]
            if _fits(token, number):
                tokens[number] = token.encode("utf-8", "replace")
                special[number] = bool(added.get("special"))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"has no vocabulary: {type(error).__name__}") from None
    if not tokens:
        raise ValueError("has no vocabulary")
    del data
    gc.collect()  # frees the merges, which may number hundreds of thousands
    return Vocabulary(tokens, frozenset(number for number, marked in special.items() if marked))


def _entries(model: Any) -> Iterator[tuple[str, int]]:
    vocabulary = model["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], number) for number, entry in enumerate(vocabulary))
    yield from ((token, number) for token, number in pairs if _fits(token, number))


def _fits(token: Any, number: Any) -> bool:
    return isinstance(token, str) and len(token) <= _MAX_TOKEN_CHARS and type(number) is int and 0 <= number < _MAX_TOKENS


def _has_type(data: Any, kind: str) -> bool:
    """Whether the decoder, the pre-tokenizer, or a part of one of them has the type `kind`."""
    parts = [data.get("decoder"), data.get("pre_tokenizer")]
    for part in parts[:2]:
        if isinstance(part, dict):
            parts += [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
    return any(isinstance(part, dict) and part.get("type") == kind for part in parts)


def _token_bytes(token: str, *, byte_level: bool) -> bytes:
    if byte_level:
        table = _byte_of_character()
        return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode("utf-8", "replace")
    if match := _BYTE.fullmatch(token):
        return bytes((int(match[1], 16),))
    return token.replace(_MARK, " ").encode("utf-8", "replace")


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns a mapping character -> byte, the alphabet of byte-level BPE. Printable characters map to themselves, and characters from
    U+0100 on map to the other bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
