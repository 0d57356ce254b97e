"""Images in conversations: how text and token ids refer to them.

In text, an image is represented by `<image sha256:...>`, with the hash of a PNG file in the run's folder `media`. Before an image is stored
in that folder, it is represented by `<image base64:...>`, with the bytes of a PNG, JPEG or npy file (`image_text`).

In token ids, each token of an image also identifies the image: `token | FIRST | tag << 23`, where `FIRST` is set only for the first token
and the tag is the first 40 bits of the hash. Two contexts are therefore equal if and only if their text and their images are equal, and
records, requests and shared prefixes need no additional field.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.records.trajectory import Trajectory

FIRST = 1 << 22
"""Flag of an image's first token. The ids of text tokens are smaller."""
NAME_DIGITS = 10
"""Number of hexadecimal digits of the hash that name an image's file and tag its tokens."""
MARK = "<image "
"""The start of an image reference in text."""
MAX_IMAGE_BYTES = 4 << 20
"""Maximum size of an image, in bytes, before it is stored."""
MAX_IMAGES = 8
"""Maximum number of images in one observation or tool output."""
MAX_IN_PROMPT = 64
"""Maximum number of images in a context. No turn is sampled from a context with more images."""
REFERENCE = re.compile(rf"<image (?:sha256:([0-9a-f]{{64}})|base64:([A-Za-z0-9+/]{{4,{4 * -(-MAX_IMAGE_BYTES // 3)}}}={{0,2}}))>")
_TAG = 23


def image_text(content: bytes) -> str:
    """Returns the text that represents an image (PNG, JPEG, or an npy file of pixels) in prompts, observations and tool outputs."""
    return f"{MARK}base64:{base64.b64encode(content).decode()}>"


def image_ids(token_ids: Sequence[int], sha256: str) -> tuple[int, ...]:
    """Returns the tokens of one image, tagged with its hash."""
    tag = int(sha256[:NAME_DIGITS], 16) << _TAG
    return tuple(token | tag | (0 if number else FIRST) for number, token in enumerate(token_ids))


def plain_ids(token_ids: Iterable[int]) -> list[int]:
    """Returns the token ids without image tags, as the model knows them."""
    return [token & (FIRST - 1) for token in token_ids]


def image_blocks(token_ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yields (start, end, first digits of the hash) for each image in token ids. Raises `ValueError` if the first tokens of an image are
    missing."""
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
    """Removes tokens at the start of `token_ids` that belong to an image whose first tokens were cut off, and returns the rest."""
    start = next((at for at, token in enumerate(token_ids) if token < FIRST or token & FIRST), len(token_ids))
    return tuple(token_ids[start:])


def without_end(token_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the first `most` tokens, without the tokens of an image whose last tokens would be cut off."""
    end = min(most, len(token_ids))
    while 0 < end < len(token_ids) and token_ids[end] >= FIRST and not token_ids[end] & FIRST:
        end -= 1
    return tuple(token_ids[:end])
