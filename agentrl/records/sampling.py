"""The distribution from which tokens are sampled, and the support of each sampled token."""

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
"""Maximum `Sampling.top_k` if supports are recorded."""

TIES = 8
"""Number of logprobs requested in addition to `top_k`. vLLM keeps every token that ties with the last of the top k, so a support may be
larger than k. It is complete if the returned list extends beyond it."""

CONSTRAINED_TOP_K = 20
"""The `top_k` of constrained tokens if `Sampling` sets no `top_k`. With a larger value, ties of the last tokens would be more likely."""

MAX_SUPPORT = MAX_TOP_K + TIES
"""Maximum number of tokens in one support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Record):
    """The sampling distribution: softmax(logits / temperature), truncated and renormalized.

    Truncation keeps, in this order: tokens with at least `min_p` times the probability of the most likely token; the `top_k` most likely of
    these tokens; the smallest set of the most likely of these whose renormalized probabilities sum to `top_p`.
    """

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    supports: bool = False  # also return the support of every token, which training needs

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(f"{self} needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1")
        if self.supports and not (self.temperature and 0 < self.top_k <= MAX_TOP_K):
            raise ValueError(f"supports need a temperature above 0 and top_k from 1 to {MAX_TOP_K}: {self}")

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from only a part of the vocabulary."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def constrained(self) -> Self:
        """Returns the settings for sampling under a constraint. Only the server knows which tokens the constraint allows, so it must report
        supports.

        At temperature 0, the settings do not change: nothing is trained, so no supports are needed.
        """
        return replace(self, top_k=self.top_k or CONSTRAINED_TOP_K, supports=True) if self.temperature else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Supports(Record):
    """The support of the truncated distribution of each of T sampled tokens: the tokens that could have been drawn.

    `Supports.from_rows([(3, 7), ()])` describes a token that was drawn from two tokens, and a token that was drawn from the whole
    vocabulary. Supports are recorded and never recomputed, because different weights or different rounding would yield different supports.
    The ids are packed into bytes to save memory.
    """

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}  # for agentrl.records.codec

    sizes: bytes  # [T] uint16, little-endian; 0 means the whole vocabulary
    ids: bytes  # [sum of sizes] uint32, little-endian; ascending in each support

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        sizes, ids = unpacked("H", self.sizes), unpacked("I", self.ids)
        if sum(sizes) != len(ids):
            raise ValueError(f"Supports: sizes add up to {sum(sizes)}, but there are {len(ids)} ids")
        if max(sizes, default=0) > MAX_SUPPORT or max(ids, default=0) >= 1 << 31:
            raise ValueError(f"Supports: a support has more than {MAX_SUPPORT} tokens, or an id has more than 31 bits")
        rises = bytes(map(operator.lt, ids, ids[1:]))  # ids ascend within a support, not between supports
        between = {edge - 1 for edge in accumulate(sizes) if 0 < edge < len(ids)}
        if rises.count(0) != sum(not rises[index] for index in between):
            raise ValueError("Supports: the ids of a support must ascend")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Self:
        """Packs the ids of each support, in any order; an empty row means the whole vocabulary. Raises `ValueError` if a row contains
        duplicates or more than `MAX_SUPPORT` ids."""
        known = [sorted(row) for row in rows]
        try:
            return cls(sizes=packed("H", map(len, known)), ids=packed("I", (token for row in known for token in row)))
        except OverflowError as error:
            raise ValueError(f"Supports: {error}") from None

    @classmethod
    def join(cls, parts: Iterable[Supports | int]) -> Self | None:
        """Concatenates supports. A number n in `parts` stands for n tokens from the whole vocabulary. Returns None if every token is from
        the whole vocabulary."""
        known = [part if isinstance(part, Supports) else cls(sizes=bytes(2 * part), ids=b"") for part in parts]
        ids = b"".join(part.ids for part in known)
        return cls(sizes=b"".join(part.sizes for part in known), ids=ids) if ids else None

    def __len__(self) -> int:
        return len(self.sizes) // 2

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of all supports, concatenated."""
        return unpacked("I", self.ids)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each support; an empty row means the whole vocabulary."""
        ids = unpacked("I", self.ids)
        edges = accumulate(unpacked("H", self.sizes), initial=0)
        return tuple(tuple(ids[start:end]) for start, end in pairwise(edges))

    def check(self, where: str, token_ids: Sequence[int]) -> None:
        """Raises `ValueError` unless there is one support per token, which contains the token."""
        if len(self) != len(token_ids):
            raise ValueError(f"{where}: {len(token_ids)} tokens but {len(self)} supports")
        for index, (token, row) in enumerate(zip(token_ids, self.rows, strict=True)):
            if row and token not in row:
                raise ValueError(f"{where}: token {index} ({token}) is not in its support")


def check_forced_tokens(where: str, forced: Sequence[int], count: int) -> None:
    """Raises `ValueError` unless `forced` are ascending indices of `count` tokens, the last of which was sampled."""
    if forced and not (forced[0] >= 0 and all(map(operator.lt, forced, forced[1:])) and forced[-1] < count - 1):
        raise ValueError(f"{where}: forced indices must ascend, and a sampled token must follow the last of them")


def unpacked(code: str, data: bytes) -> array[Any]:
    """Unpacks little-endian numbers of the array type `code`. Raises `ValueError` if a number is incomplete."""
    values: array[Any] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed(code: str, numbers: Iterable[float]) -> bytes:
    """Packs numbers of the array type `code`, little-endian."""
    values = array(code, numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """How to sample one completion. Logprobs of the sampling distribution are always returned."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings; the server may sample more, and the caller drops tokens after the first match
    constraint: str = ""  # JSON of a vLLM structural tag; empty means unconstrained
