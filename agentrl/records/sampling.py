"""What tokens are drawn from: a distribution, and of each sampled token the tokens that it could have been. Standard library only."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

from agentrl.records.fields import Record

MAX_TOP_K = 128
"""Largest `Sampling.top_k` with which supports are kept."""

TIES = 8
"""How many logprobs beyond `top_k` a server is asked for. vLLM keeps every token that ties with the last of the top k, so that a support
may be larger; it is known to be complete when the server's list reaches beyond it."""

CONSTRAINED_TOP_K = 20
"""The `top_k` of constrained tokens if `Sampling` has none. The larger it is, the more likely the last tokens tie."""

MAX_SUPPORT = MAX_TOP_K + TIES
"""Most tokens in one support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Record):
    """The distribution that tokens are drawn from: softmax(logits / temperature), truncated and renormalised.

    Truncated in this order: to tokens with at least `min_p` times the likeliest one's probability; to the `top_k` likeliest of
    these; and to the fewest of these, likeliest first, that have `top_p` of what they have together.
    """

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    supports: bool = False  # answer the support of every token too, as training needs it

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(f"{self} is out of range")
        if self.supports and not (self.temperature and 0 < self.top_k <= MAX_TOP_K):
            raise ValueError(f"supports are bounded by top_k, from 1 to {MAX_TOP_K}, and the likeliest token alone has none: {self}")

    @property
    def truncated(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def constrained(self) -> Self:
        """The sampling of constrained tokens. Only the server knows the allowed tokens; it reports them as supports, which have a bound.

        At temperature 0 nothing is trained, and no supports are needed.
        """
        return replace(self, top_k=self.top_k or CONSTRAINED_TOP_K, supports=True) if self.temperature else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Supports(Record):
    """For each of T sampled tokens, the tokens that it could have been: the support of the truncated distribution it was drawn from.

    End to end in bytes, because they are many: `Supports.of([(3, 7), ()])` is of a token drawn from two, and of one drawn from the
    whole vocabulary. They are recorded, never recomputed: other weights, or another rounding, would give other supports.
    """

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.records.codec

    sizes: bytes  # [T] uint16, little-endian; 0: the whole vocabulary
    ids: bytes  # [sum of sizes] uint32, little-endian; ascending in each support

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        sizes, ids = _unpacked("H", self.sizes), _unpacked("I", self.ids)
        if sum(sizes) != len(ids):
            raise ValueError(f"Supports: sizes add up to {sum(sizes)}, but there are {len(ids)} ids")
        if max(sizes, default=0) > MAX_SUPPORT or max(ids, default=0) >= 1 << 31:
            raise ValueError(f"Supports: one of more than {MAX_SUPPORT} tokens, or an id of more than 31 bits")
        rises = bytes(map(operator.lt, ids, ids[1:]))
        between = {edge - 1 for edge in accumulate(sizes) if 0 < edge < len(ids)}  # from one support to the next nothing needs to rise
        if rises.count(0) != sum(not rises[place] for place in between):
            raise ValueError("Supports: the ids of a support must ascend")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Self:
        """From the ids of each support, in any order and each once; none stand for the whole vocabulary."""
        known = [sorted(row) for row in rows]
        try:
            return cls(sizes=_packed("H", map(len, known)), ids=_packed("I", (token for row in known for token in row)))
        except OverflowError as error:
            raise ValueError(f"Supports: {error}") from None

    @classmethod
    def join(cls, parts: Iterable[Supports | int]) -> Self | None:
        """Of several stretches of tokens; a number stands for that many drawn from the whole vocabulary. None where all were."""
        known = [part if isinstance(part, Supports) else cls(sizes=bytes(2 * part), ids=b"") for part in parts]
        ids = b"".join(part.ids for part in known)
        return cls(sizes=b"".join(part.sizes for part in known), ids=ids) if ids else None

    def __len__(self) -> int:
        return len(self.sizes) // 2

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of all supports, end to end."""
        return _unpacked("I", self.ids)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each support; none where it is the whole vocabulary."""
        ids = _unpacked("I", self.ids)
        edges = accumulate(_unpacked("H", self.sizes), initial=0)
        return tuple(tuple(ids[start:end]) for start, end in pairwise(edges))

    def check(self, where: str, token_ids: Sequence[int]) -> None:
        """Raises `ValueError` unless there is one for each token, and holds it."""
        if len(self) != len(token_ids):
            raise ValueError(f"{where}: {len(token_ids)} tokens but {len(self)} supports")
        for place, (token, row) in enumerate(zip(token_ids, self.rows, strict=True)):
            if row and token not in row:
                raise ValueError(f"{where}: token {place} ({token}) is not in its support")


def check_forced_tokens(where: str, forced: Sequence[int], count: int) -> None:
    """Raises `ValueError` unless these are ascending places among `count` tokens, the last of which was sampled."""
    if forced and not (forced[0] >= 0 and all(map(operator.lt, forced, forced[1:])) and forced[-1] < count - 1):
        raise ValueError(f"{where}: forced places must ascend, and a sampled token must follow the last of them")


def _unpacked(code: str, data: bytes) -> array[int]:
    """Little-endian numbers of array's type `code`. Raises `ValueError` for bytes that are no whole number of them."""
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _packed(code: str, numbers: Iterable[int]) -> bytes:
    values = array(code, numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """How to sample one completion. Logprobs are always returned, of the distribution that was sampled from."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts that end it; the server may sample further, and the caller uses the tokens up to the first
    constraint: str = ""  # constraint of the tokens, as the JSON of vLLM's structural tag; empty: none
