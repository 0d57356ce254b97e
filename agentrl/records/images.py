"""Images in conversations: how text and token ids refer to them.

In text an image is `<image sha256:...>`, the hash of a PNG file in the run's folder `media`. Before it is stored there, it is
`<image base64:...>`, with the bytes of a PNG, JPEG or npy file (`image_text`).

In token ids, each token of an image also carries the image: `token | FIRST | tag << 23`, where `FIRST` is set for the first token only and
the tag is the first 40 bits of the hash. So contexts are equal exactly if their text and their images are equal, and records, requests and
shared prefixes need no other field.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.records.trajectory import Trajectory

FIRST = 1 << 22
"""Flag of an image's first token. Tokens of text are smaller."""
NAME_DIGITS = 10
"""Hexadecimal digits of the hash that name an image's file and tag its tokens."""
MARK = "<image "
"""The start of a reference."""
MAX_IMAGE_BYTES = 4 << 20
"""Maximum bytes of an image before it is stored."""
MAX_IMAGES = 8
"""Maximum number of images of one observation or tool output."""
MAX_IN_PROMPT = 64
"""Maximum number of images of a context. No turn follows a context with more images."""
REFERENCE = re.compile(rf"<image (?:sha256:([0-9a-f]{{64}})|base64:([A-Za-z0-9+/]{{4,{4 * -(-MAX_IMAGE_BYTES // 3)}}}={{0,2}}))>")
_TAG = 23


def image_text(content: bytes) -> str:
    """Returns the text that shows an image, for prompts, observations and tool outputs: a PNG or JPEG file, or an npy file of pixels."""
    return f"{MARK}base64:{base64.b64encode(content).decode()}>"


def image_ids(token_ids: Sequence[int], sha256: str) -> tuple[int, ...]:
    """Returns the tokens of one image, tagged with its hash."""
    tag = int(sha256[:NAME_DIGITS], 16) << _TAG
    return tuple(token | tag | (0 if number else FIRST) for number, token in enumerate(token_ids))


def plain_ids(token_ids: Iterable[int]) -> list[int]:
    """Returns the token ids as the model knows them, without tags."""
    return [token & (FIRST - 1) for token in token_ids]


def image_blocks(token_ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and name of each image in token ids. Raises `ValueError` if the first tokens of an image are missing."""
    at = 0
    while at < len(token_ids):
        start, tag = at, token_ids[at] >> _TAG
        at += 1
        if tag:
            if not token_ids[start] & FIRST:
                raise ValueError(f"the token ids start inside image {tag:010x}")
            while at < len(token_ids) and token_ids[at] >> _TAG == tag and not token_ids[at] & FIRST:
                at += 1
            yield start, at, f"{tag:0{NAME_DIGITS}x}"


def count_images(token_ids: Sequence[int]) -> int:
    """Returns the number of images in a context."""
    return sum(token & FIRST > 0 for token in token_ids) if max(token_ids, default=0) >= FIRST else 0


def images_of(trajectories: Iterable[Trajectory], prompts: Iterable[Sequence[int]] = ()) -> set[str]:
    """Returns the names of the images in the contexts of trajectories, and in prompts."""
    contexts = [ids for trajectory in trajectories for ids in (trajectory.last_state, *(turn.prompt_ids for turn in trajectory.turns))]
    return {name for ids in (*contexts, *prompts) if max(ids, default=0) >= FIRST for *_, name in image_blocks(ids)}


def without_cut_image(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the end of a context without the tokens of an image whose first tokens are cut off."""
    start = next((at for at, token in enumerate(token_ids) if token < FIRST or token & FIRST), len(token_ids))
    return tuple(token_ids[start:])


def without_end(token_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the first `most` tokens, without the tokens of an image whose last tokens are cut off."""
    end = min(most, len(token_ids))
    while 0 < end < len(token_ids) and token_ids[end] >= FIRST and not token_ids[end] & FIRST:
        end -= 1
    return tuple(token_ids[:end])
